"""A share of scripts/campaigns/kill.py: ten kills, disks of all kinds, and that it sees what it looks for."""

import copy
import dataclasses
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import forks
import kill
import pytest
from kill import Campaign, Moments

from runtime import files


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    forks.import_all()
    # `tune` takes the longest, and `batch` has kills of its own (tests/commands/test_cli_batch.py).
    return Campaign(tmp_path_factory.mktemp("kill"), without=["tune", "batch"])


def test_what_is_left_of_killed_commands_is_whole_or_absent(campaign: Campaign) -> None:
    campaign.found.clear()
    assert [problem for number in range(10) for problem in campaign.kill(number)] == []
    assert campaign.found["killed"] >= 1  # of the others the end came first


def write_in_two_pieces() -> None:
    def give_name(written: Path, path: Path) -> None:
        data = written.read_bytes()
        with path.open("wb", buffering=0) as file:
            file.write(data[: len(data) // 2])
            time.sleep(1)
            file.write(data[len(data) // 2 :])

    files._give_name = give_name  # in a fork


def leave_all_behind() -> None:
    write_in_two_pieces()
    files.remove_if_abandoned = lambda directory: None


@pytest.mark.parametrize(
    ("prepare", "found"), [(write_in_two_pieces, "then output is not whole"), (leave_all_behind, "left behind: ")]
)
def test_planted_fault_is_found(prepare: Callable[[], None], found: str, campaign: Campaign) -> None:
    (corpus,) = (command for command in campaign.commands if command.name == "corpus")
    faulty = copy.copy(campaign)
    faulty.commands = [dataclasses.replace(corpus, prepare=prepare)]
    faulty.moments = {"corpus": Moments(0.5, 0.5)}
    assert any(found in problem for number in range(8) for problem in faulty.kill(number))


WRITE = """
import sys
from pathlib import Path
from runtime.files import new_file

path, data = Path(sys.argv[1]), b"new" * 1_000_000
print(flush=True)
"""


@pytest.fixture(scope="module")
def slow_disk() -> Iterator[dict[str, str]]:
    with kill.slow_disk() as environment:
        yield environment


@pytest.mark.parametrize(
    ("written", "is_whole"),
    [("with new_file(path, replace=True) as new: new.write_bytes(data)", True), ("path.write_bytes(data)", False)],
)
def test_a_slow_disk_shows_what_is_half_written(
    written: str, is_whole: bool, slow_disk: dict[str, str], tmp_path: Path
) -> None:
    """Killed while it writes for a fifth of a second."""
    path, rng, sizes = tmp_path / "written", random.Random(0), set()
    for _ in range(6):
        path.write_bytes(b"old")
        command = [sys.executable, "-c", WRITE + written, path]
        with subprocess.Popen(command, env=slow_disk, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline()
            time.sleep(rng.uniform(0, 0.2))
            process.kill()
        sizes.add(path.stat().st_size)
    assert (sizes <= {3, 3_000_000}) == is_whole


@pytest.fixture
def can_mount(tmp_path: Path) -> None:
    try:
        with kill.mounted(tmp_path / "disk", "ro"):
            pass
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no disk can be mounted here")


@pytest.mark.usefixtures("can_mount")
@pytest.mark.parametrize(("name", "kind"), [("convert", "size=200k"), ("run", "size=16k"), ("corpus", "ro")])
def test_full_and_read_only_disks_are_clear_errors(name: str, kind: str, campaign: Campaign) -> None:
    (command,) = (command for command in campaign.commands if command.name == name)
    campaign.found.clear()
    assert campaign.try_disk(command, kind) == []
    assert campaign.found[f"{name} on {kind}: exit code 1"] == 1
