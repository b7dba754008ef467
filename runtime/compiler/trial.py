"""Child process that finds out whether packages compiled ahead of time run on a device, by running one.

Ends with exit status 0 if it did and computed what torch computes. Opening one may end the process by a signal.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runtime.compiler.programs import named_compiler


def main() -> None:
    """The device is the last argument, such as `cuda:0`."""
    device = torch.device(sys.argv[-1])
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)).to(device).eval()
    x = torch.ones(3, 8, device=device)
    with torch.no_grad(), tempfile.TemporaryDirectory() as directory:
        program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        package = str(Path(directory) / "trial.pt2")
        # Headers are not precompiled: for one program it takes longer than reading them.
        options = {"aot_inductor.precompile_headers": False}
        with named_compiler():
            torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=options)
        index = -1 if device.index is None else device.index
        loader: Any = torch._C._aoti.AOTIModelPackageLoader(package, "model", False, 1, index)
        for tokens in (x, x[:2]):
            (output,) = loader.run([tokens])
            torch.testing.assert_close(output, model(tokens), rtol=1e-2, atol=1e-2)
