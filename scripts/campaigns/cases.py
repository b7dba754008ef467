"""Random cases for the exact oracle: a number makes a case, and the case is what it says on every machine.

A case has an engine, a loop, a drafter and requests. It is run to its end; or it is left early, or one call in it
fails, and then the same requests are answered by the same engine and drafter. Every output is compared with the model's
own.
"""

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
import transformers.generation.logits_process  # noqa: F401  # takes seconds, which are no case's

from runtime.checkpoint.config import BuildConfig
from runtime.core.params import GREEDY, SamplingConfig
from runtime.core.request import Draft, Request, Sequence
from runtime.core.states import num_rolled_back
from runtime.drafters.adaptive import AdaptiveDrafter
from runtime.drafters.chain import BestOf, DraftingModel, FirstOf
from runtime.drafters.confidence_stop import ConfidenceStop
from runtime.drafters.custom import guarded_drafter
from runtime.drafters.draft_target import DraftModel, SelfDraftModel
from runtime.drafters.ngram import CorpusLookup, NgramLookup
from runtime.drafters.ngram_pool import NgramPool
from runtime.drafters.protocol import Drafter, check_request
from runtime.drafters.suffix import SuffixLookup
from runtime.engine.engine import KVCacheConfig
from runtime.loop import orchestrator, scheduler
from runtime.text.corpus import Corpus, write_corpus
from scripts.campaigns.oracle import (
    CheckedEngine,
    ExactModel,
    Failure,
    Injected,
    Interrupted,
    Slots,
    has_ended,
    one_by_one,
)

VOCAB_SIZE = 12
TIME_LIMIT_S = 30
TARGET = ExactModel(1, VOCAB_SIZE)
DRAFTERS = (
    *("none", "ngram", "ngram, pool", "suffix", "suffix, pool", "corpus", "ngram, corpus", "chain"),
    *("draft model", "draft model by logits", "chain with draft model", "custom", "custom function", "custom by probs"),
    *("self", "self by logits", "chain with self"),
)
PHRASES = [random.Random(i).choices(range(VOCAB_SIZE), k=1 + 3 * i) for i in range(6)]
ENDINGS = ("finished", "closed early", "failure")
TIMES_OF_FAILURE: tuple[Literal["before", "halfway", "after"], ...] = ("before", "halfway", "after")


class StopAt:
    """A stop word: tokens in a row, of which the last completes it."""

    def __init__(self, word: list[int]) -> None:
        self.word = word

    def __call__(self, tokens: list[int], num_prompt_tokens: int) -> bool:
        return tokens[num_prompt_tokens:][-len(self.word) :] == self.word


class Guesser:
    """A custom drafter: the target's next tokens, some of them wrong, as many as it likes."""

    def __init__(self, random: random.Random, *, by_probs: bool = False) -> None:
        self.random, self.by_probs = random, by_probs

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [self.draft(sequence.tokens, max_draft_len) for sequence in sequences]

    def draft(self, tokens: list[int], max_draft_len: int) -> Draft:
        prefix, probs = list(tokens), []
        for _ in range(self.random.randint(0, max_draft_len)):
            row = torch.softmax(TARGET.logits(prefix)[0].double() * self.random.choice([0.3, 1.0, 2.0]), dim=-1)
            prefix.append(self.random.choices(range(VOCAB_SIZE), row.tolist())[0])
            probs.append(row)
        return Draft(prefix[len(tokens) :], torch.stack(probs) if self.by_probs and probs else None)

    def forget(self, request_id: int) -> None:
        """Nothing is kept."""


