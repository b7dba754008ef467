"""Old answers: the same question takes the fewest steps, whatever was answered; nobody drafts from another's answers.

That no draft changes a token is the contract of all drafters (`test_contract.py`).
"""

import json
import random
import signal
import sqlite3
import warnings
from collections import OrderedDict
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from forked import Forks
from sentences import Said

from runtime.core.block_store import FILE, BlockStore
from runtime.core.old_answers import TAIL, Answer, Marks
from runtime.core.params import FIELDS, SamplingConfig, SamplingParams
from runtime.core.request import Request, Sequence
from runtime.core.text_tables import read_answers, write_answers
from runtime.drafters.answer_lookup import MAX_OWNERS, AnswerLookup, Answers
from runtime.drafters.specs import AnswerDrafter, ChainDrafter, SuffixDrafter
from runtime.engine.engine import KVCacheConfig
from runtime.llm import LLM
from runtime.util.errors import SpecDecWarning

NUM_TOKENS, DRAFT_LEN = 24, 4
FEWEST = ceil(NUM_TOKENS / (DRAFT_LEN + 1))
OLD_ANSWERS = AnswerDrafter(DRAFT_LEN)
QUESTIONS = [[(7 * i * i + 3 * i + k) % 29 + 3 for i in range(12 + 9 * k)] for k in range(3)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
SAMPLED = GREEDY | {"temperature": 0.7, "seed": 5, "n": 2}


def ask(
    llm: LLM, questions: Any, params: dict[str, Any], drafter: Any = OLD_ANSWERS
) -> tuple[list[list[int]], int, int]:
    """(outputs, steps of the longest one, drafted tokens)."""
    results = llm.generate(questions, SamplingParams(**params), drafter=drafter, draft_len_mode="fixed")
    outputs = [output for result in results for output in result.outputs]
    stats = [output.stats for output in outputs]
    num_drafted = sum(one.num_draft_tokens for one in stats)
    return [list(output.token_ids) for output in outputs], max(one.num_steps for one in stats), num_drafted


@pytest.mark.parametrize("mode", ["leader", "orchestrator"])
def test_the_same_question_takes_the_fewest_steps(mode: Any, llama_engine_dir: Path) -> None:
    """Greedily, and by the same seed, each of `n` outputs by its own answer; in a batch, alone and before lookups."""
    with LLM(llama_engine_dir, mode=mode) as llm:
        assert ask(llm, QUESTIONS, GREEDY)[1:] == (NUM_TOKENS, 0)
        for params in (GREEDY, SAMPLED):
            expected, _, _ = ask(llm, QUESTIONS, params, None)
            for drafter in (OLD_ANSWERS, ChainDrafter([SuffixDrafter(2), AnswerDrafter(DRAFT_LEN)])):
                assert ask(llm, QUESTIONS, params, drafter)[0] == expected
                assert ask(llm, QUESTIONS, params, drafter)[:2] == (expected, FEWEST)
        other = GREEDY | {"temperature": 0.9, "seed": 1, "repetition_penalty": 1.2}
        outputs, _, num_drafted = ask(llm, QUESTIONS, other)
        assert outputs == ask(llm, QUESTIONS, other, None)[0] and num_drafted, "asked in another way"


def answer_of(prompt: list[int], output: list[int], **sampling: Any) -> Answer:
    request = Request(0, tuple(prompt), len(output), sampling=SamplingConfig(**sampling))
    sequence = Sequence(request, [*prompt, *output])
    answer = Answer.of(sequence, Marks.of(request))
    assert answer is not None
    return answer


def test_marks_of_greedy_requests_do_not_depend_on_the_draw() -> None:
    others = {"top_p": 0.5, "min_p": 0.5, "random_seed": 3, "temperature": 0.0, "top_k": 1}
    assert others.keys() == {field.config or name for name, (_, field) in FIELDS.items() if field.shapes == "draw"}
    ways = [Marks.of(Request(0, (5,), 2, sampling=SamplingConfig(**{name: others[name]}))).way for name in others]
    assert {*ways} == {Marks.of(Request(0, (5,), 2, return_index=1)).way}


def test_a_question_finds_the_answer_to_what_is_most_like_it() -> None:
    """The same prompt, else the same 64 last tokens, else most of its words; not what only a template has in common."""
    rng = random.Random(0)
    template = [rng.randrange(50_000) for _ in range(40)]
    prompts = [[*template, *(rng.randrange(50_000) for _ in range(80))] for _ in range(30)]
    answers = Answers()
    for i, prompt in enumerate(prompts):
        answers.add(None, answer_of(prompt, [i] * 5))

    def found(prompt: list[int], **sampling: Any) -> int | None:
        answer = answers.find(None, Marks.of(Request(0, tuple(prompt), 5, sampling=SamplingConfig(**sampling))))
        return None if answer is None else answer.ids()[0]

    for i, prompt in enumerate(prompts):
        assert found(prompt) == found(prompt, random_seed=3) == found(prompt, top_k=0, random_seed=3) == i
        assert found([1, 2, 3, *prompt[-TAIL:]]) == i
        changed = list(prompt)
        for at in rng.sample(range(len(prompt)), len(prompt) // 10):
            changed[at] = rng.randrange(50_000)
        assert found([*changed[:-1], 7]) == i, "a tenth of its tokens, and the last"
        assert found([*template, *(rng.randrange(50_000) for _ in range(80))]) is None
    answers.add(None, answer_of(prompts[0], [77] * 5, top_k=0, random_seed=3))
    assert (found(prompts[0]), found(prompts[0], top_k=0, random_seed=3)) == (0, 77), "each way has its own"


def test_nobody_drafts_from_another_owners_answer(llama_engine_dir: Path, tmp_path: Path) -> None:
    """Answers in memory and on disk, by counts of drafted tokens: nothing depends on time."""

    def num_drafted(llm: LLM, salt: str | None) -> int:
        prompt = {"prompt_token_ids": QUESTIONS[0]} | ({} if salt is None else {"cache_salt": salt})
        return ask(llm, [prompt], GREEDY)[2]

    owners = (None, "mine", "yours")
    for i in range(2):
        with LLM(llama_engine_dir, kv_cache=KVCacheConfig(disk_dir=tmp_path / "kv")) as llm:
            for salt in owners[: i + 1]:
                assert (num_drafted(llm, salt) > 0) == (i > 0)
                assert num_drafted(llm, salt) > 0
            assert num_drafted(llm, owners[i + 1]) == 0
            llm.session(OLD_ANSWERS, "fixed").clear_pools()
            llm.engine.flush_disk()
            with llm.engine.without_disk():
                assert num_drafted(llm, None) == 0, "as a warm-up begins"
    assert b"mine" not in (tmp_path / "kv" / FILE).read_bytes()


ANSWERS = f"""
import json, sys
from pathlib import Path
from specdec_cli import AnswerDrafter, KVCacheConfig, LLM, SamplingParams
questions, params = json.loads(sys.argv[3])
with LLM(Path(sys.argv[1]), kv_cache=KVCacheConfig(disk_dir=sys.argv[2])) as llm:
    llm.generate(questions, SamplingParams(**params), drafter=AnswerDrafter({DRAFT_LEN}))
    llm.engine.flush_disk()
    print("kept", flush=True)
    while True:
        for i in range(3, 60):
            llm.generate([i] * i, SamplingParams(max_tokens=3), drafter=AnswerDrafter({DRAFT_LEN}))
"""


def test_answers_outlive_a_kill_and_a_damaged_one_is_told_once(
    llama_engine_dir: Path, tmp_path: Path, forks: Forks, said: Said
) -> None:
    """Another process writes them, and is killed while it writes more."""
    kv_cache = KVCacheConfig(disk_dir=tmp_path / "kv")
    process = forks.start(llama_engine_dir, tmp_path / "kv", json.dumps([QUESTIONS, GREEDY]), program=ANSWERS)
    assert process.stdout.readline() == "kept\n", process.stderr.read()
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.close()
    with LLM(llama_engine_dir, kv_cache=kv_cache) as llm:
        expected, num_steps, _ = ask(llm, QUESTIONS, GREEDY)
        assert num_steps == FEWEST
        llm.engine.flush_disk()
    with sqlite3.connect(tmp_path / "kv" / FILE) as database:
        database.execute("UPDATE answers SET tokens=zeroblob(length(tokens))")
    database.close()
    for is_damaged in (True, False):
        with warnings.catch_warnings(record=True) as told, LLM(llama_engine_dir, kv_cache=kv_cache) as llm:
            warnings.simplefilter("always", SpecDecWarning)
            outputs, _, num_drafted = ask(llm, QUESTIONS, GREEDY)
            ask(llm, [QUESTIONS[0][:7]], GREEDY)
            assert outputs == expected and (num_drafted == 0) == is_damaged
        assert len(told) == is_damaged
        if told:
            said(str(told[0].message), "damaged", tmp_path)


def test_the_last_used_are_kept_and_their_number_is_bounded(tmp_path: Path) -> None:
    """Against a list of what was used; then on disk, where all owners of a directory share the room."""
    rng, answers = random.Random(1), Answers(max_tokens=100)
    kept = OrderedDict[tuple[str | None, int], int]()
    for _ in range(400):
        owner, number, length = rng.choice([None, "a"]), rng.randrange(30), rng.randrange(2, 40)
        prompt = [number] * 80
        if rng.random() < 0.5:
            answers.add(owner, answer_of(prompt, [number + length] * length))
            kept[owner, number] = length
        elif answers.find(owner, Marks.of(Request(0, tuple(prompt), 2))) is None:
            assert (owner, number) not in kept
            continue
        kept.move_to_end((owner, number))
        while sum(kept.values()) > 100:
            kept.popitem(last=False)
        assert answers.num_tokens == sum(kept.values())
    answers.add(None, answer_of([1], [5] * 101))
    assert answers.num_tokens == sum(kept.values()), "one that is too long is left out"
    marks = Marks.of(Request(0, (1, 2, 3), 2))
    assert all(answers.find(f"owner {i}", marks) is None for i in range(MAX_OWNERS))
    assert not answers.num_tokens and len(answers._shelves) == MAX_OWNERS
    store = BlockStore(tmp_path, 1 << 20)
    for first in range(0, 200, 20):
        batch = range(first, first + 20)
        write_answers(store, "words", [(("a", "b")[i % 2], answer_of([i] * 3, [i] * 300)) for i in batch])
    found = read_answers(store, "words", "a", 0).answers
    assert 5 < len(found) < 25 and [one.ids()[0] for one in found] == [*range(198, 0, -2)][: len(found)][::-1]
    assert read_answers(store, "other words", "a", 0).answers == []
    store.prune(0)
    assert read_answers(store, "words", "a", 0).answers == []
    store.close()


def test_an_answer_is_not_replaced_by_its_own_beginning() -> None:
    """A client that went away may come again with the same question."""
    answers = Answers()
    for output in ([4, 5, 6, 7], [4, 5]):
        lookup, request = AnswerLookup(answers), Request(3, (1, 2, 3), 9)
        sequence = Sequence.start(request)
        lookup.knows(sequence)
        sequence.tokens += output
        lookup.forget(3)
    assert answers.num_tokens == 4
