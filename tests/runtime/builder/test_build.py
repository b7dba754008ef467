"""Engines that `build` writes were compared with transformers, and open nowhere but where they were built."""

import dataclasses
import functools
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentences import Said
from shared import edit_json, record_anew
from tiny import SLIDING_WINDOW, hf_greedy, make_build, make_model, repetitive_prompt, run_build, run_convert
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from commands.options.hints import hint_of
from runtime.builder import build as build_module
from runtime.builder.build import _TOLERANCE, BuildEffort, build_engine
from runtime.builder.compare_logits import Computed, _logits_in, compute
from runtime.builder.reference import Choices
from runtime.checkpoint.bundle import read_engine_config
from runtime.checkpoint.config import QuantConfig
from runtime.checkpoint.tokenizer import SAVED
from runtime.compiler import capture
from runtime.core.request import Request
from runtime.engine.engine import Engine
from runtime.engine.load import current_environment
from runtime.loop.orchestrator import generate
from runtime.model.attention import PagedInputs
from runtime.model.quantized import QuantizedLinear, place_quantized
from runtime.util.errors import SpecDecError

CPU = torch.device("cpu")
UNQUANTIZED = QuantConfig()


def make_checkpoint(
    model: PreTrainedModel, work_dir: Path, dtype: Any = None, precision: QuantConfig = UNQUANTIZED
) -> Path:
    model.save_pretrained(work_dir / "model")
    run_convert(work_dir / "model", work_dir / "checkpoint", dtype, precision=precision)
    return work_dir / "checkpoint"


@pytest.fixture
def engine_dir(llama_uncompiled_dir: Path, tmp_path: Path) -> Path:
    """A copy of the uncompiled engine that may be damaged."""
    shutil.copytree(llama_uncompiled_dir, tmp_path / "engine")
    return tmp_path / "engine"


