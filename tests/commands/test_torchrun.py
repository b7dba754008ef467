"""`torchrun` starts a command in several processes: it is run once, and its engine's ranks are begun as without."""

import os

import pytest
from sentences import Said

from runtime.util.errors import SpecDecError
from specdec_cli.app import is_spare

OF_TWO_MACHINES = {"TORCHELASTIC_RUN_ID": "a", "RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


def test_ranks_of_two_machines_are_refused(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    for name, value in OF_TWO_MACHINES.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SpecDecError) as error:
        is_spare()
    said(error, "2")


@pytest.mark.parametrize(("given", "kept"), [("1", None), ("3", "3")])
def test_torchruns_one_thread_is_not_the_commands(
    given: str, kept: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (OF_TWO_MACHINES | {"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": given}).items():
        monkeypatch.setenv(name, value)
    assert is_spare()
    assert os.environ.get("OMP_NUM_THREADS") == kept
