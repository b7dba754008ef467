"""Real models from GGUF files, compiled: their tokens are those of Hugging Face's model of the same numbers."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from runtime.builder.build import BuildEffort, build_engine
from runtime.builder.convert import convert
from runtime.checkpoint.config import BuildConfig, Compiler, QuantConfig
from runtime.checkpoint.gguf.tokenizer import make_gguf_tokenizer
from runtime.core.params import SamplingParams
from runtime.llm import LLM
from runtime.text.text import encode_text
from scripts.bench.real import MODELS

REAL_DIR = Path(os.environ.get("SPECDEC_REAL_DIR", "~/.cache/specdec-real")).expanduser()
OUTPUT_LEN = 16
LONG = (Path(__file__).parents[1] / "docs" / "how-it-works.md").read_text(encoding="utf-8")[:3000]
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a little dog. The little dog had a red ball.",
    "def fibonacci(n: int) -> int:\n    ",
    "Q: Anna has 12 apples and gives away 5. How many are left?\nA:",
    "Translate into German: The weather is fine today.",
    "<|im_start|>user\nName three rivers.<|im_end|>\n<|im_start|>assistant\n",
    '{"name": "Ada", "born": 1815, "languages": [',
    "Der schnelle braune Fuchs springt über",
    "今日は天気が",
    "1, 1, 2, 3, 5, 8, 13,",
    "SELECT name FROM users WHERE",
    LONG,
)


def read_by_transformers(path: Path) -> PreTrainedModel:
    """Load as `from_pretrained(..., gguf_file=...)` does, without the package that it asks for first (`accelerate`)."""
    config = AutoConfig.for_model(**load_gguf_checkpoint(str(path), return_tensors=False)["config"])
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty)["tensors"]
    weights = {name: torch.as_tensor(tensor).float() for name, tensor in tensors.items()}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    found = model.load_state_dict(weights, strict=False)
    assert set(found.missing_keys) <= {"lm_head.weight"} and not found.unexpected_keys, found
    model.tie_weights()
    return model.eval()


def greedy_tokens(
    file: Path, work_dir: Path, compiler: Compiler, prompts: list[list[int]]
) -> list[tuple[list[int], list[int]]]:
    """After each prompt a float32 engine's tokens, and those that Hugging Face's model chooses after the same ones."""
    checkpoint_dir, precision = work_dir / "float", QuantConfig(activations="float")
    convert(file, checkpoint_dir, "float32", replace=False, progress=lambda *_: None, precision=precision)
    longest = max(map(len, prompts))
    build = BuildConfig(compiler, 4, longest, longest + OUTPUT_LEN + 4, 4, 16, "draft_tokens_external")
    effort = BuildEffort(measure_costs=False)
    built = build_engine(
        checkpoint_dir, work_dir / "engine", build, torch.device("cpu"), replace=False, phase=print, effort=effort
    )
    assert built.build_config.compiler == compiler, built.compiler_note
    with LLM(work_dir / "engine") as llm:
        params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
        outputs = [output.token_ids for output in llm.generate(prompts, params)]
    model, pairs = read_by_transformers(file), []
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output]), logits_to_keep=OUTPUT_LEN + 1).logits[0, :-1]
        pairs.append((output, logits.argmax(-1).tolist()))
    return pairs


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_compiled_engines_have_hugging_faces_tokens(name: str, kernels: Path, tmp_path: Path) -> None:
    """Compared in float32 with activations as they are. The last prompt is longer than Gemma's windows."""
    file = REAL_DIR / MODELS[name].file
    if not file.is_file():
        pytest.skip(f"no {MODELS[name].title}: {file}")
    tokenizer = make_gguf_tokenizer(file)
    prompts = [encode_text(tokenizer, text) for text in PROMPTS]
    assert len(prompts[-1]) > 520
    pairs = greedy_tokens(file, tmp_path, "aot", prompts)
    assert [ours for ours, _ in pairs] == [theirs for _, theirs in pairs]
