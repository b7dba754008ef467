"""A gate in the middle of a generation: an engine, of this process or another, stands still there until it is opened.

What a test does meanwhile comes before the end on the fastest machine, and not too early on the slowest.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waiting import wait_until

from runtime.core.request import Draft, Sequence
from runtime.loop.serving import RequestHandle, ServingLoop

_DIRECTORY, _NUM_STEPS = "SPECDEC_TEST_GATE", "SPECDEC_TEST_GATE_STEPS"


@dataclass(frozen=True)
class Gate:
    """The test's end of it. The engine stands still in its step number `num_steps`, with the drafter `gate:Waits`."""

    directory: Path
    num_steps: int = 4

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the engine's process."""
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {_DIRECTORY: str(self.directory), _NUM_STEPS: str(self.num_steps), "PYTHONPATH": os.pathsep.join(paths)}

    def hold(self, drafter: type[Any]) -> None:
        """Have a kind of drafters of this process wait at it, until all requests are dropped: a fork's, for good."""
        os.environ.update(self.environment)
        waits, propose, cancel = Waits(), drafter.propose, ServingLoop.cancel

        def cancel_and_open(loop: ServingLoop, answers: Iterable[RequestHandle]) -> None:
            cancel(loop, answers)
            self.open()

        def wait_and_propose(own: Any, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
            waits.propose(sequences, max_draft_len)
            return list(propose(own, sequences, max_draft_len))

        drafter.propose, ServingLoop.cancel = wait_and_propose, cancel_and_open  # type: ignore[method-assign]

    @property
    def is_reached(self) -> bool:
        return _reached(self.directory).exists()

    def open(self) -> None:
        _opened(self.directory).touch()


class Waits:
    """Drafts nothing, and waits at the gate that the environment names."""

    def __init__(self) -> None:
        self._directory = Path(os.environ[_DIRECTORY])
        self._num_left = int(os.environ[_NUM_STEPS])

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        self._num_left -= 1
        if self._num_left == 0:
            _reached(self._directory).touch()
            wait_until(_opened(self._directory).exists)
        return [Draft([]) for _ in sequences]

    def forget(self, request_id: int) -> None: ...


def _reached(directory: Path) -> Path:
    return directory / "gate-reached"


def _opened(directory: Path) -> Path:
    return directory / "gate-opened"
