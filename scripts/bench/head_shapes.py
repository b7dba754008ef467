"""Steps of trained heads beside those of their targets, of the forms of published ones.

Random weights: Llama-3.1-8B at a quarter of its width with an EAGLE-3 head of a quarter of the ids, Qwen3.5-0.8B with
its MTP head, and Gemma 4 E2B with its assistant and an eighth of the ids. A step of the target is one of a generation
without a drafter, a step of the head what it computes for a draft of one token, and with the choice of the token it is
the whole drafting. The two take turns; figures are medians.

    python -m scripts.bench.head_shapes [--qformat int4] [--runs 9] [--work-dir DIR] [llama] [qwen] [gemma]
"""

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from runtime.builder.build import BuildEffort, DraftSource, build_engine
from runtime.builder.convert import convert
from runtime.builder.engine_cache import EngineSettings
from runtime.checkpoint.checkpoint_dir import OpenedCheckpoint, open_checkpoint
from runtime.checkpoint.config import DraftOutput, IntFormat, QuantConfig
from runtime.core.params import SamplingParams
from runtime.drafters.heads.head_config import read_head, states_of_heads
from runtime.drafters.specs import AssistantDrafter, EagleDrafter, MtpDrafter
from runtime.llm import LLM
from scripts.bench import heads

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

CONTEXT, NUM_TOKENS = 512, 24
_LLAMA = {"model_type": "llama", **heads.TARGET, "num_hidden_layers": 32}
_QWEN = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "tie_word_embeddings": True,
}
_GEMMA = {
    "model_type": "gemma4_text",
    "vocab_size": 32768,
    "vocab_size_per_layer_input": 32768,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
}
_ASSISTANT = {
    "hidden_size": 256,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class Form:
    """A target, the making of its head (model's directory, a new one) -> head's directory, and output layers."""

    target: dict[str, Any]
    head: Callable[[Path, Path], Path]
    drafter: type[EagleDrafter] | type[MtpDrafter] | type[AssistantDrafter]
    layers: tuple[DraftOutput, ...]


def eagle(model_dir: Path, directory: Path) -> Path:
    return heads.save_head("EAGLE-3", directory)


def mtp(model_dir: Path, directory: Path) -> Path:
    made: Path = import_module("heads").copy_with_mtp(model_dir, directory)  # of the tests
    return made


def assistant(model_dir: Path, directory: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    made: Path = import_module("heads").make_assistant(
        model, directory, num_centroids=2048, **_ASSISTANT
    )  # of the tests
    return made


_AS_IT_IS, _OUTPUT, _OTHERS = DraftOutput(), DraftOutput("int4"), DraftOutput(layers="int4")
_ALL = DraftOutput("int4", layers="int4")
_FEW_IDS = tuple(dataclasses.replace(one, vocab_size=31040) for one in (_AS_IT_IS, _OUTPUT, _ALL))
FORMS = {
    "llama": Form(_LLAMA, eagle, EagleDrafter, (_AS_IT_IS, _OUTPUT, _OTHERS, _ALL)),
    "qwen": Form(_QWEN, mtp, MtpDrafter, (_AS_IT_IS, _OUTPUT, *_FEW_IDS)),
    "gemma": Form(_GEMMA, assistant, AssistantDrafter, (_AS_IT_IS, _OTHERS)),
}


def save_model(form: Form, directory: Path) -> Path:
    if not directory.exists():
        settings = dict(form.target)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
        for key, parameter in model.named_parameters():
            if "q_norm" in key:
                parameter.data *= 0.1  # or random queries each choose one key, and rounding makes that another one
        model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def described(layers: DraftOutput) -> str:
    parts = [f"{layers.vocab_size:,} ids" if layers.vocab_size else "its own", layers.qformat]
    return ", ".join(filter(None, [*parts, layers.layers and f"others {layers.layers}"]))


def make_engine(checkpoint: OpenedCheckpoint, head_dir: Path, layers: DraftOutput, engine_dir: Path) -> None:
    head = read_head(head_dir)
    drafts = DraftSource(tuple(range(layers.vocab_size or 0)), head)
    states = states_of_heads([head], checkpoint.config.pretrained_config)
    settings = EngineSettings(max_batch_size=1, max_seq_len=1024, hidden_states=states, compiler="aot")
    build = dataclasses.replace(settings.build_config(1024), draft_output=layers)
    effort = BuildEffort(measure_costs=False, drafts=drafts)
    build_engine(checkpoint, engine_dir, build, torch.device("cpu"), replace=False, phase=lambda _: None, effort=effort)


def make_engines(form: Form, directory: Path, qformat: IntFormat | None) -> list[tuple[DraftOutput, Path]]:
    """Each output layer with its engine, unless they are in the directory already."""
    engines = [(layers, directory / f"engine-{qformat}-{number}") for number, layers in enumerate(form.layers)]
    if all(engine_dir.exists() for _, engine_dir in engines):
        return engines
    model_dir = save_model(form, directory / "model")
    if not (directory / "head").exists():
        form.head(model_dir, directory / "head")
    precision = QuantConfig() if qformat is None else QuantConfig(qformat, 64)
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        convert(model_dir, Path(temporary), None, replace=True, progress=lambda *_: None, precision=precision)
        checkpoint = OpenedCheckpoint(Path(temporary), open_checkpoint(Path(temporary)))
        for layers, engine_dir in engines:
            if not engine_dir.exists():
                make_engine(checkpoint, directory / "head", layers, engine_dir)
    return engines


def time_steps(llm: LLM, drafter: Any, runs: int) -> dict[str, float]:
    """Median milliseconds of a step of the `target`, of one of the head (`draft_model`), and of all drafting."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    template = llm.request_of(params)
    sessions = llm.session(), llm.session(drafter, "fixed")
    request = template.with_prompt(0, [5 + i * 13 % 1000 for i in range(CONTEXT)])
    found: dict[str, list[float]] = {"target": [], "draft_model": [], "draft": []}
    for run in range(runs + 1):  # in the first the prompt is computed, and found again by the others
        for session, parts in ((sessions[0], ["target"]), (sessions[1], ["draft_model", "draft"])):
            times = session.run([request]).times
            for part in parts if run else []:
                found[part].append(1e3 * getattr(times, f"{part}_time_s") / times.num_iterations)
    return {part: median(values) for part, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("forms", nargs="*", help=f"of {', '.join(FORMS)}; all of them")
    parser.add_argument("--qformat", choices=["int8", "int4"], help="of the target; without it bfloat16")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--work-dir", type=Path, help="keeps models and heads for the next run")
    arguments = parser.parse_args()
    print(f"{torch.get_num_threads()} threads\n")
    print("| head | output and other layers | its step, ms | the target's | share | drafting |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.forms or FORMS:
            form, directory = FORMS[name], (arguments.work_dir or Path(temporary)) / name
            for layers, engine_dir in make_engines(form, directory, arguments.qformat):
                with LLM(engine_dir) as llm:
                    ms = time_steps(llm, form.drafter(directory / "head", 1), arguments.runs)
                target, own, drafting = (ms[part] for part in ("target", "draft_model", "draft"))
                figures = f"{own:.2f} | {target:.1f} | {own / target:.3f} | {drafting:.2f}"
                print(f"| {form.drafter.description.title} of {name} | {described(layers)} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
