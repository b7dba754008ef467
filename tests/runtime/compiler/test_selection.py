"""Tokens whose logits nobody wants are not computed after the last attention; the others' logits stay the same."""

import torch
from by_torch import traced_for

from runtime.compiler.selection import select_early


def test_operation_that_looks_at_other_tokens_is_not_passed() -> None:
    """Layers that add tokens up must see them all; those after them need not."""

    class Sums(torch.nn.Module):
        def forward(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
            return (x.cumsum(1) * 2)[:, indices]

    x, indices = torch.arange(15.0).reshape(1, 5, 3), torch.tensor([1, 4])
    program = traced_for(Sums(), (x, indices))
    select_early(program, "indices")
    targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function" and "assert" not in str(n.target)]
    assert targets[-3:] == ["aten.cumsum.default", "aten.index.Tensor", "aten.mul.Tensor"]
    assert torch.equal(program(x, indices)[0], (x.cumsum(1) * 2)[:, indices])


def test_tokens_are_not_picked_before_they_are_changed() -> None:
    """A step of such a model was refused, whose logits differed."""

    class Changes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
            made = self.first(x)
            made[..., :2] = made[..., :2] * 2
            return self.last(made)[:, indices]

    module, x, indices = Changes().eval(), torch.rand(1, 5, 4), torch.tensor([1, 4])
    with torch.no_grad():
        program = traced_for(module, (x, indices))
        select_early(program, "indices")
        torch.testing.assert_close(program(x, indices)[0], module(x, indices))
