"""Speculation statistics of a server: in each response, or as counters for Prometheus with vLLM's names."""

import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SpeculationCounts:
    """Counts of one response or of many. `num_steps` is None if it is unknown."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: tuple[int, ...] = ()
    num_steps: float | None = None

    def since(self, before: "SpeculationCounts") -> "SpeculationCounts":
        """Increase of monotonic counters."""
        longest = max(len(self.accepted_per_position), len(before.accepted_per_position))
        now, then = (_padded(counts.accepted_per_position, longest) for counts in (self, before))
        return SpeculationCounts(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
            tuple(after - earlier for after, earlier in zip(now, then, strict=True)),
        )


def total_counts(counts: Seq[SpeculationCounts]) -> SpeculationCounts:
    """The sum; its steps are known where all are."""
    longest = max((len(one.accepted_per_position) for one in counts), default=0)
    steps = [one.num_steps for one in counts]
    return SpeculationCounts(
        sum(one.num_drafts for one in counts),
        sum(one.num_draft_tokens for one in counts),
        sum(one.num_accepted_tokens for one in counts),
        tuple(map(sum, zip(*(_padded(one.accepted_per_position, longest) for one in counts), strict=True))),
        None if any(num is None for num in steps) else sum(num for num in steps if num is not None),
    )


def counts_of_response(chunk: dict[str, Any]) -> SpeculationCounts | None:
    """`metrics.speculative_decoding` of a response or of a stream's last chunk, as AIPerf reads it; None without."""
    metrics, usage = chunk.get("metrics"), chunk.get("usage")
    record = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if not isinstance(record, dict):
        return None
    drafts, drafted, accepted = (
        record.get(f"num_{name}", "") for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    positions, per_step = record.get("accepted_per_position") or [], record.get("tokens_per_step")
    if not isinstance(positions, list) or not all(
        type(number) is int for number in (drafts, drafted, accepted, *positions)
    ):
        return None
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    num_steps = None
    if isinstance(tokens, int) and isinstance(per_step, int | float) and per_step > 0:
        num_steps = tokens / per_step
    return SpeculationCounts(drafts, drafted, accepted, tuple(positions), num_steps)


_LINE = re.compile(r"vllm:spec_decode_num_(\w+)_total(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'(?:^|,)position="(\d+)"')


def counts_of_prometheus(text: str) -> SpeculationCounts | None:
    """vLLM's counters, summed over engines and models; None for a server that has none of them."""
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        position = _POSITION.search(found[2] or "")
        if found[1] == "accepted_tokens_per_pos" and position is not None:
            positions[int(position[1])] = positions.get(int(position[1]), 0.0) + float(found[3])
        else:
            sums[found[1]] = sums.get(found[1], 0.0) + float(found[3])
    if "drafts" not in sums:
        return None
    return SpeculationCounts(
        int(sums["drafts"]),
        int(sums.get("draft_tokens", 0)),
        int(sums.get("accepted_tokens", 0)),
        tuple(int(positions.get(i, 0)) for i in range(max(positions, default=-1) + 1)),
    )


def _padded(counts: Seq[int], length: int) -> list[int]:
    return [*counts, *[0] * (length - len(counts))]
