"""A share of scripts/campaigns/sanitizers.py: how kernels share their work, and that what is wrong with it is found."""

from pathlib import Path

import pytest

from runtime.kernels.library import SOURCES_DIR
from scripts.campaigns.sanitizers import PROGRAMS, SANITIZERS, find


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_tasks_are_clean_under_sanitizers(sanitizer: str) -> None:
    assert find("tasks", sanitizer) is None


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_kernels_without_torch_are_clean_under_sanitizers(program: str, sanitizer: str) -> None:
    assert find(program, sanitizer) is None


@pytest.mark.slow
def test_caller_that_does_not_wait_for_its_helpers_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor looks at them, which might come late enough to be a wait."""
    source, waits = (SOURCES_DIR / "tasks.h").read_text(), "uint32_t busy = num_inside_; busy != 0;"
    assert source.count(waits) == 1
    (tmp_path / "tasks.h").write_text(source.replace(waits, "uint32_t busy = 0; busy != 0;"))
    monkeypatch.setenv("TSAN_OPTIONS", "halt_on_error=1")  # what a helper does afterwards may be anything
    assert "data race" in (find("tasks", "thread", includes=[tmp_path]) or "")
