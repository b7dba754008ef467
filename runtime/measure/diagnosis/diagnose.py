"""Observations of an engine and its settings, and the diagnoses that are drawn from them.

Each diagnosis is a function that gives a number and the threshold of a fault. Times are in seconds.

Thresholds are far beyond the effect of noise or a busy neighbour on a healthy engine, so every fault found is worth a
look. A diagnosis is None if there was nothing to judge, or too little.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from runtime.checkpoint.config import MachineSpeed, StepCost
from runtime.checkpoint.costs import CostModel
from runtime.core.stats import LoopTimes, StateStats
from runtime.drafters.spec import DraftLenMode


@dataclass(frozen=True)
class DraftedStep:
    """A step of a request, with `context_len` tokens before it."""

    context_len: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True)
class ExpectedAcceptance:
    """Acceptance recorded in the profile."""

    profile: Path
    draft_acceptance_rate: float


@dataclass(frozen=True)
class Drafting:
    """Results of a drafter on the prompts."""

    num_tokens_by_drafter: dict[str, int]
    """Number of tokens proposed by each drafter of a chain, or by the only drafter."""
    draft_len_mode: DraftLenMode
    steps: tuple[DraftedStep, ...]
    times: LoopTimes
    costs: tuple[StepCost, ...]
    """Present step times of the target: with drafts of full length, of half the length, and without a draft."""
    draft_token_s: float = 0.0
    """Step time of the draft model, if there is one."""
    expected: ExpectedAcceptance | None = None

    @property
    def num_draft_tokens(self) -> int:
        return sum(step.num_drafted for step in self.steps)

    @property
    def num_accepted(self) -> int:
        return sum(step.num_accepted for step in self.steps)


@dataclass(frozen=True)
class DraftModelPair:
    """Differences between a draft model and its target."""

    num_texts: int
    num_texts_tokenized_otherwise: int
    """Number of texts for which the two tokenizers give different tokens. All count if the vocabularies differ; no text
    is compared if a tokenizer is missing.
    """
    can_draft: bool
    chat_templates: tuple[str, str] | None
    """A conversation by the draft model's chat template, and by the target's; None if a template is missing."""
    rope_differences: tuple[str, ...] | None
    """Settings of rotary positions that differ; None if one of the two models has no rotary positions."""
    has_same_weights: bool


@dataclass(frozen=True)
class Outputs:
    """Comparison of outputs for the same prompts without the drafter, with it, and without it again."""

    num_requests: int
    num_changed: int
    """Number of outputs that differ with the drafter; near ties are not counted with dtypes of 16 bits."""
    num_unrepeatable: int
    """Number of outputs that differ between the two runs without the drafter."""


@dataclass(frozen=True)
class CacheUse:
    """Use of the K/V cache."""

    num_preemptions: int
    num_iterations: int
    num_blocks: int
    num_findable: int
    """Tokens of repeated prompts that fill a block, except each prompt's last token."""
    num_found: int
    """Number of these tokens that the cache held."""


@dataclass(frozen=True)
class StateUse:
    """Use of the slots of states. The prompts were admitted three times; hits and misses are from the third time."""

    stats: StateStats
    num_slots: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of the fastest of many equal steps now, and the cost of such a step when the engine was built."""

    cost: StepCost
    seconds: float


@dataclass(frozen=True)
class Machine:
    """Resources that the machine gives this process."""

    now: MachineSpeed
    when_built: MachineSpeed | None
    num_cores: float
    """Cores available to the process: by affinity, and by control groups."""
    cpu_share: float
    """Share of the time for which a thread that computes without pause has a core."""
    num_numa_nodes: int
    """NUMA nodes with cores available to the process."""
    huge_pages: str | None
    """Linux's setting for transparent huge pages: always, madvise or never; None if it is unknown."""
    memory_bytes: int
    """Bytes of weights and K/V."""


@dataclass(frozen=True)
class Weights:
    """Number of the engine's weights that were inspected, and the faults found in them."""

    num_sampled: int
    num_denormal: int


@dataclass(frozen=True)
class Observations:
    """All measurements. A field is None if there was nothing to measure."""

    outputs: Outputs | None
    drafting: Drafting | None
    draft_model: DraftModelPair | None
    cache: CacheUse
    states: StateUse | None
    """Use of the slots of states; None for a model without states."""
    steps: tuple[StepTime, ...]
    machine: Machine
    weights: Weights