@pytest.mark.parametrize("first", [7, None])
def test_logits_are_checked_in_a_text_that_begins(
    first: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Prompts begin with the token that begins one, if any: without it rounding may decide what is attended to."""
    model = make_model("llama")
    model.config.bos_token_id = first
    seen, embed = list[list[int]](), nn.Embedding.forward

    def forward(self: nn.Embedding, tokens: Tensor) -> Tensor:
        if tokens.device == CPU:
            seen.append(tokens[0].tolist())
        return embed(self, tokens)

    monkeypatch.setattr(nn.Embedding, "forward", forward)
    run_build(make_checkpoint(model, tmp_path), tmp_path / "engine")
    begins = [tokens[0] == 7 for tokens in seen[:1] + seen[2:3]]  # of the engine's context step, and of transformers
    assert begins == [first == 7] * 2, seen


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_passes_its_own_tolerance(dtype: str, tmp_path: Path) -> None:
    checkpoint_dir = make_checkpoint(make_model("llama"), tmp_path, dtype)
    config = run_build(checkpoint_dir, tmp_path / "engine")
    assert config.dtype == dtype
    assert 1e-5 < config.logits_check.relative_difference < config.logits_check.tolerance
    with Engine.open(tmp_path / "engine") as engine:
        assert {pool.dtype for pool in engine._pool.keys} == {getattr(torch, dtype)}
        sequences = [s for s, _ in generate(engine, [Request(0, (5, 6, 7), 5)], None, 0)]
        assert len(sequences[-1].output_tokens) == 5


# Attention broken in ways that still give plausible numbers.


def sees_one_key_too_many(mask: Callable[..., Tensor], self: PagedInputs, *arguments: Any) -> Tensor:
    return mask(dataclasses.replace(self, positions=self.positions + 1, masks={}), *arguments)


def forgets_the_window(mask: Callable[..., Tensor], self: PagedInputs, window: Any, *arguments: Any) -> Tensor:
    return mask(self, None, *arguments)


def has_a_window_one_too_short(mask: Callable[..., Tensor], self: PagedInputs, window: Any, *arguments: Any) -> Tensor:
    return mask(self, window - 1, *arguments)


@pytest.mark.parametrize(
    ("family", "broken", "precision"),
    [
        ("llama", sees_one_key_too_many, QuantConfig("fp8")),
        ("mistral-sliding", forgets_the_window, UNQUANTIZED),
        ("mistral-sliding", has_a_window_one_too_short, UNQUANTIZED),
    ],
)
def test_wrong_mask_fails_the_build(
    family: str,
    broken: Callable[..., Tensor],
    precision: QuantConfig,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    said: Said,
) -> None:
    assert 2 * make_build().tokens_per_block + 7 > SLIDING_WINDOW
    checkpoint_dir = make_checkpoint(make_model(family), tmp_path, "float32", precision)
    monkeypatch.setattr(PagedInputs, "mask", functools.partialmethod(functools.partial(broken, PagedInputs.mask)))
    check_refused(checkpoint_dir, tmp_path, said)


def make_steep_checkpoint(
    work_dir: Path, family: str, num_layers: int, deviation: float, precision: QuantConfig = UNQUANTIZED
) -> Path:
    """Model of large weights, whose logits transformers' own bfloat16 rounds to something else than float32's."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = make_model(
        family,
        hidden_size=256,
        intermediate_size=256,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_hidden_layers=num_layers,
        **({"layer_types": kinds * (num_layers // len(kinds))} if family == "gemma3" else {}),
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)
            elif "q_norm" in name or "k_norm" in name:
                parameter.fill_(8)
    return make_checkpoint(model, work_dir, "bfloat16", precision)


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        (("llama", 2, 0.2), UNQUANTIZED),
        pytest.param(("llama", 2, 0.3), QuantConfig("int8", 64, activations="int16"), marks=pytest.mark.slow),
        pytest.param(("llama", 2, 0.3), QuantConfig("int4", 64, activations="float"), marks=pytest.mark.slow),
        pytest.param(("llama", 2, 0.3), QuantConfig("fp8"), marks=pytest.mark.slow),
        pytest.param(("llama", 6, 0.3), QuantConfig(kv_cache="INT8"), marks=pytest.mark.slow),
        pytest.param(("llama", 6, 0.3), QuantConfig(kv_cache="FP8"), marks=pytest.mark.slow),
        (("gemma3", 9, 0.1), QuantConfig(kv_cache="INT8")),
    ],
    ids=str,
)
def test_right_step_is_not_refused_for_what_transformers_rounds(
    model: tuple[str, int, float], precision: QuantConfig, tmp_path: Path
) -> None:
    """Gemma 3 270M's is large too, whether K/V are in 8 bits or not."""
    checkpoint_dir = make_steep_checkpoint(tmp_path, *model, precision)
    check = run_build(checkpoint_dir, tmp_path / "engine").logits_check
    assert check.relative_difference > check.tolerance == 5e-2
    assert check.from_float32 is not None and check.transformers_from_float32 is not None
    assert check.tolerance < check.from_float32 < 1.5 * check.transformers_from_float32
    assert read_engine_config(tmp_path / "engine").logits_check == check


@pytest.mark.parametrize(
    ("family", "broken", "precision", "tolerance"),
    [
        ("llama", sees_one_key_too_many, UNQUANTIZED, "0.05"),
        ("mistral-sliding", forgets_the_window, QuantConfig("int8", 64), "0.05"),
        ("mistral-sliding", has_a_window_one_too_short, QuantConfig("int8", 64, activations="int8"), "0.2"),
        ("llama", sees_one_key_too_many, QuantConfig(kv_cache="INT8"), "0.05"),
    ],
    ids=["one key too many", "int8", "int8 activations", "8-bit K/V"],
)
def test_wrong_step_is_refused_by_float32_too(
    family: str,
    broken: Callable[..., Tensor],
    precision: QuantConfig,
    tolerance: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    said: Said,
) -> None:
    checkpoint_dir = make_steep_checkpoint(tmp_path, family, 2, 0.2, precision)
    monkeypatch.setattr(PagedInputs, "mask", functools.partialmethod(functools.partial(broken, PagedInputs.mask)))
    with pytest.raises(SpecDecError) as raised:
        run_build(checkpoint_dir, tmp_path / "engine")
    said(raised, tolerance)
    assert not (tmp_path / "engine").exists()


def make_mixture_checkpoint(work_dir: Path, family: str, seed: int) -> Path:
    """Mixture of large weights: scores of experts are close, and each expert says something else."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 512}
    experts = {"num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
    model = make_model(family, intermediate_size=32, head_dim=8, **sizes, **experts)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return make_checkpoint(model, work_dir, "bfloat16")


@pytest.mark.parametrize(
    ("family", "seed"),
    [("qwen3-moe", 1), *(pytest.param("mixtral", seed, marks=pytest.mark.slow) for seed in range(9))],
)
def test_right_mixture_is_not_refused_for_near_ties_of_its_routers(family: str, seed: int, tmp_path: Path) -> None:
    """One token whose expert is another one is as far from itself as from any."""
    check = run_build(make_mixture_checkpoint(tmp_path, family, seed), tmp_path / "engine").logits_check
    assert check.relative_difference <= check.tolerance or check.from_float32 is not None


class _WrongExperts(TorchFunctionMode):
    """Takes, where experts are chosen, the next ones by number, or each with the weight of another."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong = wrong

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function is Tensor.max and isinstance(found, tuple):  # Phi-3.5's one expert after the other
            return torch.return_types.max((found.values, (found.indices + 1) % args[0].shape[-1]))
        if function not in (torch.topk, Tensor.topk):
            return found
        if self.wrong == "weights":
            return torch.return_types.topk((found.values.flip(-1), found.indices))
        return torch.return_types.topk((found.values, (found.indices + 1) % args[0].shape[-1]))


@pytest.mark.parametrize(
    ("wrong", "family"),
    [
        ("experts", "mixtral"),
        ("weights", "qwen3-moe"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("weights", "mixtral"), ("experts", "qwen3-moe"))),
    ],
)
def test_mixture_by_wrong_experts_is_refused(
    family: str, wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: Said
) -> None:
    def compute_wrongly(*arguments: Any) -> Computed:
        with _WrongExperts(wrong):
            return compute(*arguments)

    monkeypatch.setattr(build_module, "compute", compute_wrongly)
    check_refused(make_mixture_checkpoint(tmp_path, family, 0), tmp_path, said, "0.05", "float32")