class Recorder:
    """A drafter, what it proposed for each request, as it was sent, and the requests it was not yet told to forget."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.drafts: dict[int, list[Draft]] = {}
        self.remembered: set[int] = set()

    def check_request(self, request: Request) -> None:
        check_request(self.drafter, request)

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        self.remembered.update(sequence.request.id for sequence in sequences)
        drafts = self.drafter.propose(sequences, max_draft_len)
        for sequence, draft in zip(sequences, drafts, strict=True):
            self.drafts.setdefault(sequence.request.id, []).append(draft.cut(sequence.max_draft_len))
        return drafts

    def forget(self, request_id: int) -> None:
        self.remembered.discard(request_id)
        self.drafter.forget(request_id)


@dataclass
class Outcome:
    """Features of a case, for the counts."""

    drafter: str
    loop: str
    ending: str
    num_outputs: int = 0
    num_preempted: int = 0
    num_accepted: int = 0
    has_states: bool = False
    failed_in: str | None = None
    """The call that failed, where it came to that, and when."""
    calls: dict[str, int] = field(default_factory=dict)


class Case:
    """Everything of it is drawn from `number`, and made anew each time."""

    def __init__(self, number: int, corpus: Corpus) -> None:
        self.random = random.Random(number)
        self.random_of_states = random.Random(f"states of {number}")
        self.corpus = corpus
        self.loop = self.random.choice(["orchestrator", "leader"])
        self.drafter_name = self.random.choice(DRAFTERS)
        # Few, so that prompts share beginnings, and repeat themselves.
        self.phrases = self.random.choice([PHRASES, self.random.sample(PHRASES, 2)])
        self.requests = [self._request(i) for i in range(self.random.randint(1, 7))]
        self.draft_engine: CheckedEngine | None = None
        self.engine = self._engine(TARGET, max_draft_len=self.random.randint(1, 8))
        self.max_draft_len = self.random.randint(1, self.engine.max_draft_len)
        drafter = self._drafter(self.drafter_name)
        self.is_adaptive = drafter is not None and self.random.random() < 0.3
        if drafter is not None and self.is_adaptive:
            drafter = self._adapted(drafter)
        self.recorder = None if drafter is None else Recorder(drafter)

    @property
    def engines(self) -> list[CheckedEngine]:
        return [self.engine] if self.draft_engine is None else [self.engine, self.draft_engine]

    def _request(self, number: int) -> Request:
        choose = self.random.choice
        prompt = [token for _ in range(self.random.randint(1, 4)) for token in choose(self.phrases)]
        word = [self.random.randrange(VOCAB_SIZE) for _ in range(self.random.randint(1, 3))]
        return Request(
            number,
            tuple(prompt),
            self.random.randint(1, 24),
            end_ids=frozenset(self.random.choices(range(VOCAB_SIZE), k=choose([0, 0, 1, 2]))),
            stop_check=choose([None, None, StopAt(word)]),
            sampling=GREEDY if self.random.random() < 0.4 else self._sampling(),
            return_index=choose([0, 0, 1]),
            keep_logits=choose([False, True]),
            num_prompt_logprobs=self.random_of_states.choice([None, None, None, 0]),
        )

    def _sampling(self) -> SamplingConfig:
        choose = self.random.choice
        word = tuple(self.random.choices(range(VOCAB_SIZE), k=self.random.randint(1, 2)))
        return SamplingConfig(
            temperature=choose([0.0, 0.7, 1.0, 1.0, 1.5]),
            top_k=choose([0, 0, 1, 3, 6]),
            top_p=choose([1.0, 1.0, 0.8]),
            min_p=choose([0.0, 0.0, 0.05]),
            repetition_penalty=choose([1.0, 1.0, 0.8, 1.3]),
            presence_penalty=choose([0.0, 0.0, 0.5]),
            frequency_penalty=choose([0.0, 0.0, 0.3]),
            no_repeat_ngram_size=choose([0, 0, 4]),
            bad_words=choose([(), (), (word,)]),
            random_seed=self.random.randrange(1000),
        )

    def _engine(self, model: ExactModel, max_draft_len: int) -> CheckedEngine:
        """Draw a K/V cache from just enough to plenty."""
        choose = self.random.choice
        enough = max(len(r.prompt_tokens) + r.max_new_tokens - 1 for r in self.requests)
        build = BuildConfig(
            # Steps of compiled engines are folded (`runtime.core.batch`).
            compiler=choose(["none", "aot"]),
            max_batch_size=self.random.randint(1, 6),
            max_input_len=100,
            max_seq_len=140,
            max_draft_len=max_draft_len,
            tokens_per_block=choose([1, 2, 3, 4, 7, 16]),
            speculative_decoding_mode="draft_tokens_external" if max_draft_len else "none",
        )
        kv_cache = KVCacheConfig(
            block_reuse=self.loop == "orchestrator" or self.random.random() < 0.7,
            max_tokens=choose([enough, enough, enough + 5, int(enough * 1.5), 4 * enough, None]),
            state_checkpoint_interval=self.random_of_states.choice([1, 2, 5, 13, 32, 8192]),
        )
        model = replace(model, num_before=self.random_of_states.choice([0, 1, 2, 4]))
        model = replace(model, is_recurrent=model.num_before > 0 and self.random_of_states.random() < 0.6)
        if not (model.num_before and kv_cache.block_reuse):
            kv_cache = replace(kv_cache, state_checkpoint_interval=None)
        # A copy likes what the model likes, three times in four.
        copy = replace(model, seed=model.seed + choose([0, 7, 7]))
        return CheckedEngine(model, build, kv_cache, choose([2, 7, 30, 512]), copy, self._slots(build))

    def _slots(self, build: BuildConfig) -> Slots:
        """Draw slots from one that all share to plenty, and positions to go back from just enough to plenty."""
        batch, choose = build.max_batch_size, self.random_of_states.choice
        num_slots = 1 + choose([1, 2, batch, batch + 1, batch + 2, 2 * batch + 8])
        return num_slots, choose([2 * (build.max_draft_len + 1), num_rolled_back(build.max_draft_len), 40])

    def _drafter(self, name: str) -> Drafter | None:
        choose = self.random.choice
        if name == "none":
            return None
        if name == "chain":
            return FirstOf([NgramLookup(4, min_matching_ngram_size=3), SuffixLookup(pool=NgramPool())])
        if name == "chain with draft model":
            return self._choosing(NgramLookup(3, min_matching_ngram_size=2), self._draft_model(), None)
        if name == "chain with self":
            ngram = NgramLookup(choose([2, 3, 4]), ranking=choose(["oldest", "recent", "frequent"]))
            drafter = self._self_draft()
            return self._choosing(ngram, drafter, drafter)
        if name.startswith("self"):
            return self._self_draft()
        if name.startswith("draft model"):
            return self._draft_model()
        if name.startswith("custom"):
            guesser = Guesser(self.random, by_probs=name == "custom by probs")
            if name == "custom function":
                return guarded_drafter(name, lambda tokens, longest: guesser.draft(tokens, longest).tokens)
            return guarded_drafter(name, guesser)
        pool = NgramPool(max_tokens=choose([30, 1000])) if "pool" in name else None
        if name.startswith("suffix"):
            return SuffixLookup(pool=pool, growth=choose([None, 2]))
        ngram = NgramLookup(choose([1, 2, 3]), ranking=choose(["oldest", "leftmost", "recent", "frequent"]), pool=pool)
        corpus = CorpusLookup(self.corpus, choose([1, 2, 4]))
        return {"corpus": corpus, "ngram, corpus": FirstOf([ngram, corpus])}.get(name, ngram)

    def _draft_model(self) -> DraftModel:
        """A model that likes what the target likes, of a vocabulary of the same size, a smaller or a larger one."""
        model = ExactModel(self.random.choice([1, 2]), self.random.choice([VOCAB_SIZE, VOCAB_SIZE, 9, 14]))
        self.draft_engine = self._engine(model, max_draft_len=0)
        self.draft_engine.name = "draft engine: "
        self.draft_engine.calls = self.engine.calls
        use_logits = self.drafter_name == "draft model by logits" or self.random.random() < 0.3
        return DraftModel(self.draft_engine, VOCAB_SIZE, use_logits=use_logits)

    def _self_draft(self) -> SelfDraftModel:
        use_logits = self.drafter_name == "self by logits" or self.random.random() < 0.3
        confidence_stop = (
            ConfidenceStop(self._iteration_s(), lambda batch_size, context_len: 0.1)
            if self.random.random() < 0.4
            else None
        )
        return SelfDraftModel(self.engine, use_logits=use_logits, confidence_stop=confidence_stop)

    def _choosing(self, lookup: Drafter, drafter: Drafter, copy: SelfDraftModel | None) -> Drafter:
        """Choose between a lookup and a model's drafts, which are now and then better, and now and then worse."""
        share = self.random.random()
        model = DraftingModel(drafter, self.random.randint(1, 8), lambda batch, context: share, copy)
        return BestOf([lookup], [model], lambda batch, context, draft_len: 1 + 0.1 * draft_len, VOCAB_SIZE)

    def _adapted(self, drafter: Drafter) -> Drafter:
        costs = [self.random.random() for _ in range(20)]
        drafts_by_model = self.draft_engine is not None or "self" in self.drafter_name
        draft_s = (lambda batch_size, context_len: costs[batch_size]) if drafts_by_model else None
        return AdaptiveDrafter(drafter, self._iteration_s(), draft_s)

    def _iteration_s(self) -> Callable[[int, int, float], float]:
        costs = [self.random.random() for _ in range(20)]

        def iteration_s(batch_size: int, context_len: int, draft_len: float) -> float:
            return 1 + draft_len * costs[int(context_len + draft_len) % len(costs)]

        return iteration_s

    def steps(self) -> Any:
        loop = {"orchestrator": orchestrator, "leader": scheduler}[self.loop]
        return loop.generate(self.engine, self.requests, self.recorder, self.max_draft_len if self.recorder else 0)

    def expected(self, request: Request) -> list[int]:
        drafts = self.recorder.drafts.get(request.id, []) if self.recorder else []
        if all(draft.probs is None for draft in drafts) or request.sampling.is_greedy:
            return one_by_one(TARGET, request)
        return one_by_one(TARGET, request, drafts)


