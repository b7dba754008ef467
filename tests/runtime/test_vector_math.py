"""MKL's vector math chooses its functions by one number each, before two threads ask for one at once: see
pytorch/pytorch#188792.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
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

with Sizes():
    if sys.argv[1] == "engine":
        from runtime.engine import Engine
        Engine.open(Path(sys.argv[2])).close()
    else:
        from runtime.checkpoint_dir import open_checkpoint
        from runtime.bundle import weights_files
        from runtime.compiler.model import ModelKind, load_model
        from runtime.config import ALONE
        from runtime.compiler.pretrained import parse_pretrained_config
        directory = Path(sys.argv[2])
        config = parse_pretrained_config(open_checkpoint(directory).pretrained_config, "config.json")
        model = load_model(ModelKind(config, torch.float32, "eager"), directory / weights_files(ALONE)[0])
        with torch.inference_mode():
            model(input_ids=torch.arange(80).remainder(config.vocab_size)[None], use_cache=False)
print(json.dumps(first))
"""
# Those that ATen's vml.h gives to MKL with a result that is rounded.
FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "exp", "expm1"),
    *("log", "log10", "log1p", "log2", "sin", "sqrt", "tan", "tanh"),
)


@pytest.mark.parametrize("what", ["engine", "model"])
def test_a_process_calls_each_function_with_one_number_first(
    what: str, llama_engine_dir: Path, llama_checkpoint_dir: Path
) -> None:
    """Else a process's first rotary angles were wrong in the fourth digit in some builds: those that had to read
    libraries from disk.
    """
    directory = llama_engine_dir if what == "engine" else llama_checkpoint_dir
    command = [sys.executable, "-c", PROGRAM, what, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first = json.loads(done.stdout.splitlines()[-1])
    sizes = {
        (name, dtype): first.get(f"aten::{name}", {}).get(f"torch.{dtype}")
        for name in FUNCTIONS
        for dtype in ("float32", "float64")
    }
    assert set(sizes.values()) == {1}, {key: size for key, size in sizes.items() if size != 1}
