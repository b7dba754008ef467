"""Engines of real GGUF files beside others that compute the same model, on Spec-Bench's prompts.

`tokens`: whether outputs are those that Hugging Face's model of the same numbers chooses greedily, read by
transformers' own reader, in float32 with `--activations float`. `activations`: what quantizing activations to 8 bits
changes, as the share of positions where the same token stays most probable and the mean Kullback-Leibler divergence,
by kind of prompt. `llamacpp`: the same two figures, of the same texts, of what llama.cpp quantizes.

    python -m scripts.tools.compare_gguf tokens activations llamacpp [--models smollm2 gemma3] [--compiler none]
        [--num-tokens 400] [--llamacpp-python llama/bin/python]

Files are looked for in `$SPECDEC_REAL_DIR`, else in ~/.cache/specdec-real. `llamacpp` needs llama-cpp-python.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from runtime.builder.build import BuildEffort, build_engine
from runtime.builder.convert import convert
from runtime.builder.reference import load_original
from runtime.checkpoint.checkpoint_dir import open_checkpoint
from runtime.checkpoint.config import Activations, BuildConfig, Compiler, QuantConfig
from runtime.checkpoint.gguf.tokenizer import make_gguf_tokenizer
from runtime.core.params import SamplingParams
from runtime.llm import LLM
from runtime.model.model import ModelKind, load_model
from runtime.model.pretrained import parse_pretrained_config
from runtime.text.text import encode_text
from scripts.bench.peers import ROOT
from scripts.bench.real import KINDS, MODELS

QUESTIONS = Path(__file__).parents[2] / "../shared/data/spec_bench/question.jsonl"
REAL_DIR = Path(os.environ.get("SPECDEC_REAL_DIR", "~/.cache/specdec-real")).expanduser()
MAX_PROMPT_LEN, OUTPUT_LEN = 400, 16
WINDOW = 200  # tokens that are computed at once


def read_texts() -> dict[str, list[str]]:
    """The first turns of Spec-Bench's questions, by category."""
    texts: dict[str, list[str]] = {}
    for line in QUESTIONS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        texts.setdefault(row["category"], []).append(row["turns"][0])
    return texts


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


def make_checkpoint(file: Path, directory: Path, activations: Activations) -> Path:
    precision = QuantConfig(activations=activations)
    convert(file, directory, "float32", replace=False, progress=lambda *_: None, precision=precision)
    return directory


def compare_tokens(file: Path, work_dir: Path, compiler: Compiler) -> None:
    tokenizer = make_gguf_tokenizer(file)
    prompts = [next(_short(tokenizer, texts)) for texts in read_texts().values()]
    pairs = greedy_tokens(file, work_dir, compiler, prompts)
    num_same = sum(ours == theirs for ours, theirs in pairs)
    lengths = f"prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, outputs of {OUTPUT_LEN}"
    print(f"tokens, {compiler}: {num_same} of {len(prompts)} are Hugging Face's ({lengths})", flush=True)