def test_mixture_that_sees_one_key_too_many_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: Said
) -> None:
    """The second text alone is wrong, which is a third of what is compared."""

    def broken(mask: Callable[..., Tensor], self: PagedInputs, *arguments: Any) -> Tensor:
        more = torch.ones_like(self.positions)
        more[0] = 0
        return mask(dataclasses.replace(self, positions=self.positions + more, masks={}), *arguments)

    checkpoint_dir = make_mixture_checkpoint(tmp_path, "mixtral", 0)
    monkeypatch.setattr(PagedInputs, "mask", functools.partialmethod(functools.partial(broken, PagedInputs.mask)))
    check_refused(checkpoint_dir, tmp_path, said, "0.05", "float32")


def test_near_ties_are_decided_otherwise_and_nothing_else() -> None:
    scores = torch.tensor([[0.5, 0.1, 0.39, 0.4], [0.1, 0.2, 0.3, 0.4], [0.8, 0.7, 0.6, 0.0]])
    with Choices([0.02]) as others:
        values, indices = torch.topk(scores, 2, dim=-1)
        everything = scores.topk(4, dim=-1)  # leaves none out
    assert indices.tolist() == [[0, 2], [3, 2], [0, 1]]
    assert torch.equal(values, scores.gather(-1, indices))
    assert torch.equal(everything.values, scores.sort(descending=True).values)
    assert len(others.scores) == 1 and torch.equal(others.scores[0], scores)


