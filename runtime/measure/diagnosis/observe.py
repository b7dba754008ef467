"""Observes an engine: it answers the prompts without the drafter, with it and without it again. It also looks at steps,
weights, the machine, and differences between a draft model and its target that pass all checks and harm drafts.
"""

import time
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from runtime.builder.build import Phase
from runtime.checkpoint.bundle import STEP_WEIGHTS, Bundle, read_bundle
from runtime.checkpoint.config import MachineSpeed, StepCost
from runtime.core.generation import Generation
from runtime.core.request import Draft, Request, Sequence
from runtime.drafters.adaptive import AdaptiveDrafter
from runtime.drafters.chain import BestOf, FirstOf
from runtime.drafters.protocol import CompositeDrafter
from runtime.drafters.speculation import NO_SPECULATION, Speculation
from runtime.drafters.under_grammar import UnderGrammar
from runtime.engine.engine import Engine
from runtime.llm import LLM
from runtime.loop.compatibility import TargetIdentity
from runtime.loop.lossless.check import check_outputs
from runtime.loop.lossless.results import TokenCheck
from runtime.loop.session import Session
from runtime.loop.step_costs import measure_machine, time_cell
from runtime.measure.diagnosis.diagnose import (
    CacheUse,
    DraftedStep,
    Drafting,
    DraftModelPair,
    ExpectedAcceptance,
    Machine,
    Observations,
    Outputs,
    StateUse,
    StepTime,
    Weights,
)
from runtime.text.chat import ChatTemplate, Message, has_chat_template
from runtime.text.text import encode_text, tokenizer_of_engine
from runtime.util.control_groups import num_cores
from runtime.util.errors import SpecDecError, draft_engine_errors
from runtime.util.machine import NUMA_NODES, allowed_cores, numa_nodes
from runtime.util.tensor_file import read_header

_MAX_STEP_S = 0.3
_MIN_ROUNDS, _NUM_CELLS = 4, 4
"""Least number of rounds in which steps are timed, and number of kinds of steps."""
_SAMPLED = 1 << 18  # numbers of each weight
_DENORMAL: dict[str, tuple[np.dtype[np.signedinteger[Any]], int]] = {
    "F32": (np.dtype("<i4"), 0x00800000),
    "BF16": (np.dtype("<i2"), 0x0080),
}
"""Integers with the bits of each dtype, and the smallest normal number. Other dtypes are not inspected."""


def measure(
    llm: LLM,
    speculation: Speculation,
    expected: ExpectedAcceptance | None,
    draft_model: DraftModelPair | None,
    requests: Seq[Request],
    phase: Phase,
) -> Observations:
    """Observations of an engine that answers these requests. `draft_model` comes from `examine_draft_model`."""
    can_draft = bool(speculation) and (draft_model is None or draft_model.can_draft)
    with ExitStack() as stack:
        session = llm.open_session(speculation if can_draft else NO_SPECULATION, stack)
        session.check_requests(requests)
        phase("answering without, with and without the drafter" if can_draft else "answering, and answering again")
        session.warm_up(requests)
        watched = _watch(session)
        session.clear_cache()
        stats_before, num_slots = llm.engine.state_stats, llm.engine.num_state_slots
        before = session.run(requests, speculate=False)
        if num_slots:  # the second prompt with a beginning misses its state, and keeps it for later prompts
            session.run(requests, speculate=False)
        second = llm.engine.state_stats
        findable, found = _find_again(llm.engine, requests)
        again = llm.engine.state_stats.since(second)
        stats = replace(
            llm.engine.state_stats.since(stats_before), num_hits=again.num_hits, num_misses=again.num_misses
        )
        session.clear_cache()
        drafted = session.run(requests) if can_draft else before
        after = session.run_without_drafter(requests)
        outputs = _compare(session, before, drafted if can_draft else None, after)
        phase("timing steps")
        drafting = _drafting(session, watched, drafted, expected) if can_draft else None
        generations = (before, drafted, after) if can_draft else (before, after)
        cache = CacheUse(
            sum(g.times.num_preemptions for g in generations),
            sum(g.times.num_iterations for g in generations),
            llm.engine.num_cache_tokens // llm.engine.config.build_config.tokens_per_block,
            findable,
            found,
        )
        states = StateUse(stats, num_slots) if num_slots else None
    costs = _spread([cost for cost in llm.engine.config.step_costs if cost.batch_size == 1 and cost.seconds > 0])
    built = {(cost.batch_size, cost.context_len, cost.num_tokens): cost for cost in costs}
    steps = tuple(StepTime(built[cell], now_s) for cell, now_s in _fastest_steps(llm.engine, [*built]).items())
    phase("looking at the weights and the machine")
    weights = llm.bundle.directory / STEP_WEIGHTS
    memory_bytes = weights.stat().st_size + llm.engine.num_cache_bytes
    machine = examine_machine(llm.engine.config.machine, memory_bytes)
    return Observations(outputs, drafting, draft_model, cache, states, steps, machine, _look_at_weights(weights))


