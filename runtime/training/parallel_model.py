"""Adaptation of a causal model to a parallel draft model (PARD, arXiv 2504.18583): it learns to fill in mask tokens.

Masks follow the tokens of a text. Each mask has an anchor, the token behind which a draft begins, and a depth of at
least 1. The mask of depth d whose anchor has index a is at position a + d and learns the token with index a + d + 1.
It sees the tokens up to the anchor and the anchor's masks of lower depths, as when it drafts; the tokens themselves
learn as before, which is depth 0.

At each depth only a share of the anchors has masks, chosen from the anchors with masks of the depth before (the paper's
conditional drop-token): 0.7, 0.49, … of all anchors, and at least a fifth. So a text with eight depths takes about the
time of three times its tokens, not of eight times.
"""

import shutil
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from runtime.builder.reference import load_original
from runtime.checkpoint.gguf.reader import is_gguf
from runtime.drafters.heads.head_config import PARD_MASK
from runtime.model.pretrained import layers_that_keep
from runtime.training.training_run import TrainingRun
from runtime.training.unrolled import Losses, Rows, Trainer
from runtime.util.errors import SpecDecError
from runtime.util.files import read_json, write_json

KEPT, LEAST_KEPT = 0.7, 0.2
"""Share of a depth's anchors that the next depth keeps, and the least share of all anchors."""
NUM_DEPTHS = 8
_WINDOWED = "sliding_attention"
_TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "generation_config.json", "*.jinja"
)  # fmt: skip


@dataclass(frozen=True)
class Masks:
    """Masks behind texts [texts, masks]: indices of their anchors, and their depths; depth 0 is padding."""

    anchors: Tensor
    depths: Tensor

    @property
    def places(self) -> Tensor:
        """Positions of the masks, which are the positions of the tokens that they stand for."""
        return self.anchors + self.depths


def choose_masks(is_anchor: Tensor, num_depths: int, generator: torch.Generator, kept: float = KEPT) -> Masks:
    """Masks of depths 1 to `num_depths` - 1 behind anchors [texts, tokens]; each depth keeps the share `kept`."""
    rows: list[list[tuple[int, int]]] = []
    for row in is_anchor:
        anchors = row.nonzero().flatten()
        num_all, found = len(anchors), list[tuple[int, int]]()
        for depth in range(1, num_depths):
            num_kept = min(len(anchors), round(num_all * max(kept**depth, LEAST_KEPT)))
            order = torch.randperm(len(anchors), generator=generator)[:num_kept]
            anchors = anchors[order.sort().values]
            found += [(int(anchor), depth) for anchor in anchors]
        rows.append(found)
    size = max(map(len, rows))
    padded = [[*row, *[(0, 0)] * (size - len(row))] for row in rows]
    both = torch.tensor(padded, dtype=torch.int64).view(len(rows), size, 2)
    return Masks(both[..., 0], both[..., 1])


def visible(num_tokens: int, masks: Masks, window: int | None = None) -> Tensor:
    """True where a query sees a key, [texts, tokens + masks, tokens + masks]; `window` as in the model's config."""
    num_texts, num_masks = masks.anchors.shape
    own = torch.arange(num_tokens).expand(num_texts, -1)
    anchors, depths = torch.cat([own, masks.anchors], 1), torch.cat([torch.zeros_like(own), masks.depths], 1)
    places = anchors + depths
    is_token = (torch.arange(num_tokens + num_masks) < num_tokens)[None, None]
    sees_token = is_token & (anchors[:, None, :] <= anchors[:, :, None])
    sees_mask = ~is_token & (anchors[:, None] == anchors[:, :, None]) & (depths[:, None] <= depths[:, :, None])
    is_mask_query = ~is_token.transpose(1, 2)
    seen = sees_token | (sees_mask & is_mask_query & (depths[:, None] > 0))
    if window is not None:
        seen &= places[:, :, None] - places[:, None] < window
    return seen | torch.eye(num_tokens + num_masks, dtype=torch.bool)  # padding sees itself


