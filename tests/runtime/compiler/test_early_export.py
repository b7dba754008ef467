"""The process that exports a new model's step while another one imports torch and reads the weights."""

import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest
import torch
from shared import MakeEngineDir
from tiny import make_model
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from waiting import HANG_S, wait_until

from runtime.cache import cache_dir
from runtime.compiler import early_export
from runtime.compiler.early_export import StepOfModel, begin_export, end_export, is_exporting

STEP = StepOfModel(None, None, 10, ())
# Of a process that cannot export: a step is what the other one has made, or compiled for half a minute and told so.
CANNOT_EXPORT = """
from select import select
from runtime.compiler import early_export
early_export._LEAST_BYTES = 0

def is_exporting(before=early_export.is_exporting):
    from runtime.compiler import cutting
    cutting.cut_step = cutting.whole_step = None
    select([early_export._process.stdout], [], [])  # until it begins
    return before()

early_export.is_exporting = is_exporting
from specdec_cli.app import main
main()
"""
BEGIN = """
import os, sys
from pathlib import Path
from runtime.compiler import early_export
if "small" not in sys.argv:
    early_export._LEAST_BYTES = 0
if "one" in sys.argv:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
early_export.begin_export(Path(sys.argv[1]), early_export.StepOfModel(None, None, 10, ()))
print(early_export._process and early_export._process.pid, flush=True)
if "dies" in sys.argv:
    os._exit(1)
"""
several_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
no_gpu = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="needs a machine without a GPU")


@several_cores
@no_gpu
def test_the_other_process_exports(
    llama: PreTrainedModel, llama_dir: Path, tokenizer: PreTrainedTokenizerFast, kernels: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    for compiled in cache_dir().glob("kernels-*.so"):
        (tmp_path / "cache" / compiled.name).symlink_to(compiled)
    text = "The little dog had a red ball"
    command = [sys.executable, "-c", CANNOT_EXPORT, "run", "--model-dir", llama_dir, text, "--max-output-len", "8"]
    env = os.environ | {"SPECDEC_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([*command, "--json"], env=env, capture_output=True, text=True, timeout=HANG_S)
    assert "torch-compile" not in done.stderr
    ids = torch.tensor([tokenizer(text).input_ids])
    expected = llama.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    assert json.loads(done.stdout)["requests"][0]["output_ids"] == expected
    assert len(list((tmp_path / "cache" / "programs").glob("step-*"))) == 1


FAILS, FAILS_LATE, WAITS = "raise SystemExit(1)", "print(flush=True); raise SystemExit(1)", "input()"


@pytest.mark.parametrize("program", [FAILS, FAILS_LATE, WAITS])
def test_nothing_depends_on_it(program: str, make_engine_dir: MakeEngineDir, monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE)
    monkeypatch.setattr(early_export, "_process", process)
    assert is_exporting()
    width = {FAILS: 56, FAILS_LATE: 72, WAITS: 88}[program]  # a form that none of the tests has
    engine_dir = make_engine_dir(make_model("llama", intermediate_size=width), compiler="aot")
    assert json.loads((engine_dir / "config.json").read_text())["compiler_note"] is None
    assert not is_exporting()
    end_export()
    assert process.returncode is not None


@several_cores
@no_gpu
@pytest.mark.parametrize("end", ["dies", "returns"])
def test_it_ends_with_who_asks(end: str, llama_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BEGIN, llama_dir, end]
    out = subprocess.run(command, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True).stdout
    wait_until(lambda: not psutil.pid_exists(int(out)))  # what it may have left, the next one with this TMPDIR removes


@pytest.mark.parametrize("case", ["one", "small"])
def test_none_is_begun_where_it_wins_nothing(case: str, llama_dir: Path) -> None:
    out = subprocess.run([sys.executable, "-c", BEGIN, llama_dir, case], capture_output=True, text=True).stdout
    assert out == "None\n"


def test_none_is_begun_by_a_process_that_has_imported_torch(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_export, "_LEAST_BYTES", 0)
    begin_export(llama_dir, STEP)
    assert not is_exporting()
