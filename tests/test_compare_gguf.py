"""Real models from GGUF files, compiled: their tokens are those of Hugging Face's model of the same numbers."""

from pathlib import Path

import pytest

from runtime.checkpoint.gguf.tokenizer import make_gguf_tokenizer
from runtime.text.text import encode_text
from scripts.bench.real import MODELS
from scripts.tools.compare_gguf import REAL_DIR, greedy_tokens

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
