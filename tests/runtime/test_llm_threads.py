"""Threads that share an `LLM`: each gets what it gets alone, whatever the others do, leave, or fail at."""

import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from waiting import HANG_S, wait_until

from runtime.text.text import encode, load_tokenizer
from runtime.util.digests import begin_digests, file_digest, is_digest_awaited
from runtime.util.errors import SpecDecError
from runtime.util.thread_turns import ThreadTurns
from scripts.campaigns.llm_threads import KINDS, faults_of, switched_often
from specdec_cli import LLM, Draft, KVCacheConfig, NgramDrafter, SamplingParams, Sequence

PROMPT = "The little dog had a red ball. The"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(llama_engine_dir: Path) -> Iterator[LLM]:
    with LLM(llama_engine_dir) as opened:
        yield opened


def run_all(*works: Callable[[], object]) -> None:
    """Each in a thread of its own; an error of one is raised here."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive(), "a thread waits for ever"
    if errors:
        raise errors[0]


def ids_of(llm: LLM, prompt: str = PROMPT, params: SamplingParams = GREEDY, **how: Any) -> list[int]:
    return llm.generate(prompt, params, **how)[0].token_ids


def test_threads_get_what_each_gets_alone(llama_engine_dir: Path) -> None:
    """A sample of `scripts/campaigns/llm_threads.py`."""
    kinds = {name: ask for name, ask in KINDS.items() if name != "draft model"}
    with LLM(llama_engine_dir) as llm:
        alone = {(name, i): ask(llm, i) for name, ask in kinds.items() for i in range(4)}
        assert faults_of(llm, alone, 4, len(kinds) // 2) == []  # each kind by two threads


def test_stream_that_nobody_reads_keeps_nobody_waiting(llama_engine_dir: Path) -> None:
    """It holds the blocks that the others need; read later, it goes on."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(llama_engine_dir, kv_cache=KVCacheConfig(max_tokens=96)) as llm:
        alone, others = ids_of(llm, PROMPT, params), ids_of(llm, "Once", params)
        pieces = llm.stream(PROMPT, params)
        first = next(pieces)
        assert ids_of(llm, "Once", params) == others  # in this thread, and in others that need each other's room too
        found: list[list[int]] = []
        with switched_often():
            run_all(*[lambda: found.append(ids_of(llm, "Once", params))] * 3)
        assert found == [others] * 3
        assert [i for piece in [first, *pieces] for i in piece.token_ids] == alone
        assert llm.engine.cache_usage == 0


def test_threads_with_one_seed_and_one_request_id_have_their_own_drafts(llm: LLM) -> None:
    """A drafter knows requests by their ids, which no two have at a time; what is returned has the user's."""
    session = llm.session(NgramDrafter(), "fixed")
    request = llm.request_of(GREEDY).with_prompt(7, llm.encode(PROMPT)[0])
    other = llm.request_of(GREEDY).with_prompt(7, llm.encode("ball ball ball")[0])
    alone = [session.run([one]).sequences[0] for one in (request, other)]
    steps = [session.steps([one]) for one in (request, other)]
    found: list[Sequence] = []
    while steps:
        for one in list(steps):
            if (stepped := next(one, None)) is None:
                steps.remove(one)
            elif stepped[0].finish_reason is not None:
                found.append(stepped[0])
    assert len({sequence.request.id for sequence in found}) == 2
    by_prompt = {sequence.request.prompt_tokens: sequence for sequence in found}
    for sequence in alone:
        same = by_prompt[sequence.request.prompt_tokens]
        assert same.output_tokens == sequence.output_tokens
        assert same.stats.per_step_drafted == sequence.stats.per_step_drafted
        assert same.request.name == "request 7" and sequence.request.id == 7


class Fails:
    """A drafter that fails for prompts that begin with this token, by an error or by Ctrl-C."""

    def __init__(self, token: int, error: BaseException) -> None:
        self.token, self.error = token, error

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        if any(s.tokens[0] == self.token and s.num_generated > 2 for s in sequences):
            raise self.error
        return [Draft(sequence.tokens[-2:][:max_draft_len]) for sequence in sequences]

    def forget(self, request_id: int) -> None: ...


def test_failure_of_one_thread_is_its_own(llama_engine_dir: Path) -> None:
    with LLM(llama_engine_dir, mode="orchestrator") as llm:
        bad, good = llm.encode("Once")[0], llm.encode(PROMPT)[0]
        drafter, alone = Fails(bad[0], ValueError("broken")), ids_of(llm)
        assert good[0] != bad[0]

        def fail() -> None:
            for _ in range(5):
                with pytest.raises(SpecDecError, match="broken"):
                    llm.generate(bad, GREEDY, drafter=drafter)

        def ask() -> None:
            for _ in range(5):
                assert ids_of(llm, drafter=drafter) == alone

        run_all(fail, ask, ask)
        assert llm.engine.cache_usage == 0 and not llm.engine.turns.is_mine