def run(number: int, corpus: Corpus, ending: str | None = None, failure: Failure | None = None) -> Outcome:
    """Run the case; AssertionError if anything is not as it must be, TimeoutError if there is no end."""
    case = Case(number, corpus)
    ending = ending or case.random.choices(ENDINGS, [5, 2, 3])[0]
    if ending == "failure" and failure is None:
        failure = _random_failure(case)
    outcome = Outcome(case.drafter_name + (", adaptive" if case.is_adaptive else ""), case.loop, ending)
    outcome.has_states = any(engine.config.states for engine in case.engines)
    with _time_limit(), case.engine.calls.watch_commits():
        if ending != "finished":
            if _disturb(case, failure) and failure is not None:
                outcome.failed_in = f"{failure.operation}, {failure.when}"
            if case.recorder:
                case.recorder.drafts.clear()
        before = dict(case.engine.calls.numbers)
        _finish(case, outcome)
    calls = case.engine.calls.numbers
    outcome.calls = {name: calls[name] - before.get(name, 0) for name in calls}
    if case.loop == "leader":
        outcome.num_preempted = outcome.calls["release"] - len(case.requests)
    return outcome


def _random_failure(case: Case) -> Failure:
    """Draw a call to fail, from those that a run without failures makes: the same case, made anew, is asked."""
    of_engine = ["admit", "step", "release", "model", "block copy"]
    of_engine += ["state copy"] if case.engine.config.states else []
    names = [*of_engine, "model", "model", "commit"]  # what a model has written when it fails must not be read
    names += ["copy's step", "copy's model"] if "self" in case.drafter_name else []
    names += [f"draft engine: {name}" for name in of_engine] if case.draft_engine else []
    operation, when = case.random.choice(names), case.random.choice(TIMES_OF_FAILURE)
    is_rare = operation.endswith(("block copy", "state copy"))
    number = int(case.random.expovariate(0.8 if is_rare else 0.15))
    return Failure(operation, number, when, is_interrupt=case.random_of_states.random() < 0.5)


