"""Costs of trained heads' drafts beside a step of their target, both with random weights.

The target is a Llama of 0.4 B parameters: 24 layers of a quarter of Llama-3.1-8B's width. Heads have as many layers as
published ones: EAGLE-3 one, P-EAGLE four, DFlash and DSpark five; the first two draft a quarter of the vocabulary.
EAGLE-3 drafts a token in a pass, the others all seven. Calls take turns, and figures are medians.

    python -m scripts.bench.heads [--qformat int4] [--runs 30] [--work-dir DIR]
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from runtime.builder.build import build_engine
from runtime.builder.convert import convert
from runtime.checkpoint.config import BuildConfig, QuantConfig
from runtime.core.batch import Row, pack
from runtime.core.request import Request, Sequence
from runtime.drafters.head_draft import HeadDraft, open_head
from runtime.drafters.heads.head_config import read_head
from runtime.engine.engine import Engine
from scripts.bench.step import alternate, save_random_llama

TARGET = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32064,
    "max_position_embeddings": 4096,
}
SIZE, WIDE, VOCAB, HEADS, KV_HEADS, DIM = 1024, 3584, 32064, 16, 4, 64
STATES, DRAFT_VOCAB, RANK, CONTEXT, DRAFT_LEN = (2, 12, 21), 8016, 64, 512, 7
LAYERS = {
    "hidden_size": SIZE,
    "intermediate_size": WIDE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
}
# Name -> (layers, config).
FORMS: dict[str, tuple[int, dict[str, object]]] = {
    "EAGLE-3": (1, {"speculators_model_type": "eagle3"}),
    "P-EAGLE": (4, {"speculators_model_type": "peagle", "mask_token_id": 7}),
    "DFlash": (5, {"speculators_model_type": "dflash", "block_size": DRAFT_LEN + 1, "mask_token_id": 7}),
    "DSpark": (
        5,
        {
            "speculators_model_type": "dspark",
            "block_size": DRAFT_LEN,
            "mask_token_id": 7,
            "sample_from_anchor": True,
            "markov_rank": RANK,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        },
    ),
}


def save_head(name: str, directory: Path) -> Path:
    """Write it as `speculators` does, with random weights."""
    num_layers, config = FORMS[name]
    is_eagle, generator = "EAGLE" in name, torch.Generator().manual_seed(0)
    vocab = DRAFT_VOCAB if is_eagle else VOCAB
    tensors: dict[str, Tensor] = {}

    def add(key: str, *shape: int) -> None:
        made = torch.randn(*shape, generator=generator) * 0.02 if len(shape) > 1 else torch.ones(*shape)
        tensors[key] = made.bfloat16()

    add("fc.weight", SIZE, len(STATES) * SIZE)
    add("norm.weight", SIZE)
    add("lm_head.weight", vocab, SIZE)
    for i in range(num_layers):
        reads = 2 * SIZE if is_eagle and i == 0 else SIZE
        for part, outputs, inputs in (
            ("self_attn.q_proj", HEADS * DIM, reads),
            ("self_attn.k_proj", KV_HEADS * DIM, reads),
            ("self_attn.v_proj", KV_HEADS * DIM, reads),
            ("self_attn.o_proj", SIZE, HEADS * DIM),
            ("mlp.gate_proj", WIDE, SIZE),
            ("mlp.up_proj", WIDE, SIZE),
            ("mlp.down_proj", SIZE, WIDE),
        ):
            add(f"layers.{i}.{part}.weight", outputs, inputs)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            add(f"layers.{i}.{norm}.weight", SIZE)
        if not is_eagle:
            add(f"layers.{i}.self_attn.q_norm.weight", DIM)
            add(f"layers.{i}.self_attn.k_norm.weight", DIM)
    if is_eagle:
        add("layers.0.hidden_norm.weight", SIZE)
        tensors["d2t"] = torch.arange(DRAFT_VOCAB) * 3
    else:
        add("hidden_norm.weight", SIZE)
        add("embed_tokens.weight", VOCAB, SIZE)
    if name == "P-EAGLE":
        add("mask_hidden", 1, 1, len(STATES) * SIZE)
    if name == "DSpark":
        add("markov_head.markov_w1.weight", VOCAB, RANK)
        add("markov_head.markov_w2.weight", VOCAB, RANK)
        add("confidence_head.proj.weight", 1, SIZE + RANK)
        add("confidence_head.proj.bias", 1)
    layers = LAYERS | {"model_type": "llama" if is_eagle else "qwen3", "num_hidden_layers": num_layers}
    key = "eagle_aux_hidden_state_layer_ids" if is_eagle else "aux_hidden_state_layer_ids"
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    whole = config | {"transformer_layer_config": layers, "draft_vocab_size": vocab, key: list(STATES)}
    (directory / "config.json").write_text(json.dumps(whole))
    return directory


def make_engine(work_dir: Path, qformat: str | None) -> Path:
    engine_dir, source = work_dir / f"engine-{qformat}", work_dir / "hf"
    if not engine_dir.exists():
        if not source.exists():
            save_random_llama(source, "bfloat16", TARGET)
        precision = QuantConfig() if qformat is None else QuantConfig(qformat, 64)  # type: ignore[arg-type]
        checkpoint = work_dir / f"checkpoint-{qformat}"
        convert(source, checkpoint, None, replace=True, progress=lambda *_: None, precision=precision)
        build = BuildConfig("aot", 1, 1024, 1536, 10, 32, "draft_tokens_external", hidden_states=STATES)
        build_engine(checkpoint, engine_dir, build, torch.device("cpu"), replace=False, phase=lambda _: None)
    return engine_dir


def drafting(drafter: HeadDraft, sequence: Sequence, num_tokens: int) -> Callable[[], object]:
    """A draft of `num_tokens` behind a sequence of which the head knows all but the last token."""
    drafter.propose([sequence], num_tokens)

    def call() -> None:
        (draft,) = drafter.propose([sequence], num_tokens)
        assert len(draft.tokens) == num_tokens

    return call


def step_of(engine: Engine, num_tokens: int) -> Callable[[], object]:
    table = list(range(1, 2 + (CONTEXT + num_tokens) // 32))
    batch = pack([Row([5] * num_tokens, CONTEXT, table, num_tokens)], 32, engine.device)

    def call() -> None:
        with torch.inference_mode():
            engine._step(*batch.tensors(), *engine._pool.tensors())

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--qformat", choices=["int8", "int4"], help="of the target; without it bfloat16")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--work-dir", type=Path, help="keeps engine and heads for the next run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work_dir = arguments.work_dir or Path(temporary)
        heads = {name: save_head(name, work_dir / name.lower()) for name in FORMS}
        with Engine.open(make_engine(work_dir, arguments.qformat)) as engine:
            drafters = {
                name: HeadDraft(engine, *open_head(engine, read_head(directory)), use_logits=False)
                for name, directory in heads.items()
            }
            sequence = Sequence.start(Request(0, (5,) * CONTEXT, 500))
            assert engine.admit(sequence)
            engine.compute_context(sequence, CONTEXT - 1)
            calls = {"target": step_of(engine, 1), "verify": step_of(engine, DRAFT_LEN + 1)}
            calls |= {name: drafting(one, sequence, DRAFT_LEN) for name, one in drafters.items()}
            calls["EAGLE-3, 1"] = drafting(drafters["EAGLE-3"], sequence, 1)
            ms = alternate(calls, arguments.runs)
        print(f"{torch.get_num_threads()} threads; a step of the target: {ms['target']:.1f} ms", end=", ")
        print(f"of {DRAFT_LEN + 1} tokens: {ms['verify']:.1f}\n\n| head | tokens | a draft, ms | ÷ the target's step |")
        print("|---|---|---|---|")
        for name in list(calls)[2:]:
            num_tokens = 1 if name not in FORMS else DRAFT_LEN
            print(f"| {name} | {num_tokens} | {ms[name]:.1f} | {ms[name] / ms['target']:.2f} |")


if __name__ == "__main__":
    main()
