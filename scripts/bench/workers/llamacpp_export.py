"""Write a Llama or a mixture of Qwen3's as GGUF, in its own dtype or quantized as llama.cpp quantizes.

    python -m scripts.bench.workers.llamacpp_export MODEL_DIR FILE [--quantize-to Q8_0|Q4_0]
        [--tokenizer-dir DIR | --named-tokens]

It runs in llama.cpp's environment and needs numpy and the `gguf` package alone. Without the directory of a tokenizer
(byte-level BPE) there is none in the file: prompts are token ids. Of a model in 4 bits the output layer has 8.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

TYPES = {
    "F32": gguf.GGMLQuantizationType.F32,
    "F16": gguf.GGMLQuantizationType.F16,
    "BF16": gguf.GGMLQuantizationType.BF16,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
    "Q4_0": gguf.GGMLQuantizationType.Q4_0,
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
ARCHITECTURES = {"llama": "llama", "qwen3_moe": "qwen3moe"}
IN_8_BITS, IN_FLOATS = "lm_head", "gate"
"""The output layer of a model in 4 bits, and the routers of every model: as llama.cpp quantizes."""


def read_tensors(model_dir: Path) -> Iterator[tuple[str, str, list[int], np.ndarray]]:
    """Name, dtype, shape and bytes of every tensor. safetensors' own reader has no bfloat16 for numpy."""
    for file in sorted(model_dir.glob("*.safetensors")):
        with file.open("rb") as stream:
            header_len = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(header_len))
        content = np.memmap(file, np.uint8, "r", 8 + header_len)
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                yield name, entry["dtype"], entry["shape"], content[start:end]


def with_experts_together(
    tensors: Iterator[tuple[str, str, list[int], np.ndarray]],
) -> Iterator[tuple[str, str, list[int], np.ndarray]]:
    """A layer's experts as one tensor, (experts, outputs, inputs), behind all others."""
    experts: dict[str, dict[int, tuple[str, list[int], np.ndarray]]] = {}
    for name, dtype, shape, content in tensors:
        before, is_expert, rest = name.partition(".experts.")
        if is_expert:
            number, _, after = rest.partition(".")
            experts.setdefault(f"{before}.experts.{after}", {})[int(number)] = dtype, shape, content
        else:
            yield name, dtype, shape, content
    for name, of_numbers in experts.items():
        dtype, shape, _ = of_numbers[0]
        contents = [of_numbers[number][2] for number in range(len(of_numbers))]
        yield name, dtype, [len(contents), *shape], np.concatenate(contents)


def gguf_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` is `blk.3.attn_q.weight`."""
    name = name.removesuffix(".weight")
    if name in NAMES:
        return f"{NAMES[name]}.weight"
    _, _, layer, module = name.split(".", 3)
    return f"blk.{layer}.{NAMES[module]}.weight"


def interleave_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key projection as llama.cpp rotates them.

    Hugging Face rotates dimension i of a head with i + half of them, llama.cpp 2 i with 2 i + 1: rows 0 1 2 3 of a
    head become 0 2 1 3.
    """
    head_dim = rows.shape[0] // num_heads
    halves = rows.reshape(num_heads, 2, head_dim // 2, rows.shape[1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def widen(content: np.ndarray, dtype: str) -> np.ndarray:
    """Float32 of the same value."""
    if dtype == "BF16":
        return (content.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return content.view({"F32": np.float32, "F16": np.float16}[dtype]).astype(np.float32)


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    if config["model_type"] not in ARCHITECTURES or rope["rope_type"] != "default":
        names = " or ".join(ARCHITECTURES)
        raise SystemExit(f"no {names} with plain rotary embeddings: {config['model_type']}, {rope['rope_type']}")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path, vocab_size: int) -> None:
    """A byte-level BPE; ids of the model that it has no token for are unused ones."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocab | special, key=(vocab | special).__getitem__)
    types = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    unused = range(len(tokens), vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + [f"[unused {i}]" for i in unused])
    writer.add_token_types(types + [gguf.TokenType.UNUSED for _ in unused])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(special["<s>"])
    writer.add_eos_token_id(special["</s>"])
    writer.add_add_bos_token(True)


def add_named_tokens(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """A tokenizer that only gives each id a name: llama.cpp's server opens no file without one."""
    names = [f"<{i}>" for i in range(vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types([gguf.TokenType.NORMAL] * vocab_size)
    writer.add_token_merges([f"{names[0]} {names[1]}"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--quantize-to", choices=["Q8_0", "Q4_0"])
    parser.add_argument("--tokenizer-dir", type=Path)
    parser.add_argument("--named-tokens", action="store_true")
    arguments = parser.parse_args()
    model_dir = arguments.model_dir
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(arguments.file, ARCHITECTURES.get(config["model_type"], "llama"))
    add_config(writer, config)
    if arguments.tokenizer_dir:
        add_tokenizer(writer, arguments.tokenizer_dir, config["vocab_size"])
    elif arguments.named_tokens:
        add_named_tokens(writer, config["vocab_size"])
    else:
        writer.add_tokenizer_model("none")
    num_heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, dtype, shape, content in with_experts_together(read_tensors(model_dir)):
        module = name.split(".")[-2]
        if len(shape) == 1 or module == IN_FLOATS:  # llama.cpp has norms in float32 only
            writer.add_tensor(gguf_name(name), widen(content, dtype).reshape(shape))
            continue
        rows = content.reshape(*shape[:-1], -1)
        if module in num_heads and config["model_type"] == "llama":
            rows = interleave_halves(rows, num_heads[module])
        if arguments.quantize_to:
            quantized = TYPES["Q8_0" if module == IN_8_BITS else arguments.quantize_to]
            values = widen(rows.reshape(-1), dtype).reshape(shape)
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(gguf_name(name), rows, raw_dtype=TYPES[dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
