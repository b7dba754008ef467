"""Standard output that is not UTF-8: commands end well, in letters that can be written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import PROMPT
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
ASCII = [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "ascii"}]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("variables", ASCII, ids=["locale", "stdout"])
def test_output_in_ascii_never_ends_in_a_traceback(
    variables: dict[str, str], llama_uncompiled_dir: Path, llama_dir: Path, tmp_path: Path
) -> None:
    text = "÷ 日本 “a” – " + PROMPT
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(text + "\n", "utf-8")
    engine, short = ["--engine-dir", llama_uncompiled_dir], ["--max-output-len", 8]
    drafts = ["--ngram-config", "4,2"]
    at = {name: tmp_path / name for name in ("traces", "receipts", "corpus", "ckpt", "page")}
    kept = ["--output-traces", at["traces"], "--receipts", at["receipts"], "--report", at["page"]]
    commands: list[list[object]] = [
        ["run", llama_uncompiled_dir, text, *short, *drafts, "--stats", "detailed", "--show-tokens", *kept],
        ["corpus", "create", "--output", at["corpus"], "--tokenizer-dir", llama_dir, "--text", prompts],
        ["convert", llama_dir, "--output-dir", at["ckpt"]],
        ["chat", *engine],
        ["list"],
        ["cache", "list"],
        ["serve", "--help-all"],
    ]
    (tmp_path / "commands.json").write_text(json.dumps([list(map(str, one)) for one in commands]), "utf-8")
    (tmp_path / "program.py").write_text(PROGRAM)
    others = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHONUTF8"))}
    call = [sys.executable, tmp_path / "program.py", tmp_path / "commands.json"]
    done = subprocess.run(
        call,
        env=others | variables | {"PYTHONPATH": os.getcwd()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=HANG_S,
    )
    out, errors = done.stdout.decode("ascii"), done.stderr.decode("ascii")
    assert done.returncode == 0 and "Traceback" not in errors, errors
    ends = json.loads(out.rpartition("ends ")[2])
    failed = {name: code for name, code in ends.items() if code}
    assert failed == {"chat": 1}, errors  # there is no chat template
    assert '"/ ?? "a" - The little dog' in out and "####" in out, out[:3000]