def _short(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Iterator[list[int]]:
    """The texts' tokens that are not too long; else the first of them, cut."""
    for text in texts:
        ids = encode_text(tokenizer, text)
        if len(ids) <= MAX_PROMPT_LEN:
            yield ids
    yield encode_text(tokenizer, texts[0])[:MAX_PROMPT_LEN]


def greedy_tokens(
    file: Path, work_dir: Path, compiler: Compiler, prompts: list[list[int]]
) -> list[tuple[list[int], list[int]]]:
    """After each prompt a float32 engine's tokens, and those that Hugging Face's model chooses after the same ones."""
    checkpoint_dir = make_checkpoint(file, work_dir / "float", "float")
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


def compare_activations(file: Path, work_dir: Path, num_tokens: int) -> None:
    """Compare what `--activations int8` quantizes with float32."""
    checkpoint_dir = make_checkpoint(file, work_dir / "int8", "int8")
    checkpoint = open_checkpoint(checkpoint_dir)
    unquantized = load_original(file, torch.float32)
    pretrained = parse_pretrained_config(checkpoint.pretrained_config, str(checkpoint_dir))
    kind = ModelKind(pretrained, torch.float32, "sdpa", checkpoint.quantization)
    quantized = load_model(kind, checkpoint_dir / "rank0.safetensors")
    _compare("activations", file, num_tokens, partial(log_probs_of, quantized), partial(log_probs_of, unquantized))


def compare_llamacpp(file: Path, work_dir: Path, num_tokens: int, python: Path) -> None:
    """Compare llama.cpp's own quantization, which its products need: activations in 8 bits; and K/V in float16."""
    unquantized = read_by_transformers(file)
    with llamacpp(file, work_dir / "logits.npy", python) as log_probs:
        _compare("llama.cpp", file, num_tokens, log_probs, partial(log_probs_of, unquantized))


LogProbs = Callable[[list[int]], Tensor]
"""(tokens, vocab) float32: after each of a window's tokens."""


def log_probs_of(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.log_softmax(-1)


@contextmanager
def llamacpp(file: Path, logits_file: Path, python: Path) -> Iterator[LogProbs]:
    """llama.cpp in a process of its own, by another Python."""
    settings = {"gguf_file": str(file), "num_threads": 1, "max_request_tokens": WINDOW, "is_quantized": True}
    command = [python, "-m", "scripts.bench.workers.llamacpp_logits", json.dumps(settings), logits_file]
    with subprocess.Popen(
        list(map(str, command)), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def log_probs(tokens: list[int]) -> Tensor:
            print(json.dumps(tokens), file=process.stdin, flush=True)
            if not process.stdout.readline():
                raise SystemExit(f"llama.cpp ended with exit status {process.wait()}")
            return torch.from_numpy(np.load(logits_file)).log_softmax(-1)

        yield log_probs
        process.stdin.close()


def _compare(what: str, file: Path, num_tokens: int, quantized: LogProbs, unquantized: LogProbs) -> None:
    tokenizer, texts, totals = make_gguf_tokenizer(file), read_texts(), torch.zeros(3)
    for kind, categories in KINDS.items():
        by_category = [texts[category] for category in categories]
        text = "\n\n".join(one for nth in zip(*by_category, strict=True) for one in nth)
        tokens = encode_text(tokenizer, text)[:num_tokens]
        windows = [tokens[i : i + WINDOW] for i in range(0, len(tokens), WINDOW)]
        found = sum((compared(quantized(window), unquantized(window)) for window in windows), torch.zeros(3))
        totals += found
        _show(f"{what}, {kind}", found)
    _show(f"{what}, all", totals)


def compared(ours: Tensor, theirs: Tensor) -> Tensor:
    """(3,): positions, those where the same token is most probable, the sum of the divergences of theirs from ours."""
    same = (ours.argmax(-1) == theirs.argmax(-1)).sum()
    return torch.tensor([len(ours), float(same), float((theirs.exp() * (theirs - ours)).sum())])


def _show(what: str, found: Tensor) -> None:
    num, same, divergence = found.tolist()
    print(f"{what}: {same / num:.1%} of {num:.0f} the same, divergence {divergence / num:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=("tokens", "activations", "llamacpp"))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--compiler", default="none", choices=("none", "aot"))
    parser.add_argument("--num-tokens", type=int, default=400, help="of each kind of prompt")
    parser.add_argument("--llamacpp-python", type=Path, default=Path(sys.executable), metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.models:
        file = REAL_DIR / MODELS[name].file
        print(MODELS[name].title, flush=True)
        with tempfile.TemporaryDirectory() as directory:
            if "tokens" in arguments.what:
                compare_tokens(file, Path(directory), arguments.compiler)
            if "activations" in arguments.what:
                compare_activations(file, Path(directory), arguments.num_tokens)
            if "llamacpp" in arguments.what:
                compare_llamacpp(file, Path(directory), arguments.num_tokens, arguments.llamacpp_python.absolute())


if __name__ == "__main__":
    main()