def examine_draft_model(llm: LLM, speculation: Speculation) -> DraftModelPair | None:
    """Compare the draft model with the target, before the draft model is opened; None if there is none."""
    for one in speculation:
        if one.draft_model is not None:
            with draft_engine_errors():
                draft = read_bundle(Path(one.draft_model))
            return compare_draft_model(draft, TargetIdentity(llm.bundle, llm.tokenizer_dir, llm.tokenizer))
    return None


class _Watched(CompositeDrafter):
    """A drafter of a chain, with the number of tokens that it has proposed."""

    num_tokens = 0

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        drafts = self.members[0].propose(sequences, max_draft_len)
        self.num_tokens += sum(len(draft.tokens) for draft in drafts)
        return drafts


def _watch(session: Session) -> dict[str, _Watched]:
    """Have each drafter of a chain watched, by name; empty if there is a single drafter."""
    chain = session.opened.drafter if session.opened is not None else None
    while isinstance(chain, UnderGrammar | AdaptiveDrafter):
        chain = chain.members[0]
    if isinstance(chain, FirstOf):
        names = [*session.speculation.drafters[0].parts]
    elif isinstance(chain, BestOf):  # holds lookups before models
        names = [one.name for one in sorted(session.speculation, key=lambda one: one.is_model)]
    else:
        return {}
    watched = [_Watched([drafter]) for drafter in chain.members]
    chain.members[:] = watched
    return {
        name if names.count(name) == 1 else f"{name} {i}": one
        for i, (name, one) in enumerate(zip(names, watched, strict=True), 1)
    }


def _find_again(engine: Engine, requests: Seq[Request]) -> tuple[int, int]:
    """Number of tokens that could be found again of prompts that fill a block, and number of those in the K/V cache."""
    num_findable = num_found = 0
    block_size = engine.config.build_config.tokens_per_block
    for request in requests:
        num_reusable = len(request.prompt_tokens) - 1  # the last token is computed for its logits
        sequence = Sequence.start(request)
        if num_reusable >= block_size and engine.admit(sequence):
            num_findable += num_reusable
            num_found += sequence.num_computed
            engine.release(sequence)
    return num_findable, num_found


def _compare(session: Session, before: Generation, drafted: Generation | None, after: Generation) -> Outputs:
    """Numbers of outputs that differ; `drafted` is None if there is no drafter."""
    num_requests = len(before.sequences)
    pairs = zip(before.sequences, after.sequences, strict=True)
    num_unrepeatable = sum(a.output_tokens != b.output_tokens for a, b in pairs)
    if drafted is None:
        return Outputs(num_requests, 0, num_unrepeatable)
    check = check_outputs(session, drafted.sequences, before.sequences, lambda: None)
    assert isinstance(check, TokenCheck), "greedy outputs"
    num_changed = 0 if check.passed else num_requests - check.num_identical
    return Outputs(num_requests, num_changed, num_unrepeatable)


def _drafting(
    session: Session, watched: dict[str, _Watched], drafted: Generation, expected: ExpectedAcceptance | None
) -> Drafting:
    steps = tuple(step for sequence in drafted.sequences for step in _steps_of(sequence))
    proposed = {name: one.num_tokens for name, one in watched.items()}
    return Drafting(
        proposed or {session.speculation.names[0]: sum(step.num_drafted for step in steps)},
        session.speculation.draft_len_mode or "fixed",
        steps,
        drafted.times,
        _costs_of_drafts(session.engine, steps, drafted),
        _draft_token_s(session.draft_engine, steps) if session.draft_engine is not None else 0.0,
        expected,
    )


