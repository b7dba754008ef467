"""Experts of a mixture by the kernel: as transformers computes them, and the same bits in any company."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sentences import Said
from tiny import hf_greedy, make_model, run_build, run_convert
from torch import Tensor, nn
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from runtime.checkpoint.config import Activations, Compiler, QuantConfig, QuantFormat
from runtime.checkpoint.quant.quantize import quantize_weight
from runtime.checkpoint.quant.weight import take_quantized
from runtime.kernels.ops import load_kernels
from runtime.model.experts import kernel_experts
from runtime.model.model import expert_layers
from runtime.model.quantized import QuantizedExperts, QuantizedLinear
from specdec_cli import LLM, SamplingParams, SpecDecWarning

NUM_EXPERTS, INPUTS, NUM_TOKENS = 5, 18, 40


@pytest.fixture(autouse=True)
def loaded_kernels(kernels: Path) -> None:
    load_kernels(kernels)


def choices(generator: torch.Generator) -> Tensor:
    """(80,): of one expert by most tokens, of another by none, and few of each of the others."""
    chosen = torch.randint(1, NUM_EXPERTS - 1, (2 * NUM_TOKENS,), generator=generator)
    chosen[torch.randperm(2 * NUM_TOKENS, generator=generator)[:60]] = 0
    return chosen


@pytest.mark.parametrize("num_outputs", [7, 32, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_those_of_each_tokens_experts(dtype: torch.dtype, num_outputs: int) -> None:
    """Tokens come that all experts share, and with a row for each expert. Some experts are not asked."""
    generator = torch.Generator().manual_seed(num_outputs)
    kernels = torch.ops.specdec
    weight = torch.randn(NUM_EXPERTS, num_outputs, INPUTS, generator=generator).to(dtype)
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -num_outputs % kernels.panel()))
    packed = kernels.pack_linear(padded.flatten(0, 1))
    x = torch.randn(NUM_TOKENS, INPUTS, generator=generator).to(dtype)
    chosen = choices(generator)
    products = kernels.experts_linear(x, packed, chosen, num_outputs, 0, 0)
    rows = x.repeat_interleave(2, dim=0)
    expected = torch.einsum("snk,sk->sn", weight[chosen].double(), rows.double())
    torch.testing.assert_close(products.double(), expected, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=2e-2)
    assert torch.equal(kernels.experts_linear(rows, packed, chosen, num_outputs, 0, 0), products)
    for s in range(0, 2 * NUM_TOKENS, 7):
        alone = kernels.experts_linear(rows[s : s + 1], packed, chosen[s : s + 1], num_outputs, 0, 0)
        assert torch.equal(alone[0], products[s])
    of_one = kernels.experts_linear(rows[:1], packed, chosen[::9], num_outputs, 0, 0)
    assert torch.equal(of_one, kernels.experts_linear(rows[:1].expand(9, -1), packed, chosen[::9], num_outputs, 0, 0))


@pytest.mark.parametrize("num_outputs", [7, 64])
@pytest.mark.parametrize(
    ("qformat", "activations"), [("int4", "int8"), ("int8", "int16"), ("int4", "float"), ("fp8", "float")]
)
def test_products_of_quantized_experts_are_those_of_linear_layers(
    qformat: QuantFormat, activations: Activations, num_outputs: int
) -> None:
    """Bit by bit those of a layer that has one expert's weight alone, and near those of its numbers in float64."""
    generator = torch.Generator().manual_seed(num_outputs)
    own = torch.randn(NUM_EXPERTS, num_outputs, 48, generator=generator)
    precision = QuantConfig(qformat)
    whole = quantize_weight(own.flatten(0, 1), precision, 16)
    experts = QuantizedExperts(whole, nn.Parameter(own), activations, is_transposed=False, with_kernels=True)
    x = torch.randn(NUM_TOKENS, 48, generator=generator)
    chosen = choices(generator)
    products, rows = experts(x, chosen), x.repeat_interleave(2, dim=0)
    numbers = experts[torch.arange(NUM_EXPERTS)]
    assert torch.equal(numbers.flatten(0, 1), whole.dequantize())
    exact = torch.einsum("snk,sk->sn", numbers[chosen].double(), rows.double())
    assert (products - exact).norm() < exact.norm() * {"int8": 0.02, "int16": 1e-4, "float": 1e-5}[activations]
    torch.testing.assert_close(experts.by_torch(rows, chosen), products, rtol=1e-4, atol=1e-3)
    for e in range(NUM_EXPERTS):
        weight = quantize_weight(own[e], precision, 16)
        alone = QuantizedLinear(weight, None, activations, with_kernels=True)
        assert torch.equal(alone(rows[chosen == e]), products[chosen == e])
    assert torch.equal(experts(rows[:1], chosen[::9]), experts(rows[:1].expand(9, -1), chosen[::9]))


