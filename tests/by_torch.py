"""A step that is cut, by torch's own operations between the kernels."""

import torch
from torch import Tensor

from runtime.compiler.cutting import CutStep


def computed(step: CutStep, inputs: list[Tensor]) -> Tensor:
    """Results of the calls, one after the other, by torch's operations and the kernels."""
    tensors = dict(enumerate(inputs))
    for call in step.calls:
        read = tuple(tensors[place] for place in call.inputs)
        made = torch.func.functional_call(step.programs[call.program], dict(call.weights()), read)
        tensors |= dict(zip(call.outputs, made if isinstance(made, tuple) else (made,), strict=True))
    return tensors[step.calls[-1].outputs[0]]