def _costs_of_drafts(engine: Engine, steps: Seq[DraftedStep], drafted: Generation) -> tuple[StepCost, ...]:
    """Times of steps with contexts and rows as in the observed steps; empty if the K/V cache has no room."""
    longest = max(step.num_drafted for step in steps)
    context_len = round(median(step.context_len for step in steps))
    batch_size = max(round(len(steps) / drafted.times.num_iterations), 1)
    num_tokens = sorted({1, 1 + longest // 2, 1 + longest})
    fastest = _fastest_steps(engine, [(batch_size, context_len, n) for n in num_tokens])
    return tuple(StepCost(*cell, seconds) for cell, seconds in fastest.items())


def _draft_token_s(engine: Engine, steps: Seq[DraftedStep]) -> float:
    """Seconds of the draft model's step for one token, after a context of the usual length."""
    context_len = round(median(step.context_len for step in steps))
    return sum(_fastest_steps(engine, [(1, context_len, 1)]).values())


def _steps_of(sequence: Sequence) -> list[DraftedStep]:
    steps, context_len, stats = [], len(sequence.request.prompt_tokens), sequence.stats
    for num_drafted, num_accepted in zip(stats.per_step_drafted, stats.per_step_accepted, strict=True):
        steps.append(DraftedStep(context_len, num_drafted, num_accepted))
        context_len += num_accepted + 1
    return steps


Cell = tuple[int, int, int]
"""A kind of step: number of rows, tokens of context, and tokens of each row."""


def _fastest_steps(engine: Engine, cells: Seq[Cell]) -> dict[Cell, float]:
    """Seconds of the fastest of many steps of each kind, in turn; without kinds that the K/V cache cannot hold."""
    engine.clear_cache()
    fastest = {cell: float("inf") for cell in cells if _has_room(engine, *cell)}
    start, rounds = time.perf_counter(), 0
    while fastest and (rounds < _MIN_ROUNDS or time.perf_counter() - start < _MAX_STEP_S):
        for cell in fastest:
            fastest[cell] = min(fastest[cell], time_cell(engine, *cell))
        rounds += 1
    return fastest


def _has_room(engine: Engine, batch_size: int, context_len: int, num_tokens: int) -> bool:
    block_size = engine.config.build_config.tokens_per_block
    needed = -(-(context_len + num_tokens) // block_size) * block_size * batch_size
    return needed <= engine.num_cache_tokens


def _spread(costs: list[StepCost]) -> list[StepCost]:
    """Cells spread evenly from the shortest to the longest step."""
    ordered = sorted(costs, key=lambda cost: cost.seconds)
    last, wanted = len(ordered) - 1, min(_NUM_CELLS, len(ordered))
    return [ordered[i * last // max(wanted - 1, 1)] for i in range(wanted)]


def _look_at_weights(path: Path) -> Weights:
    """Inspect up to 262,144 numbers of each weight by their bits: arithmetic would flush denormal numbers to 0."""
    num_sampled = num_denormal = 0
    with path.open("rb") as file:
        for tensor in read_header(file).tensors.values():
            if not tensor.num_bytes or tensor.dtype not in _DENORMAL:
                continue
            file.seek(tensor.start)
            integer, smallest_normal = _DENORMAL[tensor.dtype]
            numbers = np.frombuffer(file.read(min(tensor.num_bytes, _SAMPLED * integer.itemsize)), integer)
            magnitudes = numbers & ~(-1 << 8 * integer.itemsize - 1)
            num_sampled += numbers.size
            num_denormal += int(((magnitudes > 0) & (magnitudes < smallest_normal)).sum())
    return Weights(num_sampled, num_denormal)


_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "def area(width, height):\n    return width * height  # in square metres\n",
    "In 1969, 3.14159 and 1,000,000 were numbers; so is -42e-7.",
    "naïve café, straße, 東京, Привет, مرحبا, 👍🏽",
    "  two  spaces,\ttabs\n\nand lines ...!?",
    '{"key": ["value", null, true], "other": "it\'s"}',
)
_CONVERSATION: tuple[Message, ...] = (
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
)
_SCALED_TYPES = ("linear", "dynamic", "yarn", "longrope")
"""Rope types with a factor that all models of a family share; Llama 3's factors differ by size."""


def compare_draft_model(draft: Bundle, target: TargetIdentity) -> DraftModelPair:
    with draft_engine_errors():
        tokenizer = tokenizer_of_engine(draft)
    num_texts, num_otherwise, can_draft = 0, 0, True
    if tokenizer is not None and target.tokenizer is not None:
        num_texts = len(_TEXTS)
        num_otherwise = sum(encode_text(tokenizer, text) != encode_text(target.tokenizer, text) for text in _TEXTS)
        if tokenizer.get_vocab() != target.tokenizer.get_vocab():
            num_otherwise, can_draft = num_texts, False
    return DraftModelPair(
        num_texts,
        num_otherwise,
        can_draft,
        _conversations(draft, target),
        _rope_differences(draft.config.pretrained_config, target.bundle.config.pretrained_config),
        draft.config.weights_digest == target.bundle.config.weights_digest,
    )


def _conversations(draft: Bundle, target: TargetIdentity) -> tuple[str, str] | None:
    if not has_chat_template(draft.directory) or not has_chat_template(target.tokenizer_dir):
        return None
    pretrained = target.bundle.config.pretrained_config
    return _rendered(draft.directory, draft.config.pretrained_config), _rendered(target.tokenizer_dir, pretrained)


def _rendered(directory: Path, pretrained_config: dict[str, Any]) -> str:
    """A conversation as the chat template writes it, or the template's error."""
    try:
        return ChatTemplate(directory, pretrained_config).render(_CONVERSATION)
    except SpecDecError as error:
        return error.message


def _rope_differences(draft: dict[str, Any], target: dict[str, Any]) -> tuple[str, ...] | None:
    ours, theirs = _rope_settings(draft), _rope_settings(target)
    if not ours or not theirs:
        return None
    names = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    return tuple(f"{name} {ours[name]} beside {theirs[name]}" for name in names)


def _rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Settings that determine rotary angles, by transformers' present and former names."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = {f"{name} ": value for name, value in given.items() if isinstance(value, dict)} or {"": given}
    settings: dict[str, Any] = {}
    for prefix, values in kinds.items():
        theta = values.get("rope_theta", config.get("rope_theta"))
        if theta is None:
            continue
        kind = values.get("rope_type", values.get("type", "default"))
        settings |= {f"{prefix}rope_theta": float(theta), f"{prefix}rope_type": kind}
        if kind in _SCALED_TYPES:
            settings[f"{prefix}factor"] = values.get("factor")
    return settings


_NUM_WINDOWS, _WINDOW_S, _ENOUGH = 4, 0.15, 0.8
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def examine_machine(when_built: MachineSpeed | None, memory_bytes: int) -> Machine:
    return Machine(
        now=measure_machine(),
        when_built=when_built,
        num_cores=num_cores(),
        cpu_share=_cpu_share(),
        num_numa_nodes=num_numa_nodes(allowed_cores()),
        huge_pages=huge_pages(),
        memory_bytes=memory_bytes,
    )


def _cpu_share() -> float:
    """Share of the time for which this thread has a core: the largest in a few windows of 150 ms."""
    share = 0.0
    for _ in range(_NUM_WINDOWS):
        if share > _ENOUGH:
            break
        start, cpu_start = time.perf_counter(), time.thread_time()
        while time.perf_counter() - start < _WINDOW_S:
            pass
        share = max(share, (time.thread_time() - cpu_start) / (time.perf_counter() - start))
    return min(share, 1.0)


def num_numa_nodes(used: set[int], nodes: Path = NUMA_NODES) -> int:
    """Number of NUMA nodes that the cores belong to; 1 if the system does not list nodes."""
    return max(sum(bool(used & of_node) for of_node in numa_nodes(nodes)), 1)


def huge_pages(path: Path = _HUGE_PAGES) -> str | None:
    """Linux's setting of huge pages: `madvise` if its file is `always [madvise] never`; None without the file."""
    try:
        return path.read_text(encoding="utf-8").partition("[")[2].partition("]")[0] or None
    except OSError:
        return None
