"""MKL's vector math chooses its functions by one number each, before two threads ask for one at once: see
pytorch/pytorch#188792.
"""

import json
from pathlib import Path

import pytest
from forked import Forks

# Each in a fork of a process that has imported torch, and computed nothing.
PROGRAM = """
import json, os, sys
from pathlib import Path
import specdec_cli, torch
from torch.utils._python_dispatch import TorchDispatchMode

first = {}
class Sizes(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        if arguments and isinstance(arguments[0], torch.Tensor):
            first.setdefault(operation.overloadpacket._qualified_op_name, {}).setdefault(
                str(arguments[0].dtype), arguments[0].numel())
        return operation(*arguments, **(keywords or {}))

def open_it(what, directory):
    if what == "engine":
        from runtime.engine.engine import Engine
        Engine.open(directory).close()
    else:
        from runtime.checkpoint.checkpoint_dir import open_checkpoint
        from runtime.checkpoint.bundle import weights_files
        from runtime.model.model import ModelKind, load_model
        from runtime.checkpoint.config import ALONE
        from runtime.model.pretrained import parse_pretrained_config
        config = parse_pretrained_config(open_checkpoint(directory).pretrained_config, "config.json")
        model = load_model(ModelKind(config, torch.float32, "eager"), directory / weights_files(ALONE)[0])
        with torch.inference_mode():
            model(input_ids=torch.arange(80).remainder(config.vocab_size)[None], use_cache=False)

for what, directory in zip(("engine", "model"), sys.argv[1:]):
    if os.fork() == 0:
        with Sizes():
            open_it(what, Path(directory))
        print(json.dumps(first), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
# Those that ATen's vml.h gives to MKL with a result that is rounded.
FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "exp", "expm1"),
    *("log", "log10", "log1p", "log2", "sin", "sqrt", "tan", "tanh"),
)


@pytest.mark.slow
def test_a_process_calls_each_function_with_one_number_first(
    forks: Forks, llama_engine_dir: Path, llama_checkpoint_dir: Path
) -> None:
    """Else a process's first rotary angles were wrong in the fourth digit in some builds: those that had to read
    libraries from disk.
    """
    done = forks.run(llama_engine_dir, llama_checkpoint_dir, program=PROGRAM)
    assert done.returncode == 0, done.stderr
    of_engine, of_model = map(json.loads, done.stdout.splitlines())
    sizes = {
        (what, name, dtype): first.get(f"aten::{name}", {}).get(f"torch.{dtype}")
        for what, first in (("engine", of_engine), ("model", of_model))
        for name in FUNCTIONS
        for dtype in ("float32", "float64")
    }
    assert set(sizes.values()) == {1}, {key: size for key, size in sizes.items() if size != 1}
