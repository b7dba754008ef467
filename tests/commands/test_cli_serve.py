"""What is wrong with a command line of `serve` is told in two lines, before anything is opened."""

import socket
import sys
from pathlib import Path

import pytest
from command_line import Specdec


def check(specdec: Specdec, arguments: tuple[str, ...], exit_code: int, error: str) -> None:
    result = specdec("serve", *arguments)
    assert result.exit_code == exit_code, result.stderr
    first, second, *rest = result.stderr.splitlines()
    assert first.startswith("error: ") and error in first
    assert second.startswith("hint: ") and not rest


@pytest.mark.parametrize(
    ("arguments", "exit_code", "error"),
    [
        (("--engine-dir", "nowhere"), 1, "nowhere"),
        (("--mode", "orchestrator", "--model-dir", "demo"), 2, "a server runs in leader mode"),
        (("--model-dir", "demo", "--engine-dir", "engine"), 2, "cannot be given together"),
        (("--model-dir", "demo", "--api-key", "käse"), 2, "the API key has characters"),
        (("--model-dir", "demo", "--allowed-origins", "foo"), 2, "`--allowed-origins` is no origin: foo"),
        (("--model-dir", "demo", "--allowed-origins", "https://a.org/"), 2, "is no origin: https://a.org/"),
        (("--model-dir", "demo", "--host", "no.such.host.invalid"), 2, "no such host"),
        (("--model-dir", "demo", "--port", "70000"), 2, "70000"),
        (("--model-dir", "demo", "--draft-len-mode", "auto"), 2, "needs a drafter"),
    ],
)
def test_wrong_usage_is_told(specdec: Specdec, arguments: tuple[str, ...], exit_code: int, error: str) -> None:
    check(specdec, arguments, exit_code, error)


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "prometheus_client"])
def test_a_package_that_is_missing_is_named(
    specdec: Specdec, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    check(specdec, ("--engine-dir", str(tmp_path)), 1, f"not installed: {package}")


def test_a_port_that_is_taken_is_told(specdec: Specdec, llama_engine_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        check(specdec, ("--engine-dir", str(llama_engine_dir), "--port", port), 1, "cannot listen")


def test_a_key_of_the_environment_is_never_shown(specdec: Specdec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_API_KEY", "very-secret")
    shown = specdec("serve", "--help-all")
    assert "SPECDEC_API_KEY" in shown.stdout and "very-secret" not in shown.stdout
    assert "very-secret" not in specdec("serve", "--engine-dir", "nowhere").stderr
