"""Graphs of a step for certain sizes, and their computing by torch's own operations between the kernels."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_map

from runtime.compiler.capture import Inputs, Sizes, StepForm, by_trace
from runtime.compiler.cutting import CutStep


def traced_for(module: nn.Module, inputs: Any) -> GraphModule:
    """The module's graph for the sizes of these inputs alone, so that torch computes the graph."""
    return by_trace(module, inputs, _nothing_open(inputs))


@dataclass(frozen=True)
class SizedForm(StepForm):
    """A step's form for the sizes of `given` inputs alone."""

    given: Inputs = ()

    def inputs(self, stand_ins: list[int] | None = None) -> tuple[Inputs, Sizes]:
        few = range(len(self.given[5])) if stand_ins is None else map(stand_ins.index, sorted(set(stand_ins)))
        kept = list(few)
        pools = [[part[i] for i in kept] for part in self.given[5:7]]
        given = (*self.given[:5], *pools, *self.given[7:])
        return given, _nothing_open(given)


def _nothing_open(inputs: Any) -> Any:
    return tree_map(lambda one: {}, inputs)


def computed(step: CutStep, inputs: list[Tensor]) -> Tensor:
    """Results of the calls, one after the other, by torch's operations and the kernels."""
    tensors = dict(enumerate(inputs))
    for call in step.calls:
        read = tuple(tensors[place] for place in call.inputs)
        made = torch.func.functional_call(step.programs[call.program], dict(call.weights()), read)
        tensors |= dict(zip(call.outputs, made if isinstance(made, tuple) else (made,), strict=True))
    return tensors[step.calls[-1].outputs[0]]
