"""Gemma 4's assistants: drafts as transformers' own class gives them, on the target's keys and values."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import AssistantReference, make_assistant, some
from safetensors.torch import load_file, save_file
from test_eagle import SAMPLED, SMALL, Recording, answer, drafter, expected, make_requests
from tiny import make_model
from transformers import PreTrainedModel

from runtime.drafters.heads.head_config import DraftOutputSettings, is_head, kind_of_head, read_head
from runtime.engine.engine import Engine
from runtime.util.errors import SpecDecError, UsageError

DENSE = {"enable_moe_block": False, "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None}
KINDS = ["sliding_attention", "full_attention"]
# Name -> (the target's settings, the assistant's).
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "centroids": ({"layer_types": KINDS * 2} | DENSE, {"num_centroids": 8}),
    "K/V shared": (
        {"layer_types": KINDS * 3, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8} | DENSE,
        {"num_centroids": 8},
    ),
    "K/V shared, no sharing of the last kinds": (
        {"layer_types": ["full_attention", *KINDS * 2], "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 8}
        | DENSE,
        {"layer_types": KINDS, "num_hidden_layers": 2},
    ),
    "experts, keys are values": ({"layer_types": KINDS * 2, "attention_k_eq_v": True}, {}),
    "unified": ({"layer_types": KINDS * 2}, {}),
    "unified, keys are values, centroids": ({"layer_types": KINDS * 2, "attention_k_eq_v": True}, {"num_centroids": 8}),
}


def make_target(form: str) -> PreTrainedModel:
    settings = FORMS[form][0]
    family = "gemma4-unified" if form.startswith("unified") else "gemma4-moe"
    return make_model(family, num_hidden_layers=len(settings["layer_types"]), **settings)


def check_drafts(seen: list[tuple[list[int], list[int]]], directory: Path, target: PreTrainedModel, least: int) -> None:
    assert sum(len(draft) for _, draft in seen) >= least
    reference = AssistantReference(directory, target)
    for tokens, draft in some(seen):
        assert draft == reference.drafts(tokens, len(draft)), tokens


@pytest.mark.parametrize(
    ("form", "loop", "compiler"),
    [
        ("K/V shared", "leader", "none"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("K/V shared", "leader", "aot"),
                ("centroids", "leader", "aot"),
                ("K/V shared", "orchestrator", "none"),
                ("unified", "leader", "none"),
                ("unified, keys are values, centroids", "leader", "aot"),
                ("K/V shared, no sharing of the last kinds", "leader", "none"),
                ("experts, keys are values", "leader", "aot"),
                ("experts, keys are values", "orchestrator", "none"),
            )
        ),
    ],
)
def test_drafts_are_transformers(form: str, loop: str, compiler: str, tmp_path: Path, make_engine_dir: Any) -> None:
    target = make_target(form)
    directory = make_assistant(target, tmp_path, **FORMS[form][1])
    engine_dir = make_engine_dir(target, hidden_states=(target.config.num_hidden_layers,), compiler=compiler)
    with Engine.open(engine_dir, **SMALL) as engine:
        assistant = drafter(engine, directory)
        assert answer(engine, loop, make_requests(), assistant) == expected(target)
        check_drafts(assistant.seen, directory, target, 80)
        assert (assistant.head.program is not None) == (compiler == "aot")


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("centroids")


@pytest.fixture(scope="module")
def engine_dir(target: PreTrainedModel, make_engine_dir: Any) -> Path:
    directory: Path = make_engine_dir(target, hidden_states=(4,))
    return directory


@pytest.fixture(scope="module")
def assistant_dir(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_assistant(target, tmp_path_factory.mktemp("assistant"), num_centroids=8)


def test_ids_that_are_not_chosen_have_no_probability(engine_dir: Path, assistant_dir: Path) -> None:
    """Three of 8 groups of 32 ids are looked at."""
    with Engine.open(engine_dir) as engine:
        assistant = drafter(engine, assistant_dir, use_logits=True)
        answer(engine, "leader", make_requests(SAMPLED)[:2], assistant)
    drafts = [draft for draft in assistant.drafts if draft.probs is not None]
    assert drafts and all(row.count_nonzero() <= 12 for draft in drafts for row in draft.probs)  # type: ignore[union-attr]


def test_config_says_what_it_is(assistant_dir: Path, target: PreTrainedModel, tmp_path: Path) -> None:
    head = read_head(assistant_dir)
    assert head.kind == "assistant" == kind_of_head(assistant_dir)
    assert head.hidden_states_of(4) == (4,)
    config = target.config.to_dict()
    for changes, wrong in (
        ({"hidden_size": 48}, "hidden size of 32, and this target has 48"),
        ({"model_type": "llama"}, "a Gemma 4, and the target is of the type 'llama'"),
    ):
        with pytest.raises(SpecDecError, match=wrong):
            head.check_target(config | changes, 32)
    with pytest.raises(SpecDecError, match="vocabulary of 32, and this target has 64"):
        head.check_target(config, 64)
    with pytest.raises(UsageError, match="computes few of its ids, and cannot have another output layer: int4"):
        DraftOutputSettings(qformat="int4").check([head], has_copy=False)
    config = json.loads((assistant_dir / "config.json").read_text())
    for changes, wrong in (
        ({"text_config": None}, "text_config` is not a JSON object: None"),
        ({"num_centroids": 7}, "7 centroids for 32 ids"),
        ({"model_type": "muse_glimmer_assistant"}, "not supported, 'muse_glimmer_assistant'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        assert is_head(tmp_path)
        with pytest.raises(SpecDecError, match=wrong):
            read_head(tmp_path)


def test_weights_of_another(engine_dir: Path, target: PreTrainedModel, assistant_dir: Path, tmp_path: Path) -> None:
    """Each error names what is wrong, and the engine goes on without it."""
    shutil.copytree(assistant_dir, tmp_path / "one")
    tensors, wide = load_file(tmp_path / "one/model.safetensors"), tmp_path / "wide"
    make_assistant(target, wide, global_head_dim=24)
    ordering = "masked_embedding.token_ordering"

    def opened(directory: Path, changed: dict[str, torch.Tensor], wrong: str) -> None:
        if changed:
            save_file(changed, directory / "model.safetensors", {"format": "pt"})
        with pytest.raises(SpecDecError, match=wrong):
            drafter(engine, directory)

    with Engine.open(engine_dir) as engine:
        opened(wide, {}, "full_attention with heads of 24, and the target has heads of 16")
        lacking = {name: one for name, one in tensors.items() if name != "pre_projection.weight"}
        opened(tmp_path / "one", lacking, "lacks weights of its layers: pre_projection.weight")
        narrow = tensors | {"pre_projection.weight": torch.zeros(24, 60)}
        opened(tmp_path / "one", narrow, r"has, of \[24, 60\] and not \[24, 64\], weights")
        broken = tensors | {"pre_projection.weight": torch.full((24, 64), torch.nan)}
        opened(tmp_path / "one", broken, "numbers of `pre_projection.weight` are NaN or infinite")
        twice = tensors | {ordering: torch.zeros(32, dtype=torch.long)}
        opened(tmp_path / "one", twice, "does not have each id once")
        assert not engine._heads
        assert isinstance(drafter(engine, assistant_dir), Recording)
