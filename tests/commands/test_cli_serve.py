"""Mistakes in a command line of `serve` are told in two lines, before anything is opened."""

import socket
import sys
from pathlib import Path

import pytest
from command_line import Specdec
from sentences import Said


def check(specdec: Specdec, arguments: tuple[str, ...], exit_code: int, said: Said, *values: str) -> None:
    result = specdec("serve", *arguments)
    assert result.exit_code == exit_code, result.stderr
    first, second, *rest = result.stderr.splitlines()
    assert first.startswith("error: ") and second.startswith("hint: ") and not rest
    said(result, *values)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "error"),
    [
        (("--engine-dir", "nowhere"), 1, "nowhere"),
        (("--mode", "orchestrator", "--model-dir", "demo"), 2, "leader"),
        (("--model-dir", "demo", "--engine-dir", "engine"), 2, "`--engine-dir`; `--model-dir`"),
        (("--model-dir", "demo", "--api-key", "käse"), 2, ""),
        (("--model-dir", "demo", "--api-key", "one,,two"), 2, ""),
        (("--model-dir", "demo", "--max-requests-per-client", "0"), 2, "0"),
        (("--model-dir", "demo", "--max-gap-ms", "-1"), 2, "-1"),
        (("--model-dir", "demo", "--allowed-origins", "foo"), 2, "`--allowed-origins`; foo"),
        (("--model-dir", "demo", "--allowed-origins", "https://a.org/"), 2, "https://a.org/"),
        (("--model-dir", "demo", "--host", "no.such.host.invalid"), 2, "no.such.host.invalid"),
        (("--model-dir", "demo", "--port", "70000"), 2, "70000"),
        (("--model-dir", "demo", "--tool-call-parser", "hermse"), 2, "hermse"),
        (("--model-dir", "demo", "--reasoning-parser", "hm"), 2, "hm"),
        (("--model-dir", "demo", "--ssl-keyfile", "key.pem"), 2, "`--ssl-keyfile`"),
        (("--model-dir", "demo", "--ssl-certfile", "nowhere.pem"), 2, "nowhere.pem"),
        (("--model-dir", "demo", "--draft-len-mode", "auto"), 2, "auto"),
    ],
)
def test_wrong_usage_is_told(
    specdec: Specdec, arguments: tuple[str, ...], exit_code: int, error: str, said: Said
) -> None:
    check(specdec, arguments, exit_code, said, *error.split("; "))


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "prometheus_client"])
def test_a_package_that_is_missing_is_named(
    specdec: Specdec, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: Said
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    check(specdec, ("--engine-dir", str(tmp_path)), 1, said, package)


def test_a_port_that_is_taken_is_told(specdec: Specdec, llama_engine_dir: Path, said: Said) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        check(specdec, ("--engine-dir", str(llama_engine_dir), "--port", port), 1, said, port)


def test_a_key_of_the_environment_is_never_shown(specdec: Specdec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_API_KEY", "very-secret")
    shown = specdec("serve", "--help-all")
    assert "SPECDEC_API_KEY" in shown.stdout and "very-secret" not in shown.stdout
    assert "very-secret" not in specdec("serve", "--engine-dir", "nowhere").stderr
