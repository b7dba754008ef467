"""A program that is carried out token by token computes what its graph says, without a compiler."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_torch import SizedForm, computed
from tiny import ATTENTIONS, FAMILIES, MIXTURES, WITHOUT_ATTENTION, make_model
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from runtime.compiler.capture import NoTokenProgram, StepForm, by_trace, example_pool, example_rows, example_states
from runtime.compiler.compilation import token_step_of
from runtime.compiler.cutting import CutStep, cut_step, whole_step
from runtime.compiler.token_program import TokenProgram, lower
from runtime.core.batch import pack
from runtime.kernels.ops import describe_kernels, load_kernels
from runtime.model.attention import KERNEL
from runtime.model.experts import experts_by_kernel
from runtime.model.model import Step, probe_config
from scripts.tools.families import random_model, small_config

BLOCK_SIZE = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# No more layers than it takes to have one of each kind.
_TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
FEW_LAYERS: dict[str, dict[str, Any]] = {
    "lfm2": _TWO_LAYERS | {"layer_types": ["conv", "full_attention"]},
    "qwen3.5": _TWO_LAYERS,
    "qwen3-next": _TWO_LAYERS,
    "minimax": _TWO_LAYERS,
    "jamba": {"num_hidden_layers": 2},
    "recurrent-gemma": {"num_hidden_layers": 3},
    "nemotron-h": {"layers_block_type": ["linear_attention", "moe"] * 2 + ["full_attention", "mlp"]},
    "kimi-linear": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "full_attention"],
        "mlp_layer_types": ["sparse"] * 4,
    },
}
# A program for each kind of layer that is not the last, and the beginning and the end.
NUM_PROGRAMS = {"nemotron-h": 5, "kimi-linear": 4, "gemma3": 4, "smollm3": 4}
Cut = Callable[[StepForm], CutStep]


@pytest.fixture(scope="module", autouse=True)
def loaded(kernels: Path) -> None:
    load_kernels(kernels)
    describe_kernels()


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def program_of(graph: GraphModule, *, groups: bool = True) -> TokenProgram:
    program = lower(graph, groups=groups)
    assert isinstance(program, TokenProgram), program
    return program


def opened(step: CutStep, *, groups: bool = True) -> Any:
    """The step without a compiled program."""
    made: Any = torch.classes.specdec.CutStep()
    programs = [program_of(program, groups=groups) for program in step.programs]
    for call in step.calls:
        program = programs[call.program]
        given = dict(call.weights())
        weights = [given[name] for name in program.weights]
        made.add_tokenwise(program.code, program.numbers, weights, call.inputs, call.outputs)
    return made


def use_kernels(model: PreTrainedModel) -> None:
    model.set_attn_implementation(KERNEL)
    model.config._attn_implementation = KERNEL  # also of a model without attention, whose states have kernels


def in_layers(form: StepForm) -> CutStep:
    step = cut_step(form, 0)
    assert isinstance(step, CutStep), step
    return step


def as_one(form: StepForm) -> CutStep:
    step = whole_step(form.step, *form.inputs(), 0)
    assert isinstance(step, CutStep), step
    return step


def check_step(model: PreTrainedModel, cut: Cut) -> CutStep:
    """Logits of two rows beside transformers' eager ones: by torch's operations, and token by token.

    Groups of operations have the bits of each by itself: no product and sum became one instruction.
    """
    rows = [torch.arange(3, 10), torch.arange(20, 22)]
    shapes = probe_config(deepcopy(model.config))
    in_step = example_rows([7, 2], 0, 40, BLOCK_SIZE, 2)
    batch = pack(in_step, BLOCK_SIZE, torch.device("cpu"))
    for i, row in enumerate(rows):
        batch.input_ids[i, : len(row)] = row

    def inputs() -> tuple[Any, ...]:
        pool = example_pool(shapes, 40, BLOCK_SIZE, torch.float32, torch.device("cpu"))
        return (*batch, *pool.tensors, *example_states(shapes, in_step, torch.float32))

    with torch.no_grad():
        expected = torch.cat([model(row[None]).logits[0, -2:] for row in rows])
        form = Step(model), shapes, BLOCK_SIZE, torch.float32
        use_kernels(model)
        with experts_by_kernel(model):
            step, sized = cut(StepForm(*form)), cut(SizedForm(*form, given=inputs()))
        torch.testing.assert_close(computed(sized, tree_leaves(inputs())), expected, rtol=1e-4, atol=1e-4)
    (logits,) = opened(step).run(tree_leaves(inputs()))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(opened(step, groups=False).run(tree_leaves(inputs()))[0], logits)
    return step


def families(*names: str, slow: set[str]) -> list[Any]:
    """Families as parameters; those whose operations others have are slow tests."""
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in names]


LIKE_OTHERS = {
    *("mistral", "mistral-sliding", "mixtral", "qwen2-moe", "qwen2", "qwen3", "qwen3-moe", "qwen3-next", "smollm3"),
    *("olmo2", "granite", "gemma2", "gemma3", "gpt-neox", "minimax", "phi3", "kimi-linear", *WITHOUT_ATTENTION),
    *("cohere", "jamba", "llama4", "nemotron-h", "opt", "recurrent-gemma"),
    # Engines of these are compiled and compared with transformers in other tests, and Qwen3.5's bits below.
    *("llama", "lfm2", "qwen3.5", "deepseek-v3", "gpt-oss"),
}
IN_16_BITS = ("llama", "mamba", "mamba2", "gemma3", "gpt-neox", "gpt2", "mixtral", "deepseek-v3", "lfm2", "qwen3.5")


@pytest.mark.parametrize("family", families(*FAMILIES, *MIXTURES, *WITHOUT_ATTENTION, *ATTENTIONS, slow=LIKE_OTHERS))
def test_a_familys_step_is_transformers(family: str) -> None:
    assert len(check_step(make_model(family, **FEW_LAYERS.get(family, {})), in_layers).programs) == NUM_PROGRAMS.get(
        family, 3
    )


# Whose operations few others have, or whose modules are replaced.
ODD_FAMILIES = ("jetmoe",)
ODD_LIKE_OTHERS = (
    "gemma3n_text",  # whose layers take four seconds to trace
    "cohere_compass_text",
    "deepseek_v2",
    "longcat_flash",
    "phimoe",
    "zamba2",
    "gpt_neox_japanese",
    "mistral_large4",
)


@pytest.mark.parametrize("family", families(*ODD_FAMILIES, *ODD_LIKE_OTHERS, slow={*ODD_LIKE_OTHERS}))
def test_a_step_of_odd_operations_is_transformers(family: str) -> None:
    config = small_config(family)
    if family == "jetmoe":  # whose layers are all alike
        config.num_hidden_layers = 2
    check_step(random_model(family, config, 0.3, 0.3), in_layers)


@pytest.mark.parametrize(("family", "num_layers"), [("falcon-h1", 1), ("gpt-neo", 2)])
def test_a_step_that_is_not_cut_is_transformers(family: str, num_layers: int) -> None:
    check_step(make_model(family, num_hidden_layers=num_layers), as_one)


@pytest.mark.parametrize("family", families(*IN_16_BITS, slow=set(IN_16_BITS) - {"lfm2"}))
def test_numbers_of_16_bits_are_rounded_where_torch_rounds_them(family: str) -> None:
    model = make_model(family, **FEW_LAYERS.get(family, {})).to(torch.bfloat16)
    shapes = probe_config(deepcopy(model.config))
    rows = example_rows([7, 2], 0, 40, BLOCK_SIZE, 2)
    batch = pack(rows, BLOCK_SIZE, torch.device("cpu"))
    batch.input_ids[:] = torch.arange(batch.input_ids.numel()).view_as(batch.input_ids)
    use_kernels(model)
    pools = [example_pool(shapes, 40, BLOCK_SIZE, torch.bfloat16, torch.device("cpu")) for _ in range(2)]
    states = [example_states(shapes, rows, torch.bfloat16) for _ in pools]
    inputs = [(*batch, *pool.tensors, *own) for pool, own in zip(pools, states, strict=True)]
    with torch.no_grad(), experts_by_kernel(model):
        form = Step(model), shapes, BLOCK_SIZE, torch.bfloat16
        step, sized = in_layers(StepForm(*form)), in_layers(SizedForm(*form, given=inputs[0]))
        expected = computed(sized, tree_leaves(inputs[0]))
    (logits,) = opened(step).run(tree_leaves(inputs[1]))
    assert torch.equal(logits, expected)


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def graph_of(function: Callable[[Tensor], Tensor], x: Tensor) -> GraphModule:
    return by_trace(Function(function), (x,), ({1: "tokens"},))


def tokenwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[Tensor], Tensor]:
    """The function of rows `(1, T, ...)`, lowered."""
    return lowered(graph_of(function, x))


def lowered(graph: GraphModule, *, groups: bool = True) -> Callable[[Tensor], Tensor]:
    program = program_of(graph, groups=groups)
    step: Any = torch.classes.specdec.CutStep()
    weights = [getattr(graph, name) for name in program.weights]
    step.add_tokenwise(program.code, program.numbers, weights, [0], [1])

    def run(x: Tensor) -> Tensor:
        made: Tensor = step.run([x])[0]
        return made

    return run


def twice_each(x: Tensor) -> Tensor:
    """DiffLlama's queries all see the values of both halves of the heads."""
    heads = x.view(1, -1, 4, x.shape[-1] // 4).transpose(1, 2)
    return heads.repeat(1, 2, 1, 1).transpose(1, 2).flatten(2)


def left_groups(x: Tensor) -> Tensor:
    """DeepSeek's router leaves groups of experts by tensors that are written after they were made."""
    groups = x.view(1, -1, 4, x.shape[-1] // 4).topk(2)[0].sum(-1)
    mask = torch.zeros_like(groups)
    mask.scatter_(-1, groups.topk(2)[1], 1)
    wide = mask.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1] // 4).reshape(x.shape)
    return x.masked_fill(~wide.bool(), -1.0)


def filled_in_parts(x: Tensor) -> Tensor:
    whole = x.new_empty(x.shape)
    whole[..., 12:] = x[..., :-12]
    whole[..., :12] = x[..., -12:] * 2
    return whole


def small_products(x: Tensor) -> Tensor:
    """GLM-5 Next mixes four streams of a token by matrices of its own."""
    return (x[..., :16].unflatten(-1, (4, 4)) @ x[..., 4:36].unflatten(-1, (4, 8))).flatten(2)


def overwritten_in_part(x: Tensor) -> Tensor:
    """Views of the same memory show the change, and copies do not."""
    y = x.clamp(-9, 9) * 2
    view, copied = y[..., 1:5], y.clone()
    y[..., ::3] = y[..., 1::3] + 1
    y[..., 7:9] = 0.5
    view.mul_(3)
    return torch.cat([y, view, copied], -1)


EDGES = [0.0, -0.0, 1e-30, 1e-6, -1e-6, 0.6249, 0.6251, 1.0, -1.0, 9.0, -9.0, 87.3, 88.7, -88.7, 200.0, -200.0, 3e38]
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    # Largest difference from the function in float64, absolute and relative.
    "exp": (torch.exp, 3e-7),
    "tanh": (torch.tanh, 3e-7),
    "sigmoid": (torch.sigmoid, 3e-7),
    "silu": (F.silu, 3e-7),
    "relu": (F.relu, 0),
    "softplus": (F.softplus, 3e-7),
    "mish": (F.mish, 6e-7),
    "leaky": (lambda x: F.leaky_relu(x, 0.2), 1e-7),
    "hard tanh": (lambda x: F.relu6(x) + F.hardtanh(x) + F.hardtanh(x, -2.0, 3.0), 2e-7),
    "square": (lambda x: torch.square(x.clamp(-9, 9)), 0),
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
    "sum of rows": (lambda x: x.clamp(-9, 9).view(1, -1, 4, x.shape[-1] // 4).sum(2), 2e-6),
    "bounds": (lambda x: x.clamp(-2, 3), 0),
    "bounds in place": (lambda x: (x * 2).clamp_(-2, 3), 0),
    "alternating": (lambda x: torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2), 0),
    "halves": (lambda x: torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1), 0),
    "heads": (lambda x: (x.view(1, -1, 4, x.shape[-1] // 4).transpose(1, 2) * 2).transpose(1, 2).flatten(2), 0),
    "other order": (lambda x: x.view(1, -1, 4, x.shape[-1] // 4).transpose(2, 3).reshape(1, -1, x.shape[-1]), 0),
    "same twice": (lambda x: torch.cat([y := x.clamp(-9, 9) + 1, y], -1), 2e-7),
    "largest": (lambda x: torch.topk(x.clamp(-9, 9), 4)[0], 0),
    "largest one": (lambda x: torch.max(x, -1, keepdim=True)[0] + torch.max(x, -1)[1][..., None], 0),
    "logarithm": (lambda x: torch.log(torch.abs(x) + 1e-6), 3e-7),
    "exponential less 1": (torch.expm1, 6e-7),
    "smaller one": (lambda x: torch.min(x, torch.abs(x) * -0.5) + torch.maximum(x.clamp(-9, 9), x * 0.5), 2e-7),
    "norm of one": (lambda x: torch.linalg.vector_norm(x.clamp(-9, 9), 1, -1, keepdim=True), 1e-6),
    "norm of two": (lambda x: torch.linalg.vector_norm(x.clamp(-9, 9), 2, -1), 1e-6),
    "whole part": (lambda x: torch.floor(x.clamp(-9, 9) / 2), 0),
    "masked": (lambda x: x.masked_fill(~(x > 0.5), -2.0), 0),
    "chosen": (lambda x: torch.where(torch.abs(x) > 1, x, x * 2), 0),
    "between": (lambda x: torch.clamp(x, min=x.mean(-1, keepdim=True)), 1e-6),
    "scattered": (lambda x: x.scatter(-1, torch.topk(x, 3)[1], -7.0), 0),
    "groups that are left": (lambda x: left_groups(x), 0),
    "filled in parts": (lambda x: filled_in_parts(x), 0),
    "heads twice": (lambda x: twice_each(x), 0),
    "expanded": (lambda x: x * torch.full((1,), 3.0).expand_as(x), 0),
    "not less": (lambda x: torch.where(x < 0.5, x * 2, 7.0) + (x >= 1) * 1.0 + (x <= -1), 0),
    "both": (lambda x: x.masked_fill(torch.logical_and(x > 0.5, x < 9), -2.0), 0),
    "small matrices": (lambda x: small_products(x.clamp(-9, 9)), 2e-6),
    "a part overwritten": (lambda x: overwritten_in_part(x), 2e-7),
    "tiles": (lambda x: x[..., :1].repeat(1, 1, 3) + x[..., :6].repeat(2, 1, 1, 1)[1, ..., :3], 2e-7),
    "picked": (lambda x: x.gather(-1, torch.topk(x, 4)[1]), 0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_torchs(name: str) -> None:
    """Compared in float64, of edges and of random numbers, in widths that fill no register."""
    function, off = FUNCTIONS[name]
    values = torch.cat([torch.tensor(EDGES), torch.randn(199, generator=torch.Generator().manual_seed(0)) * 10])
    x = values.view(1, 6, 36)
    made = tokenwise(function, x)(x)
    torch.testing.assert_close(made, function(x.double()).float(), rtol=off, atol=off)


@pytest.mark.parametrize("name", ["exp", "silu", "softplus", "gelu", "tanh", "softmax"])
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


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cosine + torch.cat([-x[..., half:], x[..., :half]], -1) * sine


def heads_of(x: Tensor) -> Tensor:
    return x.view(1, -1, 3, x.shape[-1] // 3).transpose(1, 2)


WEIGHTS, BIASES, OF_HEADS = (
    {dtype: torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype) for dtype in DTYPES}
    for size in (60, 60, 20)
)
GROUPS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda x: norm(x, WEIGHTS[x.dtype]),
    "norm rounded once": lambda x: (norm(x.float(), WEIGHTS[torch.float32])).to(x.dtype),
    "norm of heads": lambda x: norm(heads_of(x), OF_HEADS[x.dtype]).transpose(1, 2).flatten(2),
    "norm of a sum": lambda x: torch.cat([y := x + x * 2, norm(y, WEIGHTS[x.dtype])], -1),
    "layer norm": lambda x: F.layer_norm(x, (60,), WEIGHTS[x.dtype], BIASES[x.dtype]),
    "layer norm without bias": lambda x: F.layer_norm(x, (60,), WEIGHTS[x.dtype]),
    "rotary": lambda x: rotated(heads_of(x), x[:, None, :, :20], x[:, None, :, 20:40]).transpose(1, 2).flatten(2),
    "rotary of a part": lambda x: torch.cat([rotated(x[..., :34], x[..., 1:35], x[..., 3:37]), x[..., 34:]], -1),
    "gate": lambda x: F.silu(x[..., :31]) * x[..., 29:],
    "gate of gelu": lambda x: x * F.gelu(x),
    "gate of gelu tanh": lambda x: F.gelu(x, approximate="tanh") * x,
    "sum": lambda x: (x + x[..., :1]) + x,
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_have_the_bits_of_their_operations(name: str, dtype: torch.dtype) -> None:
    """And what torch computes: in 16 bits the same bits, but for its layer norm, which sums in another order."""
    function = GROUPS[name]
    x = torch.randn(1, 7, 60, generator=torch.Generator().manual_seed(5)).to(dtype)
    graph = graph_of(function, x)
    assert len(program_of(graph).code) < len(program_of(graph, groups=False).code)
    made = lowered(graph)(x)
    assert torch.equal(made, lowered(graph, groups=False)(x))
    if dtype == torch.float32 or name.startswith("layer norm"):
        torch.testing.assert_close(made, function(x), rtol=2 * torch.finfo(dtype).eps, atol=2e-6)
    else:
        assert torch.equal(made, function(x))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_tokens_bits_do_not_depend_on_others(num_threads: int, threads: Callable[[int], None]) -> None:
    """Rows are so many that threads share them, too."""
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
def test_what_looks_at_other_tokens_is_not_lowered(function: Callable[[Tensor], Tensor]) -> None:
    found = token_step_of(Function(function), (torch.zeros(1, 3, 8),), ({1: "tokens"},), 0)
    assert isinstance(found, NoTokenProgram)


def test_an_input_that_is_overwritten_is_not_lowered() -> None:
    """Others read it."""
    found = lower(graph_of(lambda x: x.mul_(2) + 1, torch.randn(1, 3, 8)))
    assert isinstance(found, NoTokenProgram) and "mul_ of an input" in found.reason


def test_all_operations_that_programs_lack_are_named() -> None:
    graph = graph_of(lambda x: torch.cumsum(x, -1).flip(-1) * x, torch.randn(1, 3, 8))
    assert lower(graph) == NoTokenProgram("cumsum, flip")


@pytest.mark.parametrize("cut", [1, 3, 40])
def test_code_that_is_cut_off_is_an_error(cut: int) -> None:
    x = torch.zeros(1, 3, 8)
    program = program_of(graph_of(torch.relu, x))
    step: Any = torch.classes.specdec.CutStep()
    with pytest.raises(RuntimeError, match="token program"):
        step.add_tokenwise(program.code[:-cut], program.numbers, [], [0], [1])
