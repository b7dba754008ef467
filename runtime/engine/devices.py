"""Devices of a CPU: device i is the i-th NUMA node or, on a machine with one node, the i-th equal share of the cores.

Only cores that this process may use are counted, and only nodes that have such cores. Nothing here needs torch.
"""

import os
import warnings
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from functools import cache

from runtime.util.errors import SpecDecWarning, UsageError
from runtime.util.machine import allowed_cores, numa_nodes


def check_device_ids(device_ids: Seq[int] | None, tp_size: int) -> tuple[int, ...]:
    """The devices of an engine's ranks, by default the first; UsageError unless each rank has a device."""
    if device_ids is None:
        return tuple(range(tp_size))
    if len(device_ids) != tp_size:
        raise UsageError(
            f"the list of devices is not as long as the engine's tp_size {tp_size}: it has {len(device_ids)}, "
            f"{list(device_ids)}",
            hint=f"name {tp_size} device{'s' if tp_size > 1 else ''}, one for each rank",
        )
    if min(device_ids) < 0:
        raise UsageError(f"devices are numbered from 0: {list(device_ids)}", hint="use 0 for the first device")
    if len(set(device_ids)) < len(device_ids):
        raise UsageError(
            f"a device is named twice, and each has one rank of an engine: {list(device_ids)}",
            hint="name each device once",
        )
    return tuple(device_ids)


def cores_of(device_ids: Seq[int]) -> list[list[int]]:
    """The cores of each device; UsageError if there is no such NUMA node."""
    usable = usable_cores()
    nodes = [sorted(usable & cores) for cores in numa_nodes() if usable & cores]
    if len(nodes) > 1:
        if max(device_ids) >= len(nodes):
            raise UsageError(
                f"there is no such device (a CPU's are its {len(nodes)} NUMA nodes): {max(device_ids)}",
                hint="NUMA nodes are numbered from 0",
            )
        return [nodes[device_id] for device_id in device_ids]
    return equal_shares(sorted(usable), device_ids)


def equal_shares(cores: Seq[int], device_ids: Seq[int]) -> list[list[int]]:
    """The shares of these devices, if the cores are split into as many shares as the largest id needs: [0, 1] are the
    halves. If there are too few cores, neighbouring shares have a core in common, and a SpecDecWarning says so.
    """
    count, num_cores = max(device_ids) + 1, len(cores)
    if count > num_cores:
        warnings.warn(
            f"{count} devices share {num_cores} cores: they wait for each other", SpecDecWarning, stacklevel=2
        )
    starts = [device_id * num_cores // count for device_id in device_ids]
    ends = [(device_id + 1) * num_cores // count for device_id in device_ids]
    return [list(cores[start : max(end, start + 1)]) for start, end in zip(starts, ends, strict=True)]


@cache
def usable_cores() -> frozenset[int]:
    """Cores that this process may use, as they were before it was pinned."""
    return frozenset(allowed_cores())


def pin(cores: Iterable[int]) -> None:
    """Keep this thread, and threads that it starts, on these cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