MIN_STEPS = 16
MIN_DRAFT_TOKENS = 40
MIN_DRAFTS_PER_HALF = 24
MIN_EARLY_ACCEPTANCE = 0.3
MIN_Z = 4.0
MIN_MISSES, MAX_MISSES = 3, 0.4
"""Prompts whose state was missing: a fault needs 3 of them, and more than this share. Some are normal: the second
prompt with the same beginning misses the state, and keeps it for later ones.
"""
LARGE_MEMORY = 256 << 20
"""Bytes of weights and K/V beyond which huge pages matter: less memory needs few pages of any size."""


@dataclass(frozen=True)
class Judgement:
    """A number and its limit. `is_fault` is True if the number is on the wrong side, and matters. The message says what
    it measures.
    """

    number: float
    limit: float
    is_fault: bool
    message: str


Diagnosis = Callable[[Observations], Judgement | None]


def drafter_never_used(observed: Observations) -> Judgement | None:
    """Fewest tokens that a drafter proposed; for a single drafter at most the tokens that were sent."""
    drafting = observed.drafting
    if drafting is None or len(drafting.steps) < MIN_STEPS:
        return None
    name = min(drafting.num_tokens_by_drafter, key=drafting.num_tokens_by_drafter.__getitem__)
    proposed = drafting.num_tokens_by_drafter[name]
    # Automatic draft lengths may throw away all that is proposed.
    number = proposed if len(drafting.num_tokens_by_drafter) > 1 else min(proposed, drafting.num_draft_tokens)
    message = f"the drafter {name} drafted {number:,} tokens in {len(drafting.steps):,} steps"
    return Judgement(number, 1, number < 1, message)


def acceptance_below_profile(observed: Observations) -> Judgement | None:
    drafting = observed.drafting
    if drafting is None or drafting.expected is None or drafting.num_draft_tokens < MIN_DRAFT_TOKENS:
        return None
    rate, expected = drafting.num_accepted / drafting.num_draft_tokens, drafting.expected.draft_acceptance_rate
    limit = expected / 2
    message = (
        f"{rate:.1%} of draft tokens were accepted, and {expected:.1%} when the profile was made (half of it is fine)"
    )
    return Judgement(rate, limit, rate < limit, message)


