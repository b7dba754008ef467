"""Standard output that is not UTF-8: commands end well, in letters that can be written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import PROMPT
from forked import Forks
from waiting import HANG_S

PROGRAM = """
import json, os, sys
from specdec_cli.app import main

ends = {}
for name, *arguments in json.load(open(sys.argv[1], encoding="utf-8")):
    if name == "run":
        arguments[1] = os.fsdecode(arguments[1].encode("utf-8"))  # as a shell gives it
    sys.argv = ["specdec", name, *arguments]
    print("$", name)
    try:
        main()
    except SystemExit as end:
        ends[name] = end.code
print("ends", json.dumps(ends))
"""
ASCII = 'import sys; sys.stdout.reconfigure(encoding="ascii"); sys.stderr.reconfigure(encoding="ascii")'
LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("where", ["stdout", pytest.param("locale", marks=pytest.mark.slow)])
def test_output_in_ascii_never_ends_in_a_traceback(
    where: str, llama_engine_dir: Path, llama_dir: Path, forks: Forks, tmp_path: Path
) -> None:
    """Print in ASCII, with `--slow` in an ASCII locale too. Ruff's PLW1514 finds files that the locale would encode."""
    text = "÷ 日本 “a” – " + PROMPT
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(text + "\n", "utf-8")
    engine, short = ["--engine-dir", llama_engine_dir], ["--max-output-len", 8]
    drafts = ["--ngram-config", "4,2"]
    at = {name: tmp_path / name for name in ("traces", "receipts", "corpus", "ckpt", "page")}
    kept = ["--output-traces", at["traces"], "--receipts", at["receipts"], "--report", at["page"]]
    commands: list[list[object]] = [
        ["run", llama_engine_dir, text, *short, *drafts, "--stats", "detailed", "--show-tokens", *kept],
        ["corpus", "create", "--output", at["corpus"], "--tokenizer-dir", llama_dir, "--text", prompts],
        ["convert", llama_dir, "--output-dir", at["ckpt"]],
        ["chat", *engine],
        ["list"],
        ["cache", "list"],
        ["serve", "--help-all"],
    ]
    (tmp_path / "commands.json").write_text(json.dumps([list(map(str, one)) for one in commands]), "utf-8")
    if where == "stdout":
        done = forks.run(tmp_path / "commands.json", program=ASCII + PROGRAM)
    else:
        others = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHONUTF8"))}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, tmp_path / "commands.json"],
            env=others | LOCALE | {"PYTHONPATH": os.getcwd()},
            stdin=subprocess.DEVNULL, capture_output=True, encoding="ascii", timeout=HANG_S,
        )  # fmt: skip
    out, errors = done.stdout, done.stderr
    assert out.isascii() and errors.isascii()
    assert done.returncode == 0 and "Traceback" not in errors, errors
    ends = json.loads(out.rpartition("ends ")[2])
    failed = {name: code for name, code in ends.items() if code}
    assert failed == {"chat": 1}, errors  # there is no chat template
    assert '"/ ?? "a" - The little dog' in out and "####" in out, out[:3000]
