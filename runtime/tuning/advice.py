"""Estimate of automatic draft lengths if those of a fixed length lost: of the same outputs, by replay."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from runtime.costs import CostModel
from runtime.drafters.speculation import NO_SPECULATION, Speculation
from runtime.request import Sequence
from runtime.session import Session
from runtime.tuning.replay import Trace
from runtime.tuning.search import Cost, Replayer, step_s

_MAX_TOKENS = 10_000
"""Output tokens to replay at most; of more, a sample: a fraction of a second."""
_LOSS = 0.995


@dataclass(frozen=True)
class FixedLost:
    """Speedups of both over no drafter, by the step costs of the build."""

    fixed: float
    automatic: float


def fixed_lost(session: Session, sequences: Seq[Sequence], batch_size: int) -> FixedLost | None:
    """Advice on finished requests that a lookup drafted for with a fixed length, `batch_size` at once.

    None if that did not lose, if automatic lengths would have lost as much, or if it is unknown.
    """
    speculation, engine = session.speculation, session.engine
    is_known = speculation.lookup and speculation.draft_len_mode == "fixed" and engine.config.step_costs
    if not is_known or not sequences:
        return None
    traces = [Trace(s.request.prompt_tokens, tuple(s.output_tokens)) for s in sequences]
    request = sequences[0].request
    cost = Cost(CostModel(engine.config.step_costs, engine.config.host_s), engine.max_num_tokens)
    replayer = Replayer(traces, batch_size, cost, request.end_ids, request.max_new_tokens).thinned(_MAX_TOKENS)
    candidates = NO_SPECULATION, speculation, speculation.in_mode("auto")
    none, fixed, automatic = (_seconds(replayer, candidate) for candidate in candidates)
    return FixedLost(none / fixed, none / automatic) if none / fixed < _LOSS and automatic < fixed else None


def _seconds(replayer: Replayer, candidate: Speculation) -> float:
    """Seconds of the steps alone: looking up takes microseconds, and how many is the moment's."""
    replayed, cost = replayer.replay(candidate).batches, replayer.cost
    assert cost is not None
    return sum(step_s(step, cost.costs, cost.max_num_tokens) for step in replayed.steps)