@pytest.fixture
def below_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tolerance that no two ways to compute in float32 keep within."""
    monkeypatch.setitem(_TOLERANCE, "float32", 1e-8)


@pytest.mark.usefixtures("below_rounding")
@pytest.mark.parametrize("precision", [UNQUANTIZED, QuantConfig(kv_cache="FP8")], ids=str)
def test_float64_decides_where_transformers_rounds_float32(precision: QuantConfig, tmp_path: Path) -> None:
    checkpoint_dir = make_checkpoint(make_model("llama"), tmp_path, "float32", precision)
    check = run_build(checkpoint_dir, tmp_path / "engine").logits_check
    assert check.relative_difference > check.tolerance == 1e-8
    assert check.from_float64 is not None and check.transformers_from_float64 is not None
    assert check.tolerance < check.from_float64 < 4 * check.transformers_from_float64 < 1e-5
    assert read_engine_config(tmp_path / "engine").logits_check == check


@pytest.mark.parametrize("name", ["layers.1.mlp.down_proj", pytest.param("lm_head", marks=pytest.mark.slow)])
def test_layer_whose_kernels_compute_another_product_is_refused(
    name: str, kernels: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: Said
) -> None:
    """Far less than tokens of 8 bits may differ by, which logits are compared with."""
    precision = QuantConfig("int8", 32, activations="int8", quantize_lm_head=True)
    checkpoint_dir = make_checkpoint(make_model("llama"), tmp_path, "float32", precision)
    call = QuantizedLinear.forward

    def forward(self: QuantizedLinear, x: Tensor) -> Tensor:
        is_wrong = self.with_kernels and self is wrong[0] and not torch.compiler.is_compiling()
        return call(self, x) * (1.001 if is_wrong else 1)

    wrong: list[nn.Module] = []
    place = place_quantized

    def find(model: PreTrainedModel, *others: Any, **named: Any) -> None:
        place(model, *others, **named)
        wrong[:] = [one for found, one in model.named_modules() if found.endswith(name)]

    monkeypatch.setattr("runtime.model.model.place_quantized", find)
    monkeypatch.setattr(QuantizedLinear, "forward", forward)
    with pytest.raises(SpecDecError) as raised:
        run_build(checkpoint_dir, tmp_path / "engine", compiler="aot")
    said(raised, "a quantized layer's product")
    assert not (tmp_path / "engine").exists()


def test_float64_is_transformers_in_float64() -> None:
    """Norms, ropes and softmax too, which models compute in float32 by name: beside a double computed without them."""
    model = make_model("llama", num_hidden_layers=1)
    tokens = [[5, 6, 7, 8]]
    wide = _logits_in(torch.float64, model, [(tokens[0], (1, 3), None)])
    assert wide.dtype == torch.float64 and next(model.parameters()).dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32
    torch.testing.assert_close(wide, llama_in_float64(model, tokens[0]), rtol=1e-12, atol=1e-12)


def llama_in_float64(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """(len(tokens), vocab): the formulas of one layer, every number in float64 but the rope's frequencies."""
    w = {name: tensor.detach().double() for name, tensor in model.named_parameters(remove_duplicate=False)}
    config, (layer, ends) = model.config, ("model.layers.0.", ("weight", "bias"))
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    D = config.hidden_size // num_heads

    def norm(x: Tensor, name: str) -> Tensor:
        return w[f"{name}.weight"] * x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    def linear(x: Tensor, name: str) -> Tensor:
        weight, bias = (w.get(f"{layer}{name}.{end}") for end in ends)
        assert weight is not None and bias is not None
        return x @ weight.T + bias

    def heads(x: Tensor, count: int) -> Tensor:
        return x.view(-1, count, D).transpose(0, 1)

    frequencies = model.model.rotary_emb.inv_freq.double()
    angles = torch.arange(len(tokens)).double()[:, None] * frequencies

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    x = w["model.embed_tokens.weight"][tokens]
    inside = norm(x, f"{layer}input_layernorm")
    queries = turn(heads(linear(inside, "self_attn.q_proj"), num_heads))
    keys, values = (heads(linear(inside, f"self_attn.{name}_proj"), num_kv_heads) for name in "kv")
    keys, values = (of.repeat_interleave(num_heads // num_kv_heads, 0) for of in (turn(keys), values))
    later = torch.ones(len(tokens), len(tokens)).triu(1) > 0
    scores = (queries @ keys.transpose(1, 2) / D**0.5).masked_fill(later, -1e300)
    x = x + linear((scores.softmax(-1) @ values).transpose(0, 1).flatten(1), "self_attn.o_proj")
    inside = norm(x, f"{layer}post_attention_layernorm")
    gate = linear(inside, "mlp.gate_proj")
    x = x + linear(gate * gate.sigmoid() * linear(inside, "mlp.up_proj"), "mlp.down_proj")
    return norm(x, "model.norm") @ w["lm_head.weight"].T


def check_refused(
    checkpoint_dir: Path, tmp_path: Path, said: Said, tolerance: str = "0.0001", judge: str = "float64"
) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(SpecDecError) as error:
        run_build(checkpoint_dir, tmp_path / "engine")
    said(error, tolerance, judge)
    assert float(error.value.message.split("norm: ")[1].split()[0]) > float(tolerance)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_nan_fails_the_build(tmp_path: Path, said: Said) -> None:
    checkpoint_dir = make_checkpoint(make_model("llama"), tmp_path)
    tensors = load_file(checkpoint_dir / "rank0.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, checkpoint_dir / "rank0.safetensors")
    record_anew(checkpoint_dir)
    with pytest.raises(SpecDecError) as raised:
        run_build(checkpoint_dir, tmp_path / "engine")
    said(raised)


@pytest.mark.parametrize("phase", ["loading the checkpoint", "compiling the step", "writing the engine"])
def test_interrupted_build_leaves_nothing(phase: str, llama_checkpoint_dir: Path, tmp_path: Path) -> None:
    def interrupt(name: str) -> None:
        if name == phase:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engine(llama_checkpoint_dir, tmp_path / "engine", make_build(), CPU, replace=False, phase=interrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"max_input_len": 160}, "160", id="no output"),
        pytest.param({"max_seq_len": 267}, "256; 257", id="too few positions"),
    ],
)
def test_lengths_that_do_not_fit_are_errors(
    settings: dict[str, int], message: str, llama_checkpoint_dir: Path, tmp_path: Path, said: Said
) -> None:
    with pytest.raises(SpecDecError) as raised:
        run_build(llama_checkpoint_dir, tmp_path / "engine", **settings)
    said(raised, *message.split("; "))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("family", "max_input_len", "max_draft_len"), [("gpt2", 31, 10), ("opt", 1, 31), ("llama", 20, 0)]
)
def test_every_position_of_the_model_can_be_used(
    family: str, max_input_len: int, max_draft_len: int, make_engine: Any
) -> None:
    """Learned positions end at 32: neither the logits check nor generation may pass them."""
    model = make_model(family, max_position_embeddings=32)
    engine = make_engine(
        model,
        max_input_len=max_input_len,
        max_seq_len=32 + max_draft_len,
        max_draft_len=max_draft_len,
        tokens_per_block=16,
    )
    prompt = repetitive_prompt(0, max_input_len)
    *_, (sequence, _) = generate(engine, [Request(0, tuple(prompt), 32 - max_input_len)], None, 0)
    assert sequence.output_tokens == hf_greedy(model, prompt, 32 - max_input_len)


