"""The kernels compute what their formulas say, whatever the shapes, the blocks, the dtype and the threads."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from runtime.compiler.kernels import describe_kernels, load_kernels
from runtime.compiler.linears import use_linear_kernel


@pytest.fixture(scope="module", autouse=True)
def loaded_kernels(kernels: Path) -> None:
    load_kernels(kernels)


@pytest.fixture(params=[1, 8], ids=["1 thread", "8 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """With more threads than rows of heads the keys are divided too."""
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Case:
    B: int
    Q: int
    H: int
    Hk: int
    D: int
    Dv: int
    block_size: int
    context: int
    window: int = 0


CASES = [
    Case(1, 1, 12, 4, 64, 64, 32, 1000 + 3),  # an odd number of keys in the last block
    Case(1, 6, 4, 4, 32, 32, 16, 60, window=21),
    Case(1, 1, 12, 4, 64, 64, 32, 1000),
    Case(1, 11, 12, 4, 64, 64, 32, 1000),
    Case(3, 5, 8, 2, 64, 64, 32, 777),
    Case(1, 100, 4, 4, 32, 32, 16, 60),  # a prompt: more rows than a task has, more than one chunk of keys
    Case(2, 3, 4, 2, 12, 12, 4, 50),  # heads that are no multiple of a vector, blocks shorter than one
    Case(2, 3, 6, 2, 80, 80, 32, 333),
    Case(2, 7, 4, 4, 16, 8, 1, 20),  # values narrower than keys, blocks of one token
    Case(1, 4, 8, 1, 128, 128, 256, 700),  # blocks longer than a chunk
    Case(1, 1, 2, 1, 64, 64, 32, 5000),
    Case(1, 9, 12, 4, 64, 64, 32, 1000, window=37),
    Case(2, 40, 4, 2, 16, 16, 8, 100, window=5),
    Case(1, 3, 4, 2, 16, 16, 4, 0),
    Case(1, 3, 4, 2, 16, 16, 4, 2, window=1),
]
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def run(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Outputs of kernel and formula, (B x Q, H, Dv), with new K/V written by the kernel and by hand."""
    B, Q, H, Hk, D, Dv = case.B, case.Q, case.H, case.Hk, case.D, case.Dv
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_blocks = -(-(case.context + Q) // case.block_size)
    key_pool, value_pool = (random(B * num_blocks + 1, Hk, *s) for s in ((D, case.block_size), (case.block_size, Dv)))
    block_tables = (torch.randperm(B * num_blocks, generator=generator) + 1).view(B, num_blocks)
    positions = (case.context + torch.arange(Q)).repeat(B, 1)
    slots = block_tables.gather(1, positions // case.block_size) * case.block_size + positions % case.block_size
    query, key, value = (random(1, B * Q, *s).transpose(1, 2) for s in ((H, D), (Hk, D), (Hk, Dv)))
    expected_keys, expected_values = key_pool.clone(), value_pool.clone()
    for token, slot in enumerate(slots.flatten().tolist()):
        block, offset = divmod(slot, case.block_size)
        expected_keys[block, :, :, offset] = key[0, :, token]
        expected_values[block, :, offset] = value[0, :, token]
    output = torch.ops.specdec.paged_attention(
        query, key, value, key_pool, value_pool, positions, slots, block_tables, D**-0.5, case.window
    )
    assert torch.equal(key_pool, expected_keys) and torch.equal(value_pool, expected_values)
    keys = expected_keys[block_tables].permute(0, 2, 1, 4, 3).reshape(B, Hk, -1, D).double()
    values = expected_values[block_tables].transpose(1, 2).reshape(B, Hk, -1, Dv).double()
    rows = query[0].reshape(H, B, Q, D).transpose(0, 1).double()
    scores = rows @ keys.repeat_interleave(H // Hk, 1).transpose(-1, -2) * D**-0.5
    key_positions, query_positions = torch.arange(keys.shape[2]), positions[:, None, :, None]
    visible = key_positions <= query_positions
    if case.window:
        visible &= key_positions > query_positions - case.window
    probs = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    expected = (probs @ values.repeat_interleave(H // Hk, 1)).transpose(1, 2).reshape(B * Q, H, Dv)
    return output, expected


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_is_attention(case: Case, dtype: torch.dtype, threads: int) -> None:
    output, expected = run(case, dtype)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=TOLERANCE[dtype])


def test_scores_far_apart_do_not_overflow() -> None:
    """Scores of thousands: the largest takes all, and nothing is infinite or no number."""
    query, key = torch.full((1, 1, 1, 16), 100.0), torch.full((1, 1, 1, 16), 100.0)
    key_pool, value_pool = torch.full((2, 1, 16, 4), -100.0), torch.ones(2, 1, 4, 16)
    positions, slots, tables = torch.tensor([[3]]), torch.tensor([[7]]), torch.tensor([[1]])
    value = torch.full((1, 1, 1, 16), 5.0)
    output = torch.ops.specdec.paged_attention(
        query, key, value, key_pool, value_pool, positions, slots, tables, 1.0, 0
    )
    torch.testing.assert_close(output, torch.full((1, 1, 16), 5.0))


LINEAR_SHAPES = [  # tokens, inputs, outputs
    *((num_tokens, 64, 96) for num_tokens in range(1, 14)),
    (1, 768, 1280),
    (25, 34, 7),  # a panel that is not full, and tiles of unequal size
    (100, 130, 33),
    (40, 2, 1),
    (3, 5000, 70),  # deeper than a piece of a panel
    (3, 2048, 40),  # as deep as one piece
    (3, 4096, 40),
    (300, 4100, 40),
]


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_tokens", "num_inputs", "num_outputs"), LINEAR_SHAPES)
def test_kernel_is_a_linear_layer(
    num_tokens: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, with_bias: bool, threads: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, num_tokens, num_inputs, generator=generator).to(dtype)[1:]
    weight = (torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs**0.5).to(dtype)
    bias = torch.randn(num_outputs, generator=generator).to(dtype) if with_bias else None
    output = torch.ops.specdec.linear(x, torch.ops.specdec.pack_linear(weight), bias, num_outputs)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    assert output.dtype == dtype and output.shape == (1, num_tokens, num_outputs)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


def test_linear_kernel_takes_rows_that_are_not_contiguous() -> None:
    x, weight = torch.randn(64, 5).T, torch.randn(40, 64)
    output = torch.ops.specdec.linear(x, torch.ops.specdec.pack_linear(weight), None, 40)
    torch.testing.assert_close(output, x @ weight.T, rtol=1e-4, atol=1e-4)


class _Layers(nn.Module):
    """Three layers that read one input, one with a bias, one with an odd number of inputs, and one by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, n, bias=False) for n in (24, 8, 8))
        self.biased, self.odd, self.last = nn.Linear(16, 5), nn.Linear(5, 6), nn.Linear(6, 40, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.cat([self.query(x), self.key(x), self.value(x)], -1)
        return mixed + self.last(self.odd(self.biased(x)))


def test_layers_of_one_input_become_one_in_a_compiled_step() -> None:
    describe_kernels()
    layers, x = _Layers().eval(), torch.randn(3, 16)
    program = torch.export.export(layers, (x,), strict=False)
    use_linear_kernel(program)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("specdec.linear.default") == 3  # query, key and value; biased; last
    assert targets.count("aten.linear.default") == 1  # odd
    torch.testing.assert_close(program.module()(x), layers(x))


def test_second_library_is_not_loaded_again(tmp_path: Path) -> None:
    load_kernels(tmp_path / "no such file")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 15, 64, 65, 1000, 16_000])
def test_argmax_is_numpys(dtype: torch.dtype, size: int, threads: int) -> None:
    """Of equal numbers the first, and a number that is none before all."""
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(12, size + 3, generator=generator).to(dtype)[:, :size]
    rows[1] = -torch.inf
    rows[2, size // 2 :] = torch.nan
    rows[3] = 7.0
    rows[4, -1] = torch.inf
    rows[5] = rows[5].abs().neg()
    rows[6, 0] = torch.nan
    assert torch.ops.specdec.argmax(rows).tolist() == [int(row.float().numpy().argmax()) for row in rows]


def test_argmax_is_the_first_largest() -> None:
    rows = torch.zeros(130, 130)
    expected = []
    for first in range(130):
        rows[first, first:] = 1.0 if first % 2 else -1.0
        expected.append(first if first % 2 else 0)
    assert torch.ops.specdec.argmax(rows).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_argmax_finds_the_only_nan(dtype: torch.dtype) -> None:
    """Wherever it is, and though no number after the first is larger."""
    rows = torch.full((200, 200), -1.0, dtype=dtype)
    rows[:, 0] = 1.0
    rows.fill_diagonal_(torch.nan)
    assert torch.ops.specdec.argmax(rows).tolist() == list(range(200))
