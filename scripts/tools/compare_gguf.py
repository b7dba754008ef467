"""Engines of real GGUF files beside others that compute the same model, on Spec-Bench's prompts.

`tokens`: whether outputs are those that Hugging Face's model of the same numbers chooses greedily, read by
transformers' own reader, in float32 with `--activations float`. `activations`: what rounding activations to 8 bits
changes, as the share of positions where the same token stays most probable and the mean Kullback-Leibler divergence,
by kind of prompt. `llamacpp`: the same two figures beside llama.cpp, of the token after each prompt.

    python -m scripts.tools.compare_gguf tokens activations llamacpp [--models smollm2 gemma3] [--compiler none]
        [--num-tokens 400]

Files are looked for in `$SPECDEC_REAL_DIR`, else in ~/.cache/specdec-real. `llamacpp` needs `pip install xllamacpp`.
"""

import argparse
import json
import os
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from runtime.checkpoint import convert
from runtime.checkpoint_dir import open_checkpoint
from runtime.compiler.build import Effort, build_engine
from runtime.compiler.model import load_model
from runtime.compiler.original import load_original
from runtime.compiler.pretrained import parse_pretrained_config
from runtime.config import Activations, BuildConfig, Compiler, Precision
from runtime.gguf_tokenizer import make_gguf_tokenizer
from runtime.llm import LLM
from runtime.params import SamplingParams
from runtime.text import encode_text, open_tokenizer
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
    """What `from_pretrained(..., gguf_file=...)` loads, without the package that it asks for first (`accelerate`)."""
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
    precision = Precision(activations=activations)
    convert(file, directory, "float32", replace=False, progress=lambda *_: None, precision=precision)
    return directory


def compare_tokens(file: Path, work_dir: Path, compiler: Compiler) -> None:
    checkpoint_dir = make_checkpoint(file, work_dir / "float", "float")
    build = BuildConfig(compiler, 4, 512, 544, 4, 16, "draft_tokens_external")
    effort = Effort(measure_costs=False)
    build_engine(
        checkpoint_dir, work_dir / "engine", build, torch.device("cpu"), replace=False, phase=print, effort=effort
    )
    with LLM(work_dir / "engine") as llm:
        prompts = [next(_short(llm, texts)) for texts in read_texts().values()]
        params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
        outputs = [output.token_ids for output in llm.generate(prompts, params)]
    model, num_same = read_by_transformers(file), 0
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        num_same += logits.argmax(-1).tolist() == output
    lengths = f"prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, outputs of {OUTPUT_LEN}"
    print(f"tokens, {compiler}: {num_same} of {len(prompts)} are Hugging Face's ({lengths})", flush=True)


def _short(llm: LLM, texts: list[str]) -> Iterator[list[int]]:
    """The texts' tokens that are not too long; else the first of them, cut."""
    for text in texts:
        ids = llm.encode(text)[0]
        if len(ids) <= MAX_PROMPT_LEN:
            yield ids
    yield llm.encode(texts[0])[0][:MAX_PROMPT_LEN]


def compare_activations(file: Path, work_dir: Path, num_tokens: int) -> None:
    checkpoint_dir = make_checkpoint(file, work_dir / "int8", "int8")
    checkpoint = open_checkpoint(checkpoint_dir)
    unrounded = load_original(file, torch.float32)
    pretrained = parse_pretrained_config(checkpoint.pretrained_config, str(checkpoint_dir))
    rounded = load_model(
        pretrained, checkpoint_dir / "rank0.safetensors", torch.float32, "sdpa", checkpoint.quantization
    )
    tokenizer, texts = open_tokenizer(checkpoint_dir), read_texts()
    totals = torch.zeros(3)
    for kind, categories in KINDS.items():
        by_category = [texts[category] for category in categories]
        text = "\n\n".join(one for nth in zip(*by_category, strict=True) for one in nth)
        tokens = encode_text(tokenizer, text)[:num_tokens]
        found = sum(
            (_figures(rounded, unrounded, tokens[i : i + WINDOW]) for i in range(0, len(tokens), WINDOW)),
            torch.zeros(3),
        )
        totals += found
        _show(f"activations, {kind}", found)
    _show("activations, all", totals)


def _figures(ours: PreTrainedModel, theirs: PreTrainedModel, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return compared(*(model(torch.tensor([tokens])).logits[0].log_softmax(-1) for model in (ours, theirs)))


def compared(ours: Tensor, theirs: Tensor) -> Tensor:
    """(3,): positions, those where the same token is most probable, the sum of the divergences of theirs from ours."""
    same = (ours.argmax(-1) == theirs.argmax(-1)).sum()
    return torch.tensor([len(ours), float(same), float((theirs.exp() * (theirs - ours)).sum())])


def _show(what: str, found: Tensor) -> None:
    num, same, divergence = found.tolist()
    print(f"{what}: {same / num:.1%} of {num:.0f} the same, divergence {divergence / num:.4f}", flush=True)


def compare_llamacpp(file: Path) -> None:
    """Of llama.cpp's own products: blocks of few bits by activations of 8 bits."""
    model, llamacpp, totals = read_by_transformers(file), LlamaCpp(file, 2 * MAX_PROMPT_LEN), torch.zeros(3)
    tokenizer = make_gguf_tokenizer(file)
    for texts in read_texts().values():
        tokens = tokenizer(texts[0])["input_ids"][:MAX_PROMPT_LEN]
        theirs = llamacpp.log_probs(tokens)
        with torch.inference_mode():
            ours = model(torch.tensor([tokens]), logits_to_keep=1).logits[0, -1].log_softmax(-1)
        totals += compared(ours[None], theirs[None])
    _show("beside llama.cpp", totals)


class LlamaCpp:
    """llama.cpp in this process, asked over HTTP."""

    def __init__(self, path: Path, context_len: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.warmup, params.verbosity = context_len, 1, False, 0
        params.port, params.cpuparams.n_threads = 0, 1
        self._server = xllamacpp.Server(params)

    def log_probs(self, tokens: list[int], vocab_size: int | None = None) -> Tensor:
        """(vocab,) float32: of the token after these."""
        size = vocab_size or 2**20
        asked = {"prompt": tokens, "n_predict": 1, "n_probs": size, "temperature": 0, "ignore_eos": True}
        body = json.dumps(asked).encode()
        request = urllib.request.Request(
            f"{self._server.listening_address}/completion", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            found = json.loads(answer.read())["completion_probabilities"][0]["top_logprobs"]
        result = torch.full((1 + max(one["id"] for one in found),), -torch.inf)
        for one in found:
            result[one["id"]] = one["logprob"]
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=("tokens", "activations", "llamacpp"))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--compiler", default="none", choices=("none", "aot"))
    parser.add_argument("--num-tokens", type=int, default=400, help="of each kind of prompt")
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
                compare_llamacpp(file)


if __name__ == "__main__":
    main()