def without(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(without("model.layers.1.mlp.up_proj.weight"), "1", id="lacks a tensor"),
        pytest.param(lambda tensors: tensors.update({"model.norm.weight": torch.ones(5)}), "1", id="wrong shape"),
        pytest.param(
            lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.ones(5, 5)}),
            "1; model.layers.2",
            id="a layer more",
        ),
    ],
)
def test_checkpoint_that_does_not_fill_the_model_is_an_error(
    damage: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path, said: Said
) -> None:
    checkpoint_dir = make_checkpoint(make_model("llama"), tmp_path)
    tensors = load_file(checkpoint_dir / "rank0.safetensors")
    damage(tensors)
    save_file(tensors, checkpoint_dir / "rank0.safetensors")
    record_anew(checkpoint_dir)
    with pytest.raises(SpecDecError) as raised:
        run_build(checkpoint_dir, tmp_path / "engine")
    said(raised, *message.split("; "))
    assert not (tmp_path / "engine").exists()


OTHER_ENVIRONMENTS = [
    ("torch", "1.0.0", torch.__version__),
    ("transformers", "4.0.0", current_environment(CPU).transformers),
    ("capability", "z80 NO-AVX", current_environment(CPU).capability),
]


@pytest.mark.parametrize(
    ("entry", "built", "here"), OTHER_ENVIRONMENTS, ids=[entry for entry, *_ in OTHER_ENVIRONMENTS]
)
def test_engine_of_another_environment_is_refused(
    entry: str, built: str, here: str, engine_dir: Path, said: Said
) -> None:
    edit_json(engine_dir / "config.json", **{f"environment__{entry}": built})
    with pytest.raises(SpecDecError) as error:
        Engine.open(engine_dir)
    said(error, f"`{engine_dir}`", entry, built, here, varying=(built, here))
    hint = hint_of(error.value) or ""
    assert "specdec build" in hint and str(engine_dir) in hint
    assert "--max-seq-len 160 " in hint and "--max-draft-len 10 " in hint and "--compiler none" in hint