def acceptance_falls_with_context(observed: Observations) -> Judgement | None:
    """Share of drafts with a right first token, in the shorter and in the longer half of all contexts."""
    drafting = observed.drafting
    steps = sorted((s for s in drafting.steps if s.num_drafted), key=lambda s: s.context_len) if drafting else []
    if len(steps) < 2 * MIN_DRAFTS_PER_HALF:
        return None
    middle = steps[len(steps) // 2].context_len
    early = [s for s in steps if s.context_len < middle]
    late = [s for s in steps if s.context_len >= middle]
    if min(len(early), len(late)) < MIN_DRAFTS_PER_HALF:
        return None
    early_rate, late_rate = _share_begun(early), _share_begun(late)
    both = _share_begun(steps)
    spread = math.sqrt(both * (1 - both) * (1 / len(early) + 1 / len(late)))
    is_sure = spread > 0 and (early_rate - late_rate) / spread > MIN_Z
    limit = early_rate / 2
    return Judgement(
        late_rate,
        limit,
        is_sure and early_rate >= MIN_EARLY_ACCEPTANCE and late_rate < limit,
        f"after {middle:,} tokens of context {late_rate:.1%} of drafts begin right, and {early_rate:.1%} before "
        "(half of it is fine)",
    )


def _share_begun(steps: list[DraftedStep]) -> float:
    return sum(step.num_accepted > 0 for step in steps) / len(steps)


def drafts_longer_than_pays(observed: Observations) -> Judgement | None:
    """Time of a token with the drafts as they were, divided by the time with drafts cut to the best length.

    It uses present step times, the fastest of many, so that a busy moment now or at the build does not count.
    """
    drafting = observed.drafting
    if drafting is None or not drafting.costs or drafting.draft_len_mode == "auto":
        return None
    if drafting.num_draft_tokens < MIN_DRAFT_TOKENS:
        return None
    longest = max(step.num_drafted for step in drafting.steps)
    seconds = [_seconds_of_a_token(drafting, length) for length in range(longest + 1)]
    best = seconds.index(min(seconds))
    ratio = seconds[longest] / seconds[best]
    message = f"drafts of {longest} take {ratio:.2f}x as long per token as drafts of {best} (up to 1.3x is fine)"
    return Judgement(ratio, 1.3, ratio > 1.3, message)


def _seconds_of_a_token(drafting: Drafting, max_draft_len: int) -> float:
    """Seconds per token if the same steps had shorter drafts.

    The loop's own overhead stays the same. A draft model's time is proportional to its drafted tokens, another
    drafter's to the steps.
    """
    costs, steps, times = CostModel(drafting.costs, 0.0), drafting.steps, drafting.times
    batch_size = max(cost.batch_size for cost in drafting.costs)
    context_len = max(cost.context_len for cost in drafting.costs)
    cut = [min(step.num_drafted, max_draft_len) for step in steps]
    # Each step as if all rows beside it had drafts of its own length.
    step_s = sum(costs.step_s(batch_size, context_len, 1 + length) for length in cut) / batch_size
    if drafting.draft_token_s:
        proposed = drafting.num_tokens_by_drafter
        share = proposed.get("draft-target", 0) / max(sum(proposed.values()), 1)
        draft_s = drafting.draft_token_s * share * sum(cut)
    else:
        draft_s = times.draft_time_s if max_draft_len else 0.0
    num_tokens = sum(1 + min(step.num_accepted, max_draft_len) for step in steps)
    return (step_s + times.host_time_s + draft_s) / num_tokens


def draft_tokenizer_differs(observed: Observations) -> Judgement | None:
    pair = observed.draft_model
    if pair is None or not pair.num_texts:
        return None
    number = pair.num_texts_tokenized_otherwise
    message = f"the draft model's tokenizer makes other tokens of {number} of {pair.num_texts} texts than the target's"
    return Judgement(number, 0, number > 0, message)


def draft_chat_template_differs(observed: Observations) -> Judgement | None:
    pair = observed.draft_model
    if pair is None or pair.chat_templates is None:
        return None
    draft, target = pair.chat_templates
    number = sum(a != b for a, b in zip(draft, target, strict=False)) + abs(len(draft) - len(target))
    message = f"one conversation by the draft model's chat template and by the target's: {number} characters differ"
    return Judgement(number, 0, number > 0, message)


def draft_rope_differs(observed: Observations) -> Judgement | None:
    pair = observed.draft_model
    if pair is None or pair.rope_differences is None:
        return None
    number = len(pair.rope_differences)
    what = f": {', '.join(pair.rope_differences)}" if number else ""
    message = f"rotary settings in which draft model and target differ: {number}{what}"
    return Judgement(number, 0, number > 0, message)


def draft_model_is_target(observed: Observations) -> Judgement | None:
    pair = observed.draft_model
    if pair is None:
        return None
    other = "the target's own" if pair.has_same_weights else "its own"
    return Judgement(int(pair.has_same_weights), 0, pair.has_same_weights, f"the draft model's weights are {other}")


def steps_slower_than_built(observed: Observations) -> Judgement | None:
    """Ratio of present step times to those at the build. It uses the fastest of many steps, so that a passing neighbour
    does not count, and the median over kinds of steps.
    """
    if not observed.steps:
        return None
    ratio = median(step.seconds / step.cost.seconds for step in observed.steps)
    one = min(observed.steps, key=lambda step: step.cost.seconds)
    message = (
        f"steps take {ratio:.2f}x as long as when the engine was built (up to 2x is fine; median of "
        f"{len(observed.steps)} sizes); a step of {one.cost.num_tokens} tokens {one.seconds * 1e3:.2f} ms, and "
        f"{one.cost.seconds * 1e3:.2f} ms then"
    )
    return Judgement(ratio, 2.0, ratio > 2.0, message)


def memory_slower_than_built(observed: Observations) -> Judgement | None:
    machine = observed.machine
    if machine.when_built is None or not machine.when_built.memory_bytes_per_s:
        return None
    now, built = machine.now.memory_bytes_per_s, machine.when_built.memory_bytes_per_s
    message = (
        f"memory gives {now / 1e9:.1f} GB/s, and {built / 1e9:.1f} GB/s when the engine was built (40% of it is fine)"
    )
    return Judgement(now / built, 0.4, now / built < 0.4, message)


def fewer_threads_than_built(observed: Observations) -> Judgement | None:
    machine = observed.machine
    if machine.when_built is None:
        return None
    now, built = machine.now.num_threads, machine.when_built.num_threads
    return Judgement(now, built, now < built, f"threads: {now}, and {built} when the engine was built")


def more_threads_than_cores(observed: Observations) -> Judgement | None:
    machine = observed.machine
    number, limit = machine.now.num_threads, math.ceil(machine.num_cores)
    message = f"threads: {number}, on cores that this process may use: {machine.num_cores:g}"
    return Judgement(number, limit, number > limit, message)


def busy_machine(observed: Observations) -> Judgement | None:
    share = observed.machine.cpu_share
    message = f"a thread that computes has a core for {share:.0%} of the time (40% or more is fine)"
    return Judgement(share, 0.4, share < 0.4, message)


def several_numa_nodes(observed: Observations) -> Judgement | None:
    machine = observed.machine
    number = machine.num_numa_nodes
    is_fault = number > 1 and machine.now.num_threads > 1 and machine.memory_bytes >= LARGE_MEMORY
    return Judgement(number, 1, is_fault, f"the cores that this process may use are on NUMA nodes: {number}")


def no_huge_pages(observed: Observations) -> Judgement | None:
    machine = observed.machine
    if machine.huge_pages is None:
        return None
    is_fault = machine.huge_pages == "never" and machine.memory_bytes >= LARGE_MEMORY
    message = f"weights and K/V of {machine.memory_bytes / 1e6:,.0f} MB; huge pages: {machine.huge_pages}"
    return Judgement(machine.memory_bytes, LARGE_MEMORY, is_fault, message)


def cache_preempts(observed: Observations) -> Judgement | None:
    cache = observed.cache
    number = cache.num_preemptions
    message = (
        f"sequences preempted because the K/V cache was full: {number} times in {cache.num_iterations:,} steps, in a "
        f"cache of {cache.num_blocks:,} blocks"
    )
    return Judgement(number, 0, number > 0, message)


def reuse_never_hits(observed: Observations) -> Judgement | None:
    cache = observed.cache
    if not cache.num_findable:
        return None
    number = cache.num_found
    message = f"prompts that came again were found in the K/V cache: {number:,} of {cache.num_findable:,} tokens"
    return Judgement(number, 1, number < 1, message)


def state_slots_full(observed: Observations) -> Judgement | None:
    """Number of waits for a slot, and of evicted states if any prompt missed a state: otherwise nobody needed them."""
    if observed.states is None:
        return None
    stats = observed.states.stats
    number = stats.num_waits + (stats.num_evictions if stats.num_misses else 0)
    message = (
        f"requests that waited for one of {observed.states.num_slots} slots of states, and kept states evicted from "
        f"them: {stats.num_waits} and {stats.num_evictions}"
    )
    return Judgement(number, 0, number > 0, message)


def state_hits_missed(observed: Observations) -> Judgement | None:
    if observed.states is None:
        return None
    num_misses = observed.states.stats.num_misses
    num_prompts = observed.states.stats.num_hits + num_misses
    if not num_prompts:
        return None
    share = num_misses / num_prompts
    message = (
        f"prompts whose K/V were found, and which were computed again for lack of a state: {num_misses} of "
        f"{num_prompts}"
    )
    return Judgement(share, MAX_MISSES, num_misses >= MIN_MISSES and share > MAX_MISSES, message)


def speculation_changes_output(observed: Observations) -> Judgement | None:
    """Number of outputs that differ with the drafter, if the engine repeats its own outputs."""
    outputs = observed.outputs
    if outputs is None or observed.drafting is None or outputs.num_unrepeatable:
        return None
    number = outputs.num_changed
    message = f"outputs changed by the drafter: {number} of {outputs.num_requests}"
    return Judgement(number, 0, number > 0, message)


def output_not_repeatable(observed: Observations) -> Judgement | None:
    outputs = observed.outputs
    if outputs is None:
        return None
    number = outputs.num_unrepeatable
    runs = "two runs" if observed.drafting is None else "two runs without the drafter"
    message = f"outputs that differ between {runs}: {number} of {outputs.num_requests}"
    return Judgement(number, 0, number > 0, message)


def denormal_weights(observed: Observations) -> Judgement | None:
    weights = observed.weights
    if not weights.num_sampled:
        return None
    share = weights.num_denormal / weights.num_sampled
    message = f"weights too small to be normal numbers, which are taken for 0: {share:.2%}"
    return Judgement(share, 0.01, share > 0.01, message)


OF_DRAFTERS: tuple[Diagnosis, ...] = (
    drafter_never_used,
    acceptance_below_profile,
    acceptance_falls_with_context,
    drafts_longer_than_pays,
    draft_tokenizer_differs,
    draft_chat_template_differs,
    draft_rope_differs,
    draft_model_is_target,
    speculation_changes_output,
)
"""Diagnoses that need a drafter."""
DIAGNOSES: tuple[Diagnosis, ...] = (
    *OF_DRAFTERS,
    output_not_repeatable,
    cache_preempts,
    reuse_never_hits,
    state_slots_full,
    state_hits_missed,
    steps_slower_than_built,
    memory_slower_than_built,
    fewer_threads_than_built,
    more_threads_than_cores,
    busy_machine,
    several_numa_nodes,
    no_huge_pages,
    denormal_weights,
)


def judge(observed: Observations) -> dict[str, Judgement | None]:
    """Every diagnosis by its name."""
    return {diagnosis.__name__: diagnosis(observed) for diagnosis in DIAGNOSES}
