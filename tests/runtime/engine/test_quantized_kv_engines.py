"""Engines with K/V in 8 bits compute what transformers does with a cache that quantizes, and drafts change nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sentences import Said
from shared import MakeEngineDir
from tiny import VOCAB_SIZE, forward, make_build, make_model, repetitive_prompt
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from runtime.builder.build import build_engine
from runtime.builder.convert import convert
from runtime.checkpoint.bundle import read_bundle
from runtime.checkpoint.config import KVCacheQuantAlgo, QuantConfig
from runtime.core.request import Request, Sequence
from runtime.drafters.draft_target import DraftModel
from runtime.drafters.ngram import NgramLookup
from runtime.drafters.protocol import Drafter
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.loop import scheduler
from runtime.model import attention
from runtime.util.errors import SpecDecError

ALGORITHMS: tuple[KVCacheQuantAlgo, ...] = ("INT8", "FP8")


class QuantizingCache(DynamicCache):
    """transformers' cache, of which attention sees what it has been given in 8 bits."""

    def __init__(self, algorithm: str) -> None:
        super().__init__()
        self.algorithm = algorithm

    def update(self, keys: Tensor, values: Tensor, *arguments: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        seen: tuple[Tensor, Tensor] = super().update(self.quantized(keys), self.quantized(values), *arguments, **kwargs)
        return seen

    def quantized(self, numbers: Tensor) -> Tensor:
        scales = numbers.abs().amax(-1, keepdim=True) / (127 if self.algorithm == "INT8" else 448)
        return (numbers / scales).round() * scales if self.algorithm == "INT8" else fp8(numbers / scales) * scales


def fp8(numbers: Tensor) -> Tensor:
    return numbers.to(torch.float8_e4m3fn).float()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture(
    scope="module",
    params=[
        *({"kv_cache": one} for one in ALGORITHMS),
        pytest.param({"kv_cache": "INT8", "tp_size": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda param: "-".join(map(str, param.values())),
)
def engine_dir(request: pytest.FixtureRequest, model: PreTrainedModel, make_engine_dir: MakeEngineDir) -> Path:
    return make_engine_dir(model, **request.param)


PROMPTS = [repetitive_prompt(seed, length, VOCAB_SIZE) for seed, length in ((0, 21), (1, 34), (2, 60))]


def outputs(engine: Engine, prompts: list[list[int]], drafter: Drafter | None) -> list[list[int]]:
    requests = [Request(i, tuple(prompt), 24) for i, prompt in enumerate(prompts)]
    done = {
        s.request.id: s.output_tokens for s, _ in scheduler.generate(engine, requests, drafter, 10) if s.finish_reason
    }
    return [done[i] for i in range(len(prompts))]


def test_logits_are_transformers_with_a_cache_that_rounds(engine_dir: Path, model: PreTrainedModel) -> None:
    """A token's own key and value too, and those of its draft."""
    algorithm = read_bundle(engine_dir).config.step_shape.kv_cache
    assert algorithm is not None
    check_logits(engine_dir, model, algorithm)


@pytest.mark.parametrize(("family", "algorithm"), [("gemma2", "INT8"), ("gpt-oss", "FP8"), ("bloom", "INT8")])
def test_soft_caps_sinks_and_slopes_are_of_what_is_rounded(
    family: str, algorithm: KVCacheQuantAlgo, make_engine_dir: MakeEngineDir
) -> None:
    model = make_model(family, **({} if family == "bloom" else {"sliding_window": 100}))
    check_logits(make_engine_dir(model, kv_cache=algorithm), model, algorithm)


def check_logits(engine_dir: Path, model: PreTrainedModel, algorithm: str) -> None:
    prompt, draft = PROMPTS[1], [5, 6, 7]

    def expected(cache: DynamicCache) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(input_ids=torch.tensor([[*prompt, *draft]]), **{attention.CACHE: cache}).logits[0]
        return logits[len(prompt) - 1 :]

    with Engine.open(engine_dir) as engine:
        sequence = Sequence.start(Request(0, tuple(prompt), 60))
        assert engine.admit(sequence)
        (logits,) = forward(engine, [sequence], [draft])
        engine.release(sequence)
        assert engine.num_cache_bytes == sum(one.nbytes for tensors in engine._pool.tensors for one in tensors)
    torch.testing.assert_close(logits, expected(QuantizingCache(algorithm)), rtol=2e-3, atol=2e-3)
    assert (logits - expected(DynamicCache())).abs().max() > 1e-2


@pytest.mark.parametrize("engine_dir", [{"kv_cache": "INT8"}], indirect=True)
def test_drafts_reuse_and_preemption_change_no_token(
    engine_dir: Path, model: PreTrainedModel, make_engine_dir: MakeEngineDir
) -> None:
    """The draft model's K/V are of another dtype than the target's."""
    plain_dir = make_engine_dir(model)
    with Engine.open(engine_dir) as engine, Engine.open(engine_dir, kv_cache=KVCacheConfig(max_tokens=88)) as small:
        alone = [outputs(engine, [prompt], None)[0] for prompt in PROMPTS]
        assert outputs(engine, PROMPTS, None) == alone
        assert outputs(engine, PROMPTS, NgramLookup(2)) == alone
        assert outputs(small, PROMPTS, NgramLookup(2)) == alone
        with Engine.open(plain_dir) as other:
            drafter = DraftModel(other, VOCAB_SIZE, use_logits=False)
            assert outputs(engine, PROMPTS, drafter) == alone
            unquantized = outputs(other, PROMPTS, None)
            assert outputs(other, PROMPTS, DraftModel(engine, VOCAB_SIZE, use_logits=False)) == unquantized


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_wrong_quantization_fails_the_build(
    algorithm: KVCacheQuantAlgo, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    model.save_pretrained(tmp_path / "model")
    convert(
        *(tmp_path / "model", tmp_path / "checkpoint", None),
        replace=False,
        progress=lambda *_: None,
        precision=QuantConfig(kv_cache=algorithm),
    )
    right = attention.quantize_kv

    def wrong(numbers: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return right(numbers * 0.99, dtype)

    monkeypatch.setattr(attention, "quantize_kv", wrong)
    with pytest.raises(SpecDecError) as raised:
        build_engine(
            *(tmp_path / "checkpoint", tmp_path / "engine", make_build(), torch.device("cpu")),
            replace=False,
            phase=lambda name: None,
        )
    said(raised)
    assert not (tmp_path / "engine").exists()
