"""Observations of an engine and its settings, without diagnoses. Times in seconds."""

from dataclasses import dataclass
from pathlib import Path

from runtime.config import MachineSpeed, StepCost
from runtime.drafters.specs import DraftLenMode
from runtime.stats import LoopTimes, StateStats


@dataclass(frozen=True)
class DraftedStep:
    """One step of one request, which had `context_len` tokens before it."""

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
    """Proposed by each drafter of a chain, or by the one there is."""
    draft_len_mode: DraftLenMode
    steps: tuple[DraftedStep, ...]
    times: LoopTimes
    costs: tuple[StepCost, ...]
    """Current step times of the target, with drafts of full length, half length, and none."""
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
    """All of them where the vocabularies differ; None is compared where one of the two has no tokenizer."""
    can_draft: bool
    chat_templates: tuple[str, str] | None
    """One conversation as the draft model's template has it, and as the target's; None unless both have one."""
    rope_differences: tuple[str, ...] | None
    """None where one of the two rotates nothing."""
    has_same_weights: bool


@dataclass(frozen=True)
class Outputs:
    """The same prompts without the drafter, with it, and without it again."""

    num_requests: int
    num_changed: int
    """Different with the drafter, near ties of dtypes of 16 bits left out."""
    num_unrepeatable: int
    """Different the second time without the drafter."""


@dataclass(frozen=True)
class CacheUse:
    """Use of the K/V cache."""

    num_preemptions: int
    num_iterations: int
    num_blocks: int
    num_findable: int
    """Tokens of prompts that had been answered, and that fill at least a block."""
    num_found: int
    """Reused tokens of repeated prompts."""


@dataclass(frozen=True)
class StateUse:
    """Use of the slots of states by the prompts, asked three times: hits and misses are those of the third."""

    stats: StateStats
    num_slots: int


@dataclass(frozen=True)
class StepTime:
    """The fastest of many equal steps, and what it took when the engine was built."""

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
    """Share of time in which one continuously computing thread has a core."""
    num_numa_nodes: int
    """NUMA nodes with cores available to the process."""
    huge_pages: str | None
    """Linux's setting for transparent huge pages: always, madvise or never; None if it is unknown."""
    memory_bytes: int
    """Bytes of weights and K/V."""


@dataclass(frozen=True)
class Weights:
    """Numbers of the engine's weights that were looked at."""

    num_sampled: int
    num_denormal: int


@dataclass(frozen=True)
class Symptoms:
    """All of it; None where there was nothing to measure."""

    outputs: Outputs | None
    drafting: Drafting | None
    draft_model: DraftModelPair | None
    cache: CacheUse
    states: StateUse | None
    """None of a model without states."""
    steps: tuple[StepTime, ...]
    machine: Machine
    weights: Weights