def experts_of(kind: str) -> torch.nn.Module:
    if kind == "qwen3":
        config = Qwen3MoeConfig(num_experts=NUM_EXPERTS, hidden_size=INPUTS, moe_intermediate_size=20)
        made: torch.nn.Module = Qwen3MoeExperts(config)
    else:  # transposed, with a bias and a gate of its own
        made = GptOssExperts(GptOssConfig(num_local_experts=NUM_EXPERTS, hidden_size=INPUTS, intermediate_size=20))
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return made.eval()


@pytest.mark.parametrize("kind", ["qwen3", "gpt-oss"])
def test_experts_are_transformers_own(kind: str) -> None:
    experts = experts_of(kind)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_TOKENS, INPUTS, generator=generator)
    weights, chosen = torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator).softmax(-1).topk(2)
    experts.config._experts_implementation = "eager"  # type: ignore[union-attr]
    with torch.no_grad():
        torch.testing.assert_close(
            kernel_experts(experts, x, chosen, weights), experts(x, chosen, weights), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(
    ("family", "qformat", "compiler"),
    [pytest.param("qwen3-moe", "int8", "none", marks=pytest.mark.slow), ("gpt-oss", "int4", "aot")],
)
def test_a_quantized_mixture_is_transformers_with_the_same_numbers(
    family: str, qformat: QuantFormat, compiler: Compiler, tmp_path: Path
) -> None:
    """An expert of Qwen's has tensors of its own in the file; gpt-oss's are transposed, with biases. Neither has whole
    panels of outputs."""
    model = make_model(family)
    model.save_pretrained(tmp_path / "model")
    precision, checkpoint = QuantConfig(qformat, activations="float"), tmp_path / "checkpoint"
    run_convert(tmp_path / "model", checkpoint, "float32", precision=precision)
    weights, numbers = take_quantized(load_file(checkpoint / "rank0.safetensors")), model.state_dict()
    experts = expert_layers(model.config)
    assert len(experts) == 4 and experts.keys() <= weights.keys()
    for name, weight in weights.items():
        place = numbers[name if name in experts else f"{name}.weight"]
        rows = place.mT if experts.get(name) else place
        meant = weight.dequantize().view(rows.shape)
        assert 0 < (meant - rows).norm() < 0.2 * rows.norm()
        rows.copy_(meant)
    run_build(checkpoint, tmp_path / "engine", compiler=compiler)
    prompt = [1 + i * 7 % 30 for i in range(40)]
    expected = hf_greedy(model, prompt, 24)
    assert len({*expected}) > 3
    with LLM(tmp_path / "engine") as llm:
        config = llm.bundle.config
        assert (config.build_config.compiler, config.batch_invariant) == (compiler, compiler == "aot")
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        assert llm.generate([prompt], params)[0].token_ids == expected


def test_experts_that_are_split_stay_as_they_are(tmp_path: Path, said: Said) -> None:
    make_model("qwen2-moe").save_pretrained(tmp_path / "model")
    with pytest.warns(SpecDecWarning) as warned:
        run_convert(tmp_path / "model", tmp_path / "out", precision=QuantConfig("int8"), tp_size=2)
    said(warned)
    weights = load_file(tmp_path / "out" / "rank1.safetensors")
    assert weights["model.layers.0.mlp.experts.down_proj"].dtype == torch.float32
    assert weights["model.layers.0.self_attn.q_proj.weight_values"].dtype == torch.int8
