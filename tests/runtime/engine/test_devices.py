"""A device is an equal share of the cores, and rank 0 of several engines goes from one's to another's."""

import os

import pytest

from runtime.engine.devices import check_device_ids, cores_of, equal_shares
from runtime.engine.ranks import Place

pytestmark = pytest.mark.filterwarnings("ignore::runtime.util.errors.SpecDecWarning")


def test_cores_are_shared_out_equally() -> None:
    assert check_device_ids(None, 3) == (0, 1, 2)
    assert equal_shares([0, 1, 2, 3], (0, 1)) == [[0, 1], [2, 3]]
    assert equal_shares([0, 1, 2, 3, 4], (0, 1)) == [[0, 1], [2, 3, 4]]
    assert equal_shares([2, 3, 6, 7], (2, 3)) == [[6], [7]]
    assert equal_shares([0, 1], (0, 1, 2, 3)) == [[0], [0], [1], [1]]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not tell threads' cores")
def test_rank_0_goes_to_the_device_of_the_engine_that_computes() -> None:
    before = os.sched_getaffinity(0)
    first, second = (Place(cores) for cores in cores_of((0, 1)))
    for place, cores in zip((first, second, first), (*cores_of((0, 1)), cores_of((0, 1))[0]), strict=True):
        place.take()
        assert os.sched_getaffinity(0) == set(cores)
    first.leave()
    second.take()
    second.leave()
    assert os.sched_getaffinity(0) == before