class ParallelModel(nn.Module):
    """A causal model of transformers that learns to draft several tokens in a pass; `mask_token` is in their places."""

    def __init__(self, model: PreTrainedModel, mask_token: int) -> None:
        super().__init__()
        model.set_attn_implementation("sdpa")  # which takes masks that are True where a token is seen
        self.model, self.mask_token = model, mask_token
        self.vocab_size = _num_ids(model)

    def logits_at(self, tokens: Tensor, masks: Masks, places: Tensor) -> Tensor:
        """Logits [texts, places, vocab] at these places in the texts [texts, tokens] followed by their masks."""
        num_texts, num_tokens = tokens.shape
        ids = torch.cat([tokens, torch.full_like(masks.anchors, self.mask_token)], 1)
        positions = torch.cat([torch.arange(num_tokens).expand(num_texts, -1), masks.places], 1)
        config = self.model.config.get_text_config(decoder=True)
        window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
        whole = visible(num_tokens, masks)[:, None]
        near = whole if window is None else visible(num_tokens, masks, window)[:, None]
        seen = {kind: near if kind == _WINDOWED else whole for kind in kinds} if kinds else near
        output = self.model(
            input_ids=ids, position_ids=positions, attention_mask=seen, use_cache=False, logits_to_keep=places
        )
        logits: Tensor = output.logits
        return logits

    def losses_of(self, rows: Rows, num_depths: int, sums: Losses, generator: torch.Generator) -> Tensor:
        """Mean cross-entropy with the target's known distributions at tokens and masks; adds to `sums` by depth."""
        has_targets = rows.top_probs[..., 0] > 0
        num_tokens = rows.tokens.shape[1]
        masks = choose_masks(has_targets.roll(-1, 1), num_depths, generator)
        depths = torch.cat([torch.zeros_like(rows.tokens), masks.depths], 1)
        learned = torch.cat([torch.arange(num_tokens).expand_as(rows.tokens), masks.places], 1) + 1
        is_mask = torch.arange(depths.shape[1]) >= num_tokens
        is_learned = (learned < num_tokens) & (~is_mask | (depths > 0))
        is_learned &= has_targets.gather(1, learned.clamp_max(num_tokens - 1))
        places = is_learned.any(0).nonzero().flatten()
        text, column = is_learned[:, places].nonzero(as_tuple=True)
        logprobs = self.logits_at(rows.tokens, masks, places)[text, column].float().log_softmax(-1)
        at = text, learned[text, places[column]]
        probs = rows.top_probs[at] / rows.top_probs[at].sum(-1, keepdim=True)
        each = -(probs * logprobs.gather(-1, rows.top_ids[at])).sum(-1)
        is_right = logprobs.detach().argmax(-1) == rows.tokens[at]
        of_depth = depths[text, places[column]]
        for depth in range(num_depths):
            found = of_depth == depth
            sums.loss[depth] += float(each.detach()[found].sum())
            sums.num_right[depth] += int(is_right[found].sum())
            sums.num[depth] += int(found.sum())
        return each.mean()

    @torch.no_grad()
    def accepted_lengths(self, rows: Rows, max_draft_len: int) -> Tensor:
        """Lengths [texts, tokens - 1] as from `runtime.training.unrolled.accepted_lengths`, for drafts of one pass."""
        num_tokens = rows.tokens.shape[1]
        masks = choose_masks(rows.is_output.roll(-1, 1), max_draft_len, torch.Generator(), kept=1.0)
        places = torch.arange(num_tokens + masks.anchors.shape[1])
        chosen = self.logits_at(rows.tokens, masks, places).argmax(-1)
        agrees = torch.zeros(len(rows.tokens), num_tokens, max_draft_len, dtype=torch.bool)
        agrees[:, :-1, 0] = chosen[:, : num_tokens - 1] == rows.tokens[:, 1:]
        text, column = ((masks.depths > 0) & (masks.places + 1 < num_tokens)).nonzero(as_tuple=True)
        anchors, depths = masks.anchors[text, column], masks.depths[text, column]
        agrees[text, anchors, depths] = (
            chosen[text, num_tokens + column] == rows.tokens[text, masks.places[text, column] + 1]
        )
        return agrees.long().cumprod(-1).sum(-1)[:, 1:]


