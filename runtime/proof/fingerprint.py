"""An engine's fingerprint: a digest of its logits after fixed tokens, and the facts that these bits depend on.

Two engines with the same digest give the same bits, on whatever machine and from whatever build, as far as 48 tokens
show; a check of answers (`runtime.proof.checker`) looks at their own tokens. The facts beside the digest explain why
two digests differ.
"""

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from runtime import specdec_version
from runtime.checkpoint.config import EngineConfig, LayerShape, parse
from runtime.checkpoint.tokenizer import Tokenizer
from runtime.core.batch import generation_row
from runtime.core.request import Request, Sequence
from runtime.engine.engine import Engine
from runtime.loop.step import make_room
from runtime.proof.records import Fingerprint
from runtime.text.text import tokenizer_digest
from runtime.util.digests import digest
from runtime.util.reading import parse_json, read_utf8

NUM_TOKENS = 48
_DIGEST_LEN = 16


def fingerprint_of(engine: Engine, tokenizer: Tokenizer | None) -> Fingerprint:
    """The fingerprint of an opened engine. 48 tokens are computed for it, in two steps."""
    config = engine.config
    formats: tuple[str | None, ...] = ()
    if (found := config.quantization) is not None:
        formats = found.quant_algo, found.activations, found.kv_cache_quant_algo
    shapes = (config.pretrained_config.get("model_type"), config.vocab_size, layers_of_all_ranks(config), config.states)
    return Fingerprint(
        logits=engine.turns.take_with_room(lambda: digest_of_logits(engine)),
        weights=config.weights_digest[:_DIGEST_LEN],
        architecture=digest([repr(shapes)])[:_DIGEST_LEN],
        tokenizer=None if tokenizer is None else tokenizer_digest(tokenizer)[:_DIGEST_LEN],
        vocab_size=config.vocab_size,
        dtype=config.dtype,
        quantization=" ".join(filter(None, formats)) or None,
        tp_size=config.mapping.tp_size,
        compiler=config.build_config.compiler,
        processor=_processor(config),
        instructions=config.environment.instructions,
        torch=torch.__version__,
        specdec_version=specdec_version(),
        batch_invariant=config.batch_invariant,
        num_tokens=_num_tokens(engine),
    )


def layers_of_all_ranks(config: EngineConfig) -> tuple[LayerShape, ...]:
    """The layers with the K/V heads of all ranks; of two heads on four ranks each is there twice, and counts once."""
    tp_size, num_heads = config.mapping.tp_size, config.pretrained_config.get("num_key_value_heads")
    if tp_size == 1:
        return config.layers
    of_one = min(tp_size, num_heads) if isinstance(num_heads, int) else tp_size
    return tuple(
        replace(layer, num_kv_heads=layer.num_kv_heads * (of_one if layer.num_kv_heads == 1 else tp_size))
        for layer in config.layers
    )


def _processor(config: EngineConfig) -> str:
    if config.arithmetic is None:
        return config.environment.capability
    return f"{config.environment.capability}, {config.arithmetic} kernels for {torch.ops.specdec.instruction_set()}"


def _num_tokens(engine: Engine) -> int:
    return min(NUM_TOKENS, engine.config.build_config.max_request_len - 1)


def fixed_tokens(vocab_size: int, num_tokens: int) -> list[int]:
    """Token ids from all over the vocabulary, the same on every machine, by a linear congruential generator."""
    state, tokens = 1, []
    for _ in range(num_tokens):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        tokens.append((state >> 33) % vocab_size)
    return tokens


def digest_of_logits(engine: Engine) -> str | None:
    """Digest of the bytes of all logits after fixed tokens: all but the last are computed as a prompt, and the last as
    a step. Clears the cache. None if other generations hold the K/V blocks and must be continued first.
    """
    tokens = fixed_tokens(engine.config.vocab_size, _num_tokens(engine))
    # For the loop, the last token alone is the request's prompt: none of it is looked up or found in the cache.
    sequence = Sequence.start(Request(0, tuple(tokens), 1))
    with engine.without_disk():
        engine.clear_cache()
        while not engine.admit(sequence):
            if not make_room(engine, None, sequence.request):
                return None
        try:
            found = engine.forward_context(sequence, len(tokens) - 1) if len(tokens) > 1 else None
            last = engine.step([generation_row(sequence, [])])[0]
            return _digest_of([last] if found is None else [found, last])
        finally:
            engine.release(sequence)
            engine.clear_cache()


def _digest_of(tensors: Seq[Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:_DIGEST_LEN]


def read_fingerprint(path: Path) -> Fingerprint:
    """The fingerprint in a JSON file, alone or under `fingerprint`; SpecDecError names the file if there is none."""
    data = parse_json(read_utf8(path), path)
    found = data.get("fingerprint", data) if isinstance(data, dict) else data
    return parse(Fingerprint, found, str(path))
