"""A share of scripts/campaigns/kill.py: six kills, disks of all kinds, and that it sees what it looks for."""

import copy
import dataclasses
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from strength import draws
from waiting import HANG_S, wait_until

from runtime.util import files
from scripts.campaigns import forks, kill
from scripts.campaigns.kill import Campaign


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    forks.import_all()
    return Campaign(tmp_path_factory.mktemp("kill"), without=["tune"])  # which takes the longest


@pytest.mark.slow
def test_what_is_left_of_killed_commands_is_whole_or_absent(campaign: Campaign) -> None:
    """Some may end before they are killed."""
    campaign.found.clear()
    num_kills = draws(10, 6)
    assert [problem for number in range(num_kills) for problem in campaign.kill(number)] == []
    assert campaign.found["killed"] + campaign.found["done before it could be killed"] == num_kills


def test_processes_that_share_keys_and_values_are_killed(llama_engine_dir: Path, tmp_path: Path) -> None:
    forks.import_all()
    assert kill.SharedStore(llama_engine_dir, tmp_path / "kv").kill(draws(40, 3)) == []


class InTheMiddle:
    """Has the fork of a command stand still in the middle of what it writes, and the campaign kill it there."""

    def __init__(self, directory: Path) -> None:
        self._reached = directory / "reached"

    def write_in_two_pieces(self) -> None:
        def give_name(written: Path, path: Path) -> None:
            data = written.read_bytes()
            with path.open("wb", buffering=0) as file:
                file.write(data[: len(data) // 2])
                if not self._reached.exists():  # the next call goes on to its end
                    self._reached.touch()
                    time.sleep(10 * HANG_S)
                file.write(data[len(data) // 2 :])

        files._give_name = give_name  # in a fork

    def leave_all_behind(self) -> None:
        self.write_in_two_pieces()
        files.remove_if_abandoned = lambda directory: None

    def wait(self, seconds: float) -> None:
        """Stands in place of the campaign's sleep until it kills."""
        wait_until(self._reached.exists)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "found"), [("write_in_two_pieces", "then output is not whole"), ("leave_all_behind", "left behind: ")]
)
def test_planted_fault_is_found(
    prepare: str, found: str, campaign: Campaign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    middle = InTheMiddle(tmp_path)
    (corpus,) = (command for command in campaign.commands if command.name == "corpus")
    faulty = copy.copy(campaign)
    faulty.commands = [dataclasses.replace(corpus, prepare=getattr(middle, prepare))]
    monkeypatch.setattr(kill, "time", SimpleNamespace(sleep=middle.wait, monotonic=time.monotonic))
    monkeypatch.setattr(kill, "_wait_for_writing", lambda process_id, place: None)
    assert any(found in problem for problem in faulty.kill(0))


@pytest.fixture(scope="module")
def slow_disk() -> Iterator[dict[str, str]]:
    with kill.slow_disk() as environment:
        yield environment


@pytest.fixture
def can_mount(tmp_path: Path) -> None:
    try:
        with kill.mounted(tmp_path / "disk", "ro"):
            pass
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no disk can be mounted here")


@pytest.mark.slow
@pytest.mark.usefixtures("can_mount")
@pytest.mark.parametrize(("name", "kind"), [("convert", "size=200k"), ("run", "size=16k"), ("corpus", "ro")])
def test_full_and_read_only_disks_are_clear_errors(name: str, kind: str, campaign: Campaign) -> None:
    (command,) = (command for command in campaign.commands if command.name == name)
    campaign.found.clear()
    assert campaign.try_disk(command, kind) == []
    assert campaign.found[f"{name} on {kind}: exit code 1"] == 1