def open_model(model_dir: Path) -> ParallelModel:
    """A causal model to adapt, in float32. SpecDecError if transformers cannot open it, or it has recurrent states."""
    try:
        model = load_original(model_dir, torch.float32, "sdpa")
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise SpecDecError(
            f"transformers cannot open the model to adapt, {model_dir}: {str(error).splitlines()[0]}",
            hint="name the directory of a causal language model",
        ) from error
    check_has_no_states(model.config, model_dir)
    return ParallelModel(model, choose_mask_token(model, model_dir))


def check_has_no_states(config: PreTrainedConfig, model_dir: Path) -> None:
    """SpecDecError for a model with recurrent states: masks would change the states for later tokens."""
    if layers_that_keep(config)[1]:
        raise SpecDecError(
            f"a model whose layers have states cannot learn to draft in parallel: {model_dir}",
            hint="take a model with attention in every layer",
        )


def choose_mask_token(model: PreTrainedModel, model_dir: Path) -> int:
    """The id of the model's own mask token, or else an id that no text has: the first that the tokenizer does not use,
    or the padding token. A model without such an id gets a further embedding.
    """
    config = model.config
    if type(own := getattr(config, PARD_MASK, None)) is int:
        return own
    size, used = _num_ids(model), _num_tokens(model_dir)
    if used is not None and used < size:
        return used
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    padding = getattr(config, "pad_token_id", None)
    if type(padding) is int and 0 <= padding < size and padding not in (*ends, config.bos_token_id):
        return padding
    model.resize_token_embeddings(size + 1)
    return size


def _num_ids(model: PreTrainedModel) -> int:
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[0])


def _num_tokens(model_dir: Path) -> int | None:
    """The largest id in a `tokenizer.json`, plus 1; None without that file. SpecDecError if it is damaged."""
    if not (model_dir / "tokenizer.json").is_file():
        return None
    content = read_json(model_dir / "tokenizer.json")
    try:
        vocabulary = content["model"]["vocab"]
        own = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return int(max([*own, *(one["id"] for one in content.get("added_tokens", []))])) + 1
    except (KeyError, TypeError, ValueError) as error:
        raise SpecDecError(
            f"the model to adapt has a tokenizer.json without a vocabulary: {model_dir}",
            hint="download or save the model again",
        ) from error


class ParallelTrainer(Trainer):
    """`Trainer` of a `ParallelModel`. The choice of masks depends on the seed and the step alone."""

    def losses(self, sums: Losses) -> Tensor:
        generator = torch.Generator().manual_seed(self.schedule.random_seed * 1_000_003 + self.step)
        model: Any = self.head
        found: Tensor = model.losses_of(self.rows_of(self.step), self.schedule.num_unrolled, sums, generator)
        return found


class ParallelRun(TrainingRun):
    """A `TrainingRun` that adapts a causal model, whose directory or GGUF file is given in place of a head."""

    trainer_class = ParallelTrainer

    @property
    def longest(self) -> int:
        return self.settings.num_unrolled

    def _open(self, given: Any, end_ids: frozenset[int]) -> tuple[Any, Any]:
        model = open_model(given)
        if model.vocab_size < (most := max(max((*t.prompt_tokens, *t.output_tokens)) for t in self.texts.all) + 1):
            raise SpecDecError(
                f"the model to adapt has {model.vocab_size} ids, and the texts have ids up to {most - 1}: {given}",
                hint="take a small model with the target's tokenizer",
            )
        return given, model

    def accepted(self, texts: Seq[int]) -> Tensor:
        model: Any = self.head
        found: Tensor = model.accepted_lengths(self._rows(texts), self.longest)
        return found

    def write_model(self, directory: Path, tokenizer_dir: Path) -> None:
        """Write the present model and the tokenizer's files: in the model's own dtype, or in bfloat16 for float16."""
        model: Any = self.head
        config = model.model.config
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
        model.model.to(torch.bfloat16 if dtype == torch.float16 else dtype).save_pretrained(directory)
        write_json(
            directory / "config.json",
            read_json(directory / "config.json") | {PARD_MASK: model.mask_token, "spd_type": "pard"},
        )
        own = self.config if not is_gguf(self.config) and (self.config / "tokenizer.json").is_file() else tokenizer_dir
        for pattern in _TOKENIZER_FILES:
            for file in own.glob(pattern):
                if not (directory / file.name).exists():
                    shutil.copyfile(file, directory / file.name)