def test_ctrl_c_at_any_moment_leaves_the_engine_to_others(llm: LLM) -> None:
    """Signals come to the main thread wherever it is: in its own step, or waiting for the others'."""
    alone, main, is_over = ids_of(llm), threading.main_thread().ident, threading.Event()
    assert main is not None
    answers, may_raise = list[list[int]](), list[bool]()

    def on_signal(signal_number: int, frame: object) -> None:
        if may_raise:
            may_raise.clear()
            raise KeyboardInterrupt

    def ask() -> None:
        while not is_over.is_set():
            answers.append(ids_of(llm))

    def interrupt() -> None:
        for i in range(12):
            wait_until(lambda i=i: may_raise and len(answers) > i)
            signal.pthread_kill(main, signal.SIGINT)
        is_over.set()

    before = signal.signal(signal.SIGINT, on_signal)
    threads = [threading.Thread(target=work, daemon=True) for work in (ask, ask, interrupt)]
    num_interrupts = 0
    try:
        for thread in threads:
            thread.start()
        while not is_over.is_set():
            try:
                may_raise.append(True)
                llm.generate(PROMPT, GREEDY)
                may_raise.clear()
            except KeyboardInterrupt:
                num_interrupts += 1
    finally:
        signal.signal(signal.SIGINT, before)
        was_alone = torch.ops.specdec.keep_openmp_alone(False)
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive(), "a turn was never given back"
    assert num_interrupts and not was_alone and answers == [alone] * len(answers)
    assert ids_of(llm) == alone and llm.engine.cache_usage == 0


def test_closed_by_another_thread_a_call_says_so(llama_engine_dir: Path) -> None:
    llm, messages, has_begun = LLM(llama_engine_dir), list[str](), threading.Event()

    def ask() -> None:
        try:
            while True:
                llm.generate(PROMPT, GREEDY)
                has_begun.set()
        except SpecDecError as error:
            messages.append(error.message)

    def close() -> None:
        assert has_begun.wait(HANG_S)
        llm.close()

    run_all(ask, ask, close)
    assert messages == ["the engine was closed"] * 2


class Drops:
    """A drafter in whose turn generators are collected."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        if self.kept:
            self.kept.clear()
            gc.collect()
        return [Draft([])] * len(sequences)

    def forget(self, request_id: int) -> None: ...


def test_stream_that_is_collected_within_a_step_disturbs_nothing(llama_engine_dir: Path) -> None:
    with LLM(llama_engine_dir) as llm:
        alone, drafter = ids_of(llm), Drops()
        pieces = llm.stream(PROMPT, GREEDY, drafter=NgramDrafter())
        next(pieces)
        cycle: list[Any] = [pieces]
        cycle.append(cycle)
        drafter.kept.append(cycle)
        del pieces, cycle
        assert ids_of(llm, drafter=drafter) == alone
        assert ids_of(llm) == alone and llm.engine.cache_usage == 0
        llm.engine._blocks.check_integrity()


def test_who_has_had_a_turn_does_not_come_before_who_waits() -> None:
    turns, order = ThreadTurns(), list[str]()

    def first() -> None:
        order.append("first")
        thread.start()
        wait_until(turns._next.locked)

    thread = threading.Thread(target=lambda: turns.take(lambda: order.append("other")), daemon=True)
    turns.take(first)
    turns.take(lambda: order.append("first"))
    thread.join(HANG_S)
    assert order == ["first", "other", "first"]


def test_cut_prompts_are_transformers_and_cut_no_others(llama_dir: Path) -> None:
    ours, theirs = load_tokenizer(llama_dir, None), AutoTokenizer.from_pretrained(llama_dir, truncation_side="left")
    texts = [PROMPT * i for i in range(1, 9)]
    whole = {text: theirs(text)["input_ids"] for text in texts}
    cut = {text: theirs(text, truncation=True, max_length=5)["input_ids"] for text in texts}

    def encode_all() -> None:
        for _ in range(40):
            for text in texts:
                assert encode(text, ours) == (whole[text], False)

    def cut_all() -> None:
        for _ in range(40):
            for text in texts:
                assert encode(text, ours, 5) == (cut[text], True)

    with switched_often():
        run_all(encode_all, cut_all, encode_all, cut_all)


def test_digests_are_begun_and_asked_for_by_many_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.util.digests._LARGE_BYTES", 0)
    paths = [tmp_path / f"{i}" for i in range(60)]
    for path in paths:
        path.write_text(path.name)

    def begin() -> None:
        for path in paths:
            begin_digests([path])
            is_digest_awaited()

    def ask() -> None:
        for path in paths:
            assert file_digest(path) == sha256(path.read_bytes()).hexdigest()
            is_digest_awaited()

    with switched_often():
        run_all(begin, ask, begin, ask)


_ENDS = """
import sys, threading
from specdec_cli import LLM, NgramDrafter, SamplingParams

llm, params = LLM(sys.argv[1]), SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
stream = llm.stream("The little dog", params, drafter=NgramDrafter())
steps = llm.session().steps([llm.request_of(params).with_prompt(0, [5, 6, 7])])
begun = next(stream), next(steps)
has_begun = threading.Event()

def ask():
    while True:
        llm.generate("Once", params)
        has_begun.set()

threading.Thread(target=ask, daemon=True).start()
has_begun.wait()
print("ends", "transformers" in sys.modules)
"""


def test_script_ends_without_a_word(llama_engine_dir: Path) -> None:
    """The `LLM` is not closed, the generators are not read to their end, and a thread still asks. A compiled engine
    answers without transformers, whose import takes seconds.
    """
    command = [sys.executable, "-c", _ENDS, str(llama_engine_dir)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert (result.returncode, result.stdout, result.stderr) == (0, "ends False\n", "")
