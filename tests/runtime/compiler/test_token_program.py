"""A program that is carried out token by token computes what its graph says, without a compiler."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_torch import computed
from tiny import FAMILIES, MIXTURES, make_model
from torch import Tensor, nn
from torch.export import Dim

from runtime.batch import pack
from runtime.compiler.attention import KERNEL
from runtime.compiler.compilation import example_pool, example_rows, export_step
from runtime.compiler.cutting import CutStep, cut_step
from runtime.compiler.experts import experts_by_kernel
from runtime.compiler.kernels import describe_kernels, load_kernels
from runtime.compiler.model import Step, probe_config
from runtime.compiler.token_program import CannotBeLowered, lower

BLOCK_SIZE = 16
# Its router writes into tensors that it reads later.
COMPILED = {"deepseek-v3"}


@pytest.fixture(scope="module", autouse=True)
def loaded(kernels: Path) -> None:
    load_kernels(kernels)
    describe_kernels()


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def opened(step: CutStep) -> Any:
    """The step without a compiled program."""
    made: Any = torch.classes.specdec.CutStep()
    programs = [lower(program) for program in step.programs]
    for call in step.calls:
        program = programs[call.program]
        weights = [call.weights[name] for name in program.weights]
        made.add_tokenwise(program.code, program.numbers, weights, call.inputs, call.outputs)
    return made


@pytest.mark.parametrize("family", [one for one in (*FAMILIES, *MIXTURES) if one not in COMPILED])
def test_a_familys_step_is_transformers(family: str) -> None:
    model = make_model(family)
    rows = [torch.arange(3, 10), torch.arange(20, 22)]
    shapes = probe_config(deepcopy(model.config))
    pool = example_pool(shapes, 40, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    batch = pack(example_rows([7, 2], 0, 40, BLOCK_SIZE, 2), BLOCK_SIZE, torch.device("cpu"))
    for i, row in enumerate(rows):
        batch.input_ids[i, : len(row)] = row
    with torch.no_grad():
        expected = torch.cat([model(row[None]).logits[0, -2:] for row in rows])
        model.set_attn_implementation(KERNEL)
        with experts_by_kernel(model):
            step = cut_step(model, shapes, lambda: export_step(Step(model), shapes, BLOCK_SIZE, torch.float32), 0)
    (logits,) = opened(step).run([*batch.tensors(), *(tensor for part in pool.tensors() for tensor in part)])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-neox", "gpt2", "mixtral"])
def test_numbers_of_16_bits_are_rounded_where_torch_rounds_them(family: str) -> None:
    model = make_model(family).to(torch.bfloat16)
    shapes = probe_config(deepcopy(model.config))
    batch = pack(example_rows([7, 2], 0, 40, BLOCK_SIZE, 2), BLOCK_SIZE, torch.device("cpu"))
    batch.input_ids[:] = torch.arange(batch.input_ids.numel()).view_as(batch.input_ids)
    model.set_attn_implementation(KERNEL)
    with torch.no_grad(), experts_by_kernel(model):
        step = cut_step(model, shapes, lambda: export_step(Step(model), shapes, BLOCK_SIZE, torch.bfloat16), 0)
        pools = [example_pool(shapes, 40, BLOCK_SIZE, torch.bfloat16, torch.device("cpu")) for _ in range(2)]
        inputs = [[*batch.tensors(), *(tensor for part in pool.tensors() for tensor in part)] for pool in pools]
        expected = computed(step, inputs[0])
    (logits,) = opened(step).run(inputs[1])
    assert torch.equal(logits, expected)


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def tokenwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[Tensor], Tensor]:
    """The function of rows `(1, T, ...)`, lowered."""
    exported = torch.export.export(Function(function), (x,), dynamic_shapes=({1: Dim.DYNAMIC},), strict=False)
    program = lower(exported.module(check_guards=False))
    step: Any = torch.classes.specdec.CutStep()
    step.add_tokenwise(program.code, program.numbers, [], [0], [1])

    def run(x: Tensor) -> Tensor:
        made: Tensor = step.run([x])[0]
        return made

    return run


EDGES = [0.0, -0.0, 1e-30, 1e-6, -1e-6, 0.6249, 0.6251, 1.0, -1.0, 9.0, -9.0, 87.3, 88.7, -88.7, 200.0, -200.0, 3e38]
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    # Largest difference from the function in float64, absolute and relative.
    "exp": (torch.exp, 3e-7),
    "tanh": (torch.tanh, 3e-7),
    "sigmoid": (torch.sigmoid, 3e-7),
    "silu": (F.silu, 3e-7),
    "relu": (F.relu, 0),
    "gelu": (F.gelu, 4e-7),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), 4e-7),
    "sin": (torch.sin, 2e-7),
    "cos": (torch.cos, 2e-7),
    "square root": (lambda x: torch.sqrt(torch.abs(x)), 1e-7),
    "inverse root": (lambda x: torch.rsqrt(torch.abs(x) + 1e-6), 2e-7),
    "third power": (lambda x: x.clamp(-9, 9) ** 3.0, 2e-7),
    "power": (lambda x: torch.abs(x).clamp(max=1e3) ** 1.5, 2e-7),
    "softmax": (lambda x: torch.softmax(x, -1), 1e-6),
    "layer norm": (lambda x: F.layer_norm(x.clamp(-9, 9), (x.shape[-1],)), 2e-6),
    "root mean square": (lambda x: F.rms_norm(x.clamp(-9, 9), (x.shape[-1],), eps=1e-6), 1e-6),
    "sum": (lambda x: x.clamp(-9, 9).sum(-1, keepdim=True), 1e-5),
    "bounds": (lambda x: x.clamp(-2, 3), 0),
    "alternating": (lambda x: torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2), 0),
    "halves": (lambda x: torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1), 0),
    "heads": (lambda x: (x.view(1, -1, 4, x.shape[-1] // 4).transpose(1, 2) * 2).transpose(1, 2).flatten(2), 0),
    "other order": (lambda x: x.view(1, -1, 4, x.shape[-1] // 4).transpose(2, 3).reshape(1, -1, x.shape[-1]), 0),
    "same twice": (lambda x: torch.cat([y := x.clamp(-9, 9) + 1, y], -1), 2e-7),
    "largest": (lambda x: torch.topk(x.clamp(-9, 9), 4)[0], 0),
    "picked": (lambda x: x.gather(-1, torch.topk(x, 4)[1]), 0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_torchs(name: str) -> None:
    """In float64, of edges and of random numbers, in widths that fill no register."""
    function, off = FUNCTIONS[name]
    values = torch.cat([torch.tensor(EDGES), torch.randn(199, generator=torch.Generator().manual_seed(0)) * 10])
    x = values.view(1, 6, 36)
    made = tokenwise(function, x)(x)
    torch.testing.assert_close(made, function(x.double()).float(), rtol=off, atol=off)


@pytest.mark.parametrize("name", ["exp", "silu", "gelu", "tanh", "softmax"])
def test_what_is_no_number_stays_none(name: str) -> None:
    function, _ = FUNCTIONS[name]
    x = torch.full((1, 2, 32), float("nan"))
    assert tokenwise(function, torch.zeros(1, 3, 32))(x).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_operation_is_rounded(dtype: torch.dtype) -> None:
    x = torch.randn(1, 5, 48, generator=torch.Generator().manual_seed(1)).to(dtype)

    def chain(x: Tensor) -> Tensor:
        return (x * 1.3 + 0.7) * F.silu(x) / 3 + torch.pow(x, 3.0) - torch.pow(x, 2)

    made = tokenwise(chain, x)(x)
    assert made.dtype == dtype and torch.equal(made, chain(x))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_tokens_bits_do_not_depend_on_others(num_threads: int, threads: Callable[[int], None]) -> None:
    """So many that threads share them, too."""
    threads(num_threads)
    x = torch.randn(1, 300, 200, generator=torch.Generator().manual_seed(2))
    run = tokenwise(lambda x: torch.softmax(F.gelu(x), -1) * F.layer_norm(x, (200,)), x[:, :3])
    together = run(x)
    for token in (0, 1, 150, 299):
        assert torch.equal(run(x[:, token : token + 1].contiguous())[0, 0], together[0, token])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cumsum(x, 1),
        lambda x: x.sum(1, keepdim=True) + x,
        lambda x: x.transpose(1, 2).reshape(1, -1, 8),
        lambda x: x[:, 1:],
        lambda x: torch.cat([x, x], 1),
        lambda x: x.flip(-1),
        lambda x: x * torch.ones(8, dtype=torch.float64),
    ],
    ids=["cumulated", "summed over tokens", "mixed", "without the first", "longer", "unknown operation", "float64"],
)
def test_what_looks_at_other_tokens_is_left_to_the_compiler(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CannotBeLowered):
        tokenwise(function, torch.zeros(1, 3, 8))


def test_what_is_overwritten_and_read_again_is_left_to_the_compiler() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        z = y + 1
        y.mul_(3)
        return y + z

    def again(x: Tensor) -> Tensor:
        y = x * 2
        z = y[..., :4]
        y.mul_(3)
        return torch.cat([z, y], -1)

    x = torch.randn(1, 3, 8)
    assert torch.equal(tokenwise(function, x)(x), function(x))
    with pytest.raises(CannotBeLowered):
        tokenwise(again, x)


@pytest.mark.parametrize("cut", [1, 3, 40])
def test_code_that_is_cut_off_is_an_error(cut: int) -> None:
    x = torch.zeros(1, 3, 8)
    exported = torch.export.export(Function(torch.relu), (x,), dynamic_shapes=({1: Dim.DYNAMIC},), strict=False)
    program = lower(exported.module(check_guards=False))
    step: Any = torch.classes.specdec.CutStep()
    with pytest.raises(RuntimeError, match="token program"):
        step.add_tokenwise(program.code[:-cut], program.numbers, [], [0], [1])