def _disturb(case: Case, failure: Failure | None) -> bool:
    """Leave early, or have a call fail: blocks and the drafter's state are given back, and tokens so far are right.

    Returns whether it came to the call that fails.
    """
    has_failed = False
    num_steps = case.random.randint(0, 40)
    streamed: dict[int, tuple[Request, list[int]]] = {}
    case.engine.calls.failure = failure
    steps = case.steps()
    try:
        for number, (sequence, tokens) in enumerate(steps):
            streamed.setdefault(sequence.request.id, (sequence.request, []))[1].extend(tokens)
            if failure is None and number == num_steps:
                break
    except (Injected, Interrupted):
        has_failed = True
    finally:
        steps.close()
        case.engine.calls.failure = None
    if failure is None or failure.operation != "draft engine: release":  # which is made good by the next run
        _check_given_back(case)
    for request, tokens in streamed.values():
        assert case.expected(request)[: len(tokens)] == tokens, f"streamed tokens of request {request.id}"
    return has_failed


def _finish(case: Case, outcome: Outcome) -> None:
    """Run to the end, and compare."""
    finished: dict[int, Sequence] = {}
    streamed: dict[int, list[int]] = {request.id: [] for request in case.requests}
    for sequence, tokens in case.steps():
        assert sequence.request.id not in finished, "a step of a finished request"
        streamed[sequence.request.id] += tokens
        if sequence.finish_reason is not None:
            finished[sequence.request.id] = sequence
    for request in case.requests:
        sequence, expected = finished[request.id], case.expected(request)
        assert sequence.output_tokens == expected == streamed[request.id], f"output of request {request.id}"
        assert sequence.finish_reason == _finish_reason(request, sequence.tokens)
        if request.keep_logits:
            assert torch.equal(torch.stack(sequence.logits), TARGET.logits(sequence.tokens[:-1], len(expected)))
        if request.num_prompt_logprobs is not None:
            _check_scores(request, [one.logprob for one in sequence.prompt_logprobs])
        assert sequence.stats.num_generated_tokens == len(expected)
        outcome.num_accepted += sequence.stats.num_accepted_draft_tokens
    outcome.num_outputs = len(finished)
    _check_given_back(case)