def test_engine_for_a_better_processor_is_refused_by_what_this_one_lacks(engine_dir: Path, said: Said) -> None:
    better = [*current_environment(CPU).instructions, "avx1024_fp8"]
    edit_json(engine_dir / "config.json", environment__instructions=better)
    with pytest.raises(SpecDecError) as error:
        Engine.open(engine_dir)
    said(error, engine_dir, "avx1024_fp8")
    assert "specdec build" in (hint_of(error.value) or "")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


ENGINE_DAMAGES = [
    pytest.param(shutil.rmtree, "engine directory does not exist: {dir}", id="no directory"),
    pytest.param(lambda d: (d / "config.json").unlink(), "file is missing: {dir}/config.json", id="no config"),
    pytest.param(lambda d: truncate(d / "config.json"), "`{dir}/config.json` is not valid JSON", id="truncated config"),
    pytest.param(
        lambda d: (d / "rank0.safetensors").unlink(), "file is missing: {dir}/rank0.safetensors", id="no weights"
    ),
    pytest.param(
        lambda d: truncate(d / "rank0.safetensors"), "`{dir}/rank0.safetensors` has changed", id="truncated weights"
    ),
    pytest.param(
        lambda d: edit_json(d / "config.json", build_config=None),
        "this is a checkpoint, not an engine: {dir}",
        id="other",
    ),
]


@pytest.mark.parametrize(("damage", "message"), ENGINE_DAMAGES)
def test_damaged_engine_is_named(damage: Callable[[Path], Any], message: str, engine_dir: Path) -> None:
    damage(engine_dir)
    with pytest.raises(SpecDecError) as error:
        Engine.open(engine_dir)
    assert error.value.message.startswith(message.format(dir=engine_dir))


