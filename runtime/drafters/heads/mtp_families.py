"""Peculiarities of families of models for which heads are published: MTP layers in a model's files, assistants, and
the layers of EAGLE-3 and block heads.

Torch-free, since a head is recognised before torch is imported.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class MtpFamily:
    """Peculiarities of a family's MTP head, by the `model_type` of its target."""

    model_type: str
    is_unsaid: bool = False
    """True if config.json does not state that there is a head, and its weights alone show it. Its first layer drafts.
    MiMo Flash has further layers, but sources disagree on what they read, so they are not used.
    """
    lists_its_blocks: bool = False
    """True if the config lists the blocks that the head consists of (`mtp_layers_block_type`)."""
    is_windowed: bool = False
    """True if the head's layer has a window, and a dense network in place of the target's experts."""
    embeddings: str = "model.embed_tokens.weight"
    """Name of the target's embeddings in its files."""


_MTP_FAMILIES = {
    one.model_type: one
    for one in (
        MtpFamily("qwen3_next", is_unsaid=True),
        MtpFamily("mimo_v2_flash", is_unsaid=True, is_windowed=True),
        MtpFamily("nemotron_h", lists_its_blocks=True, embeddings="model.embeddings.weight"),
    )
}
ASSISTANTS = {"gemma4_assistant": 1536, "gemma4_unified_assistant": 3840}
"""Model types of assistants, and the widths of their targets, for configs that do not state them."""
TARGETS_OF_ASSISTANTS = "gemma4"
"""Beginning of the model types for which there are assistants."""
EAGLE_LAYERS, BLOCK_LAYERS = "llama", "qwen3"
"""Model types of layers, for configs that do not state them: in EAGLE-3 heads, and in heads that draft blocks."""


def mtp_family(model_type: object) -> MtpFamily:
    """The entry for a target's model type; an entry with the defaults if the table has none."""
    return _MTP_FAMILIES.get(str(model_type)) or MtpFamily(str(model_type))


BEFORE_LAYER = ("enorm", "hnorm", "eh_proj")
_QWENS = {"mtp.fc.": "eh_proj.", "mtp.pre_fc_norm_embedding.": "enorm.", "mtp.pre_fc_norm_hidden.": "hnorm."}
_QWENS |= {"mtp.layers.": "model.layers.", "mtp.norm.": "model.norm."}
_ERNIES = {"model.mtp_emb_norm.N.": "enorm.", "model.mtp_hidden_norm.N.": "hnorm."}
_ERNIES |= {"model.mtp_linear_proj.N.": "eh_proj.", "model.mtp_block.N.": "model.layers.0."}
_MIMO_FLASHES = {f"model.mtp.layers.N.{name}.": f"{name}." for name in BEFORE_LAYER}
_MIMO_FLASHES |= {"model.mtp.layers.N.pre_mlp_layernorm.": "model.layers.0.post_attention_layernorm."}
_MIMO_FLASHES |= {"model.mtp.layers.N.final_layernorm.": "model.norm.", "model.mtp.layers.N.": "model.layers.0."}
STATE_FIRST = "model.mtp_layers."  # MiMo 7B's: its projection is of [state, embedding]
_MIMOS = {f"{STATE_FIRST}N.token_layernorm.": "enorm.", f"{STATE_FIRST}N.hidden_layernorm.": "hnorm."}
_MIMOS |= {f"{STATE_FIRST}N.input_proj.": "eh_proj.", f"{STATE_FIRST}N.final_layernorm.": "model.norm."}
_MIMOS |= {f"{STATE_FIRST}N.": "model.layers.0."}
NAMES_IN_FILES = (_QWENS, _ERNIES, _MIMO_FLASHES, _MIMOS)
"""Beginnings of names in files, and their replacements in a model of the layer alone; the longest come first."""
WITHOUT_NORM = "model.mtp_block."
"""Beginning of the names of weights of a head without a norm behind its layer (Ernie's)."""
