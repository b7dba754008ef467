"""Identity of an engine's model: its config, tokenizer and weights, whatever its directory's name."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from runtime.checkpoint.bundle import Bundle
from runtime.checkpoint.quant.planning import check_numbers
from runtime.checkpoint.tokenizer import Tokenizer
from runtime.model.model import dtypes_of_weights
from runtime.model.pretrained import parse_pretrained_config
from runtime.model.weights import present, tensors_of
from runtime.text.text import load_tokenizer, tokenizer_digest
from runtime.util.digests import digest
from runtime.util.errors import SpecDecError

# Keys of a config that do not change what the model computes: who wrote it, how it is run, and the ids that begin, end
# and pad a text, which each request names.
_NOT_OF_THE_MODEL = {
    "_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label",
    "label2id", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict",
    "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes
_SUMMED_AT_ONCE = 1 << 20


class BitSums:
    """Sums of the bits of a model's weights, each cast to `dtype`, or to float32 if transformers keeps it so. Summing
    is as fast as memory, and is done while other code has the weights loaded.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, unread: Path | None = None) -> None:
        """`unread` is a file of weights that has not been checked for NaN and infinity yet."""
        self._weights, self._unread = sorted(model.state_dict().items()), unread
        self._dtype_of = dtypes_of_weights(model.config, dtype)
        self._names = {_place(weight): name for name, weight in self._weights}
        self._sums: dict[tuple[int, int], int] = {}

    @contextmanager
    def present(self, *those: nn.Module | Tensor) -> Iterator[None]:
        """Read weights as `weights.present` does; SpecDecError if weights of the `unread` file are NaN or infinite."""
        with present(*those):
            for tensor in tensors_of(those):
                if (place := _place(tensor)) in self._names and place not in self._sums:
                    if self._unread is not None:
                        check_numbers(tensor, self._names[place], self._unread)
                    self._sums[place] = _sum_of_bits(tensor, self._dtype_of(self._names[place]))
            yield

    def digest(self) -> str:
        """A digest that is equal for models with equal weights."""
        parts = []
        for name, weight in self._weights:
            with self.present(weight) if _place(weight) not in self._sums else nullcontext():
                parts.append(f"{name} {tuple(weight.shape)} {self._sums[_place(weight)]}")
        return digest(parts)


def _place(weight: Tensor) -> tuple[int, int]:
    """Address and number of elements of a weight's memory, by which the weight is recognised."""
    return weight.data_ptr(), weight.numel()


def _sum_of_bits(weight: Tensor, dtype: torch.dtype) -> int:
    """Sum by NumPy, which takes a tenth of torch's time, piece by piece, so that each piece can be cast."""
    total = np.zeros(1, np.int64)  # an array's sum overflows without a warning
    for piece in torch.split(weight.detach().flatten(), _SUMMED_AT_ONCE):
        cast = piece.to(dtype) if weight.dtype.is_floating_point else piece
        total += cast.view(_INTEGERS[cast.element_size()]).cpu().numpy().sum(dtype=np.int64)
    return int(total[0])


def differences(
    model: PreTrainedModel, model_dir: Path, bundle: Bundle, tokenizer: Tokenizer | None, dtype: torch.dtype
) -> list[str]:
    """Differences between transformers' `model`, loaded from `model_dir`, and the engine's model."""
    found = _config_differences(model, bundle)
    if tokenizer is not None and _has_another_tokenizer(model_dir, bundle, tokenizer):
        found.append("the tokenizer")
    is_inner = model.config.get_text_config() is not model.config  # its weights have other names here
    quantization = bundle.config.quantization
    # Quantized weights differ from the model's in any case.
    is_quantized = quantization is not None and quantization.quant_algo is not None
    if not found and not (is_inner or is_quantized) and BitSums(model, dtype).digest() != bundle.config.weights_digest:
        found.append("the weights")
    return found


def _config_differences(model: PreTrainedModel, bundle: Bundle) -> list[str]:
    ours = of_the_model(parse_pretrained_config(bundle.config.pretrained_config, str(bundle.directory)).to_dict())
    theirs = of_the_model(model.config.get_text_config().to_dict())
    return [
        f"`{key}` is {theirs.get(key)}, the engine's {ours.get(key)}"
        for key in sorted(ours | theirs)
        if ours.get(key) != theirs.get(key)
    ]


def of_the_model(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config that decide how the model computes."""
    return {key: value for key, value in config.items() if key not in _NOT_OF_THE_MODEL}


def _has_another_tokenizer(model_dir: Path, bundle: Bundle, tokenizer: Tokenizer) -> bool:
    """True if the model's tokenizer differs from the engine's. False for a model without a tokenizer."""
    try:
        theirs = load_tokenizer(model_dir, bundle.config.pretrained_config)
    except SpecDecError:
        return False
    return tokenizer_digest(theirs) != tokenizer_digest(tokenizer)