def flip_a_byte(path: Path) -> None:
    """Change a byte in the middle, where weights and code are; the size stays."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        pytest.param("rank0.pt2", Path.unlink, "{path}", id="missing"),
        pytest.param("rank0.safetensors", truncate, "{path}; {half}", id="truncated"),
        pytest.param("kernels.so", lambda path: path.write_bytes(b""), "{path}", id="empty"),
        pytest.param("rank0.pt2", flip_a_byte, "{path}", id="flipped step"),
        pytest.param("kernels.so", flip_a_byte, "{path}", id="flipped kernels"),
    ],
)
def test_damaged_compiled_step_is_named(
    damage: Callable[[Path], Any], message: str, name: str, llama_engine_dir: Path, tmp_path: Path, said: Said
) -> None:
    shutil.copytree(llama_engine_dir, tmp_path / "engine")
    path = tmp_path / "engine" / name
    half = path.stat().st_size // 2
    damage(path)
    with pytest.raises(SpecDecError) as error:
        Engine.open(tmp_path / "engine")
    said(error, *message.format(path=path, half=f"{half:,}").split("; "))


def test_every_file_is_recorded_but_those_that_people_change(llama_engine_dir: Path) -> None:
    """Records by an independent reading: names, sizes and SHA-256 as `sha256sum` has them."""
    recorded = {record.name: (record.num_bytes, record.sha256) for record in read_engine_config(llama_engine_dir).files}
    files = [path for path in llama_engine_dir.iterdir() if path.name not in ("config.json", "generation_config.json")]
    assert {"rank0.pt2", "rank0.safetensors", "kernels.so", "tokenizer.json", SAVED} <= recorded.keys()
    assert recorded == {
        path.name: (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files
    }


def test_weights_that_the_step_does_not_want_are_an_error(llama_engine_dir: Path, tmp_path: Path, said: Said) -> None:
    """Even where somebody has recorded them: the step would read beyond their end. `test_weights.py` has every kind."""
    engine_dir = shutil.copytree(llama_engine_dir, tmp_path / "engine")
    weights = load_file(engine_dir / "rank0.safetensors")
    name, weight = next(iter(weights.items()))
    save_file(weights | {name: weight.flatten()[:-1].clone()}, engine_dir / "rank0.safetensors")
    record_anew(engine_dir)
    with pytest.raises(SpecDecError) as error:
        Engine.open(engine_dir)
    said(error, "float32", name, varying=(name, [*weight.shape], [weight.numel() - 1]))
    assert error.value.hint == "build it again"


def test_closed_engine_gives_the_memory_of_its_weights_back(llama_engine_dir: Path) -> None:
    """Pages that the system has taken back are zeros; torch keeps the weights that it was handed for ever."""
    engine = Engine.open(llama_engine_dir)
    weights = list(engine._step.weights.values())  # type: ignore[attr-defined]
    assert all(weight.any() for weight in weights)
    engine.close()
    assert not any(weight.any() for weight in weights)


SHAPES: dict[str, tuple[tuple[str | int, ...], object]] = {
    "layers[0].num_kv_heads 2: 4": (("layers", 0, "num_kv_heads"), 4),
    "layers[1].num_kv_heads 2: 1": (("layers", 1, "num_kv_heads"), 1),
    "layers[0].key_head_dim 8: 4": (("layers", 0, "key_head_dim"), 4),
    "layers[1].value_head_dim 8: 16": (("layers", 1, "value_head_dim"), 16),
    "layers[0].sliding_window None: 8": (("layers", 0, "sliding_window"), 8),
    "number of layers 2: 0": (("layers",), []),
    "vocab_size 300: 299": (("vocab_size",), 299),
}
SHAPES_OF_PACKAGE: dict[str, tuple[tuple[str | int, ...], object]] = SHAPES | {
    "dtype float32: bfloat16": (("dtype",), "bfloat16"),
    "build_config.tokens_per_block 4: 8": (("build_config", "tokens_per_block"), 8),
    "build_config.max_seq_len 170: 5000": (("build_config", "max_seq_len"), 5000),
    "build_config.max_batch_size 4: 9": (("build_config", "max_batch_size"), 9),
    "kv_cache None: INT8": (("quantization",), {"quant_algo": None, "kv_cache_quant_algo": "INT8"}),
}


@pytest.mark.parametrize(
    ("source", "made_for", "place", "value"),
    [
        *[("llama_engine_dir", made_for, *change) for made_for, change in SHAPES_OF_PACKAGE.items()],
        *[("llama_uncompiled_dir", made_for, *change) for made_for, change in list(SHAPES.items())[:2]],
    ],
)
def test_shapes_that_are_not_the_steps_are_an_error(
    source: str,
    made_for: str,
    place: tuple[str | int, ...],
    value: object,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    said: Said,
) -> None:
    """Even where somebody has recorded them: the first step would read and write beyond its memory."""
    engine_dir = shutil.copytree(request.getfixturevalue(source), tmp_path / "engine")

    inner = config = json.loads((engine_dir / "config.json").read_text())
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (engine_dir / "config.json").write_text(json.dumps(config))
    record_anew(engine_dir)
    with pytest.raises(SpecDecError) as raised:
        Engine.open(engine_dir)
    said(raised, "config.json", made_for)


# torch-compile


ODD = {"num_hidden_layers": 1, "intermediate_size": 49}
"""Linear layers with an odd number of inputs, which token programs lack."""


def test_a_model_with_operations_that_programs_lack_is_for_torch_compile(
    kernels: Path, tmp_path: Path, said: Said
) -> None:
    """The default takes it, and `aot` is refused. Its compiler is told not to compile here: that takes minutes."""
    checkpoint_dir = make_checkpoint(make_model("llama", **ODD), tmp_path)
    with pytest.raises(SpecDecError) as error:
        run_build(checkpoint_dir, tmp_path / "refused", compiler="aot")
    said(error, "linear with 49 inputs")
    assert not (tmp_path / "refused").exists()
    by_default = BuildEffort(measure_costs=False, takes_torch_compile=True)
    with torch.compiler.set_stance("force_eager"):
        config = run_build(checkpoint_dir, tmp_path / "engine", by_default, compiler="aot")
    assert config.build_config.compiler == "torch-compile"
    assert json.loads((tmp_path / "engine" / "config.json").read_text())["compiler_note"] == config.compiler_note
    assert config.compiler_note == "has operations that `aot` lacks: linear with 49 inputs"
    assert config.logits_check.relative_difference < 1e-5
    assert not (tmp_path / "engine" / "rank0.pt2").exists()


INTERRUPTED = TypeError('empty_strided(): argument failed to unpack with error "KeyboardInterrupt: <EMPTY MESSAGE>"')


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        pytest.param(INTERRUPTED, KeyboardInterrupt, id="ctrl-c"),  # error of `empty_strided`, which Inductor passes on
        pytest.param(MemoryError(), MemoryError, id="a moment without memory"),
    ],
)
def test_an_error_that_is_not_the_models_makes_no_other_engine(
    error: Exception, raised: type[BaseException], kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended in a slower engine, which was kept."""
    checkpoint_dir = make_checkpoint(make_model("llama", rms_norm_eps=0.003), tmp_path)

    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(capture, "trace", fail)
    with pytest.raises(raised):
        run_build(checkpoint_dir, tmp_path / "engine", compiler="aot")
    assert not (tmp_path / "engine").exists()


def test_a_model_that_computes_by_the_number_of_tokens_is_no_program(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """A trace would have it as it is for very many, and be refused for its logits."""
    compute = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: compute(self, x) * (1.0 if x.shape[1] < 4096 else 2.0))
    checkpoint_dir = make_checkpoint(make_model("llama", num_hidden_layers=2, rms_norm_eps=0.003), tmp_path)
    with pytest.raises(SpecDecError) as error:
        run_build(checkpoint_dir, tmp_path / "engine", compiler="aot")
    said(error, "depends on a size")