def _check_scores(request: Request, logprobs: list[float]) -> None:
    """Compare log-probabilities of the prompt's tokens after the first with those by the text alone."""
    prompt = list(request.prompt_tokens)
    all_logprobs = TARGET.logits(prompt, len(prompt))[:-1].log_softmax(-1)
    expected = all_logprobs.gather(-1, torch.tensor(prompt[1:])[:, None]).flatten()
    torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-4)


def _check_given_back(case: Case) -> None:
    for engine in case.engines:
        engine.check_books()
    assert case.recorder is None or not case.recorder.remembered, "the drafter was not told to forget a request"


def _finish_reason(request: Request, tokens: list[int]) -> str:
    if tokens[-1] in request.end_ids:
        return "end_id"
    return "stop" if has_ended(replace(request, max_new_tokens=10_000), tokens) else "length"


@contextmanager
def _time_limit() -> Iterator[None]:
    """Stop what runs for ever, by the processor's time, which a busy machine does not change."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no end in {TIME_LIMIT_S} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def make_corpus(directory: Path) -> Corpus:
    """Texts that the target would write, so that lookups in them are right now and then."""
    documents = [one_by_one(TARGET, Request(0, (token, 3), 60)) for token in range(VOCAB_SIZE)]
    path = directory / "corpus.safetensors"
    write_corpus(path, documents, vocab_size=VOCAB_SIZE, tokenizer_digest="none", replace=False)
    return Corpus.open(path)
