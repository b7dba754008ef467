"""The heads that checkpoints have for tokens after the next: drafts as transformers' own layers give them."""

import copy
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import LOOPS
from heads import copy_with_mtp, some
from safetensors.torch import load_file, save_file
from shared import shared_engine
from test_eagle import SAMPLED, answer, drafter, expected, make_requests
from tiny import make_model, repetitive_prompt
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from runtime.drafters.heads.head_config import has_mtp_head, is_head, read_head
from runtime.drafters.heads.mtp_head import check_mtp_is_trained, layers_of_mtp, load_mtp
from runtime.engine.engine import Engine
from runtime.training.new_head import write_mtp
from runtime.training.unrolled import Rows, Schedule, Trainer, accepted_lengths, have_unrolled_attention
from runtime.util.errors import SpecDecError, SpecDecWarning

OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
OF_MIMO = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
Forward = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(n,) ids and (n, hidden) states before them -> (n, hidden) outputs and (n, vocab) logits."""


_BESIDE_LAYER: dict[str, tuple[str, ...]] = {
    "ernie4_5": tuple(f"model.mtp_{name}.0" for name in ("linear_proj", "emb_norm", "hidden_norm")),
    "mimo_v2_flash": tuple(f"model.mtp.layers.0.{name}" for name in ("eh_proj", "enorm", "hnorm", "final_layernorm")),
    "qwen2": tuple(f"model.mtp_layers.0.{name}" for name in OF_MIMO),
    "nemotron_h": tuple(f"mtp.layers.{name}" for name in ("0.eh_proj", "0.enorm", "0.hnorm", "1.final_layernorm")),
}
"""Names of a head's projection, of its norms of embeddings and states, and of that behind its layer, if it has one."""
_BESIDE_QWENS = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")


def beside_layer(model: PreTrainedModel) -> tuple[str, ...]:
    return _BESIDE_LAYER.get(model.config.model_type, _BESIDE_QWENS)


def save_with_head(directory: Path, family: str, **settings: Any) -> PreTrainedModel:
    """Save a model whose last layer is its head's, as published; returns it with all its layers."""
    if family == "deepseek-v3":
        return save_deepseek(directory, 1)
    model = make_model(family, **settings)
    model.save_pretrained(directory)
    tensors, config = load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())
    last = model.config.num_hidden_layers - 1
    cut_layers(config, last)
    size, generator, names = model.config.hidden_size, torch.Generator().manual_seed(0), beside_layer(model)
    proj = 0.3 * torch.randn(size, 2 * size, generator=generator)
    norms = [1 + 0.2 * torch.randn(size, generator=generator) for _ in names[1:]]
    if family == "ernie4_5":
        tensors = {name.replace(f"model.layers.{last}.", "model.mtp_block.0."): one for name, one in tensors.items()}
        config["num_nextn_predict_layers"] = 1
    elif family == "mimo-v2-flash":  # whose config says nothing, and of whose layers the first drafts
        own = {name: one for name, one in tensors.items() if name.startswith(f"model.layers.{last}.")}
        tensors = {name: one for name, one in tensors.items() if name not in own}
        for name, one in own.items():
            part = name.removeprefix(f"model.layers.{last}.").replace("post_attention_", "pre_mlp_")
            tensors |= {f"model.mtp.layers.0.{part}": one, f"model.mtp.layers.1.{part}": torch.zeros_like(one)}
    elif family == "qwen2":  # MiMo 7B, whose code is its own
        own = f"model.layers.{last}."
        tensors = {name.replace(own, "model.mtp_layers.0."): one for name, one in tensors.items()}
        config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
        config |= {"auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}, "use_mrope": False}
    elif family == "nemotron-h":
        for i in (last - 1, last):
            own = re.compile(rf"^(backbone|model)\.layers\.{i}\.")
            tensors = {own.sub(f"mtp.layers.{i - last + 1}.", name): one for name, one in tensors.items()}
        key = next(key for key in ("layers_block_type", "layer_types") if key in config)
        config |= {"num_nextn_predict_layers": 1, "mtp_layers_block_type": config[key][-2:]}
        config |= {key: config[key][:-2], "num_hidden_layers": last - 1}
    else:
        tensors = {name.replace(f"model.layers.{last}.", "mtp.layers.0."): one for name, one in tensors.items()}
        config["mtp_num_hidden_layers"] = 1
    tensors |= {f"{name}.weight": tensor for name, tensor in zip(names, [proj, *norms], strict=True)}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return model


def cut_layers(config: dict[str, Any], num_layers: int) -> None:
    config["num_hidden_layers"] = num_layers
    for key in ("layer_types", "mlp_layer_types"):
        if config.get(key):
            config[key] = config[key][:num_layers]


def save_deepseek(directory: Path, num_layers: int) -> PreTrainedModel:
    """Save a DeepSeek V3 of two layers with a head of so many; returns it with all its layers."""
    model = make_model("deepseek-v3", num_hidden_layers=2 + num_layers)
    model.save_pretrained(directory)
    tensors, config = load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())
    cut_layers(config, 2)
    config["num_nextn_predict_layers"] = num_layers
    size, generator = model.config.hidden_size, torch.Generator().manual_seed(0)
    for i in range(2, 2 + num_layers):
        tensors[f"model.layers.{i}.eh_proj.weight"] = 0.3 * torch.randn(size, 2 * size, generator=generator)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"model.layers.{i}.{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)
        tensors[f"model.layers.{i}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return model


def save_with_layers(directory: Path, num_layers: int) -> PreTrainedModel:
    """Save a DeepSeek V3 with a head of several layers; returns the model that has the head's modules by name."""
    save_deepseek(directory, num_layers)
    target: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{i}.*" for i in range(2, 2 + num_layers)]
    return target.eval()


def test_several_layers(tmp_path: Path, make_engine: Any) -> None:
    """Drafts are those of transformers' `MtpModel` over the whole text, as long as there are layers."""
    num_layers = 2
    target = save_with_layers(tmp_path, num_layers)
    head = MtpModel.from_pretrained(target)
    assert read_head(tmp_path).num_layers == num_layers and has_mtp_head(tmp_path) and not is_head(tmp_path)
    engine = make_engine(target, hidden_states=(2,))
    mtp = drafter(engine, tmp_path)
    assert answer(engine, "orchestrator", make_requests(), mtp) == expected(target)
    assert sum(len(draft) for _, draft in mtp.seen) >= 50
    for tokens, draft in some(mtp.seen):
        ids, positions = torch.tensor([tokens[1:]]), torch.arange(1, len(tokens))[None]
        with torch.no_grad():
            states = target.get_decoder()(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state
            theirs = head(ids, states, None, positions, None)[0][0].tolist()
        assert len(draft) <= num_layers and draft == theirs[: len(draft)], tokens
    engine.clear_cache()
    drafted = answer(engine, "orchestrator", make_requests(SAMPLED), mtp)
    engine.clear_cache()
    assert drafted == answer(engine, "orchestrator", make_requests(SAMPLED), None)


def test_a_training_goes_through_all_layers(tmp_path: Path) -> None:
    """Layer k learns token k of drafts, from what layer k - 1 made of the token before."""
    directory, written = tmp_path / "model", tmp_path / "head"
    written.mkdir()
    target = save_with_layers(directory, 2)
    theirs = MtpModel.from_pretrained(target)
    embedding = target.get_input_embeddings().weight.detach()

    @torch.no_grad()
    def draft(tokens: list[int], states: Tensor) -> list[int]:
        ids, positions = torch.tensor([tokens[1:]]), torch.arange(1, len(tokens))[None]
        found: list[int] = theirs(ids, states[None], None, positions, None)[0][0].tolist()
        return found

    check_mtp_is_trained(read_head(directory))
    head = have_unrolled_attention(load_mtp(read_head(directory), embedding, torch.float32))
    assert_counted_as_drafted(head, target, draft)
    text = repetitive_prompt(0, 12)
    assert_trained(directory, target, [rows_of(text, states_of(target, text))], written)


def by_transformers(directory: Path, target: PreTrainedModel) -> Forward:
    """Transformers' own module, loaded by transformers, which knows only the numbers of layers that were published."""
    target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{target.config.num_hidden_layers}.*"]
    head = MtpModel.from_pretrained(target)

    def forward(ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(1, len(ids) + 1)[None]
        outputs = head.forward_layer(0, states[None], positions, None, input_ids=ids[None])[0]
        return outputs, target.lm_head(outputs)

    return forward


def by_layers(directory: Path, target: PreTrainedModel, whole: PreTrainedModel) -> Forward:
    """Its layer in the model that has it as its last one, and the formula of vLLM's `qwen3_5_mtp`."""
    tensors, model = load_file(directory / "model.safetensors"), whole.model
    names, is_nemotron = beside_layer(whole), whole.config.model_type == "nemotron_h"
    window = whole.config.sliding_window if whole.config.model_type == "mimo_v2_flash" else 10**6
    norms: list[nn.Module] = []
    for name in names[1:]:
        norm = copy.deepcopy(model.norm_f if is_nemotron else model.norm)
        norm.weight.data = tensors[f"{name}.weight"]
        norms.append(norm)
    if len(norms) < 3:  # Ernie's has none behind the layer
        norms.append(nn.Identity())

    def forward(ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        n = len(ids)
        embedded = target.get_input_embeddings()(ids)
        both = [norms[0](embedded), norms[1](states)]
        both = both[::-1] if whole.config.model_type == "qwen2" else both
        hidden = torch.cat(both, -1) @ tensors[f"{names[0]}.weight"].T
        positions = torch.arange(1, n + 1)[None]
        distance = torch.arange(n)[:, None] - torch.arange(n)
        mask = torch.zeros(n, n).masked_fill((distance < 0) | (distance >= window), -torch.inf)[None, None]
        if is_nemotron:
            outputs = norms[2](model.layers[-1](model.layers[-2](hidden[None], attention_mask=mask)))[0]
            return outputs, target.lm_head(outputs)
        kind = ("sliding_attention",) if window < 10**6 else ()
        rotary = model.rotary_emb(hidden[None], positions, *kind)
        outputs = model.layers[-1](hidden[None], position_embeddings=rotary, attention_mask=mask)
        outputs = norms[2](outputs[0] if isinstance(outputs, tuple) else outputs)[0]
        return outputs, target.lm_head(outputs)

    return forward


_SLOW = {"qwen3-next", "ernie4_5", "qwen2", "nemotron-h", "mimo-v2-flash"}  # the first one's head is as Qwen3.5's
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek-v3": {},
    "qwen3.5": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
    },
    "ernie4_5": {"num_hidden_layers": 4},
    "qwen2": {"num_hidden_layers": 3},
    "mimo-v2-flash": {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    },
    "nemotron-h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "full_attention", "moe"]},
    "qwen3-next": {
        "num_hidden_layers": 5,
        "layer_types": ["linear_attention", "full_attention"] * 2 + ["full_attention"],
    },
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if name in _SLOW else ()) for name in FAMILIES],
)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory: Path = tmp_path_factory.mktemp(request.param)
    return directory, save_with_head(directory, request.param, **FAMILIES[request.param])


@pytest.fixture(scope="module")
def target(published: tuple[Path, PreTrainedModel]) -> PreTrainedModel:
    directory, whole = published
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, config=config_of(directory, whole), dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def config_of(directory: Path, whole: PreTrainedModel) -> PreTrainedConfig:
    """The config in the directory; transformers does not know MiMo's type."""
    config, kind = json.loads((directory / "config.json").read_text()), whole.config.model_type
    return type(whole.config).from_dict(PreTrainedConfig._decode_special_floats(config) | {"model_type": kind})


@pytest.fixture(scope="module")
def forward(published: tuple[Path, PreTrainedModel], target: PreTrainedModel) -> Forward:
    directory, whole = published
    if whole.config.model_type == "deepseek_v3":
        return by_transformers(directory, target)
    return by_layers(directory, target, whole)


def reference_drafts(forward: Forward, tokens: list[int], states: Tensor, length: int) -> list[int]:
    """Greedy draft, which goes on from the head's own outputs."""
    ids, draft = torch.tensor(tokens[1:]), list[int]()
    with torch.no_grad():
        for _ in range(length):
            outputs, logits = forward(ids, states)
            draft.append(int(logits[-1].argmax()))
            ids = torch.cat([ids, torch.tensor(draft[-1:])])
            states = torch.cat([states, outputs[-1:]])
    return draft


@pytest.mark.one_in(4)
@pytest.mark.parametrize("loop", LOOPS)
def test_drafts_are_transformers(
    loop: str, published: tuple[Path, PreTrainedModel], target: PreTrainedModel, forward: Forward, make_engine: Any
) -> None:
    engine = make_engine(
        target, hidden_states=(target.config.num_hidden_layers,), compiler="aot" if loop == "leader" else "none"
    )
    mtp = drafter(engine, published[0])
    assert answer(engine, loop, make_requests(), mtp) == expected(target)
    assert sum(len(draft) for _, draft in mtp.seen) >= 80
    for tokens, draft in some(mtp.seen):
        with torch.no_grad():
            states = target.get_decoder()(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state[0]
        assert draft == reference_drafts(forward, tokens, states, len(draft)), tokens
    has_experts = any("experts" in name for name, _ in mtp.head.named_parameters())
    assert (mtp.head.program is not None) == (loop == "leader" and not has_experts)


Draft = Callable[[list[int], Tensor], list[int]]
"""The reference's draft behind a text with the target's (n - 1, hidden) states."""


def assert_counted_as_drafted(head: Any, target: PreTrainedModel, draft: Draft) -> None:
    longest, counts = len(draft([1, 2, 3], torch.zeros(2, head.config.hidden_size))), Counter[int]()
    for text in texts_for(target, draft):
        states = states_of(target, text)
        found = accepted_lengths(head, rows_of(text, states), longest)
        for last in range(1, len(text) - longest):
            agree = [a == b for a, b in zip(draft(text[: last + 1], states[:last]), text[last + 1 :], strict=False)]
            assert int(found[0, last - 1]) == [*agree, False].index(False), last
            counts[int(found[0, last - 1])] += 1
    assert all(counts[length] for length in range(longest + 1)), counts


def texts_for(target: PreTrainedModel, draft: Draft) -> Iterator[list[int]]:
    """Yield texts that go on for a while as the head drafts, and then otherwise."""
    for seed in range(2):
        text = repetitive_prompt(seed, 4)
        for i in range(5):
            drafted = draft(text, states_of(target, text[:-1]))
            text = [*text, *drafted[: (seed + i) % (len(drafted) + 1)], (text[-1] + 1 + i) % 32]
        yield text


@torch.no_grad()
def states_of(target: PreTrainedModel, text: list[int]) -> Tensor:
    states: Tensor = target.get_decoder()(torch.tensor([text]), use_cache=False).last_hidden_state[0]
    return states


def rows_of(text: list[int], states: Tensor) -> Rows:
    """A text that is all output, of which the target was sure."""
    tokens = torch.tensor([text])
    return Rows(tokens, states[None], tokens[..., None], torch.ones(1, len(text), 1), tokens >= 0)


def of_head(directory: Path, number: int) -> dict[str, Tensor]:
    """The head's tensors, if need be those of layer `number` and behind it; of MiMo's layers one drafts."""
    tensors = load_file(directory / "model.safetensors").items()
    is_mimo = "mimo" in json.loads((directory / "config.json").read_text())["model_type"]
    return {
        name: one
        for name, one in tensors
        if ("mtp" in name or int((re.findall(r"layers.([0-9]+)", name) or [-1])[0]) >= number)
        and not (is_mimo and "mtp.layers.1." in name)
    }


def test_a_training_counts_what_is_drafted(
    published: tuple[Path, PreTrainedModel], target: PreTrainedModel, forward: Forward, tmp_path: Path
) -> None:
    """And writes the head as it was published."""
    directory, embedding = published[0], target.get_input_embeddings().weight.detach()
    check_mtp_is_trained(read_head(directory))
    write_mtp(tmp_path, load_mtp(read_head(directory), embedding, torch.float32), torch.float32)
    theirs, ours = (of_head(one, target.config.num_hidden_layers) for one in (directory, tmp_path))
    assert ours.keys() == theirs.keys() and len(ours) > 10
    assert all(torch.equal(one, theirs[name]) for name, one in ours.items())
    head = have_unrolled_attention(load_mtp(read_head(tmp_path), embedding, torch.float32))
    assert_counted_as_drafted(head, target, lambda tokens, states: reference_drafts(forward, tokens, states, 3))


def assert_trained(
    directory: Path, target: PreTrainedModel, texts: list[Rows], written: Path, *, autocast: bool = False
) -> None:
    """A head learns these texts, and is written by the names of the one in the directory, in the same shapes."""
    embedding = target.get_input_embeddings().weight.detach()
    head = have_unrolled_attention(load_mtp(read_head(directory), embedding, torch.float32))
    longest = head.longest_draft or 2
    trainer = Trainer(head, Schedule(8, 2e-2, longest, 0), lambda step: texts[step % len(texts)], autocast=autocast)
    before = {name: one.detach().clone() for name, one in head.named_parameters() if one.requires_grad}
    lengths = [int(sum(accepted_lengths(head, rows, longest).sum() for rows in texts))]
    losses = []
    while not trainer.is_done:
        sums = trainer.train_step()
        losses.append(sums.loss[0] + sums.loss[1])
        if trainer.step == 1:
            grads = {name: one.grad for name, one in head.named_parameters() if one.requires_grad}
            assert all(one is not None and bool(one.any()) for one in grads.values())
    assert losses[-1] < 0.9 * losses[0]
    assert all(not torch.equal(one, before[name]) for name, one in head.named_parameters() if name in before)
    lengths.append(int(sum(accepted_lengths(head, rows, longest).sum() for rows in texts)))
    assert lengths[1] > lengths[0]
    write_mtp(written, head, torch.float32)
    again = have_unrolled_attention(load_mtp(read_head(written), embedding, torch.float32))
    assert int(sum(accepted_lengths(again, rows, longest).sum() for rows in texts)) == lengths[1]
    number = target.config.num_hidden_layers
    theirs, ours = of_head(directory, number), of_head(written, number)
    assert {name: one.shape for name, one in ours.items()} == {
        name: one.shape for name, one in theirs.items() if not name.endswith("weight_scale_inv")
    }
    kept = {name for name, one in ours.items() if torch.equal(one.float(), theirs[name].float())}
    assert all("correction_bias" in name or "embed_tokens" in name for name in kept), kept


@pytest.mark.one_in(2)
def test_a_quantized_head_is_trained(
    published: tuple[Path, PreTrainedModel], target: PreTrainedModel, tmp_path: Path
) -> None:
    """It learns as the numbers that are meant, and is written as such."""
    directories = [tmp_path / name for name in ("quantized", "meant", "head", "again")]
    quantized, meant, head, again = directories
    config = json.loads((published[0] / "config.json").read_text())
    tensors, own = load_file(published[0] / "model.safetensors"), of_head(published[0], target.config.num_hidden_layers)
    changed, numbers = dict[str, Tensor](), dict[str, Tensor]()
    own |= {name: one for name, one in tensors.items() if name == "lm_head.weight"}
    for name, one in own.items():
        if one.dim() == 2 and ".gate.weight" not in name and "embed_tokens" not in name:
            scale = one.abs().max() / 448
            values = (one / scale).to(torch.float8_e4m3fn)
            changed |= {name: values, name.replace(".weight", ".weight_scale_inv"): scale.view(1)}
            numbers[name] = values.float() * scale
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None}
    for directory, these, extra in ((quantized, changed, {"quantization_config": said}), (meant, numbers, {})):
        directory.mkdir()
        save_file(tensors | these, directory / "model.safetensors", {"format": "pt"})
        (directory / "config.json").write_text(json.dumps(config | extra))
    check_mtp_is_trained(read_head(quantized))
    text = repetitive_prompt(0, 12)
    texts = [rows_of(text, states_of(target, text))]
    for directory, into in ((quantized, head), (meant, again)):
        into.mkdir()
        assert_trained(directory, target, texts, into)
    learned, wanted = (load_file(one / "model.safetensors") for one in (head, again))
    assert learned.keys() == wanted.keys()
    for name, one in learned.items():
        torch.testing.assert_close(one, wanted[name], atol=1e-3, rtol=1e-3)
    assert "quantization_config" not in json.loads((head / "config.json").read_text())


def test_experts_that_are_one_tensor_stay_one(tmp_path: Path) -> None:
    """Some Qwen3.5 are published so; the weights are those of experts by themselves."""
    apart, fused, written = (tmp_path / name for name in ("apart", "fused", "written"))
    save_with_head(apart, "qwen3-next", **FAMILIES["qwen3-next"])
    shutil.copytree(apart, fused)
    tensors, prefix = load_file(fused / "model.safetensors"), "mtp.layers.0.mlp.experts."
    own = {name: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    parts = {part: torch.stack([own[f"{prefix}{i}.{part}.weight"] for i in range(8)]) for part in OF_EXPERTS}
    tensors[f"{prefix}gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], 1)
    tensors[f"{prefix}down_proj"] = parts["down_proj"]
    save_file(tensors, fused / "model.safetensors", {"format": "pt"})
    check_mtp_is_trained(read_head(fused))
    heads = [load_mtp(read_head(one), None, torch.float32) for one in (apart, fused)]
    for one, other in zip(*(head.parameters() for head in heads), strict=True):
        assert torch.equal(one, other)
    written.mkdir()
    write_mtp(written, heads[1], torch.float32)
    ours = load_file(written / "model.safetensors")
    assert {name for name in tensors if name.startswith("mtp.")} == {name for name in ours if name.startswith("mtp.")}
    assert all(torch.equal(one, tensors[name]) for name, one in ours.items())


def test_mimo_is_qwen2_with_a_head(shared: Path, tmp_path: Path) -> None:
    """MiMo 7B is published with code of its own, which transformers does not have."""
    whole = save_with_head(tmp_path, "qwen2", num_hidden_layers=3)
    with pytest.warns(SpecDecWarning) as said:
        engine_dir = shared_engine(shared / "engines", tmp_path, hidden_states=(2,))
    assert ["(MTP) are no part" in str(one.message) for one in said] == [True]
    target = type(whole).from_pretrained(tmp_path, config=config_of(tmp_path, whole), dtype=torch.float32).eval()
    with Engine.open(engine_dir) as engine:
        mtp = drafter(engine, tmp_path)
        assert answer(engine, "leader", make_requests(), mtp) == expected(target)
        assert sum(len(draft) for _, draft in mtp.seen) > 20


def test_weights_that_are_no_numbers_are_named(published: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    directory, tensors = tmp_path / "head", load_file(published[0] / "model.safetensors")
    shutil.copytree(published[0], directory)
    number = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    for name in (next(one for one in of_head(directory, number) if one.endswith("o_proj.weight")), "lm_head.weight"):
        if name not in tensors:
            continue  # the embeddings are its output layer
        broken = tensors[name].clone()
        broken[0, 1] = torch.nan
        save_file(tensors | {name: broken}, directory / "model.safetensors", {"format": "pt"})
        with pytest.raises(SpecDecError, match=rf"1 of [0-9,]+ numbers of `{re.escape(name)}` are NaN"):
            load_mtp(read_head(directory), None, torch.float32)


def test_a_head_of_another_model_drafts_for_none(
    published: tuple[Path, PreTrainedModel], target: PreTrainedModel, tmp_path: Path
) -> None:
    """It is told by the embeddings, which a head that was trained further has in common with its target."""
    config, embeddings = read_head(published[0]), target.get_input_embeddings().weight.detach()
    load_mtp(config, embeddings + 0.1 * embeddings.std() * torch.randn_like(embeddings), torch.float32)
    with pytest.raises(SpecDecError, match="another model, `.*embed.*` differs from the target's"):
        load_mtp(config, embeddings.roll(1, 0), torch.float32)


def test_missing_weights_are_named_as_the_file_would(published: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    """Each of them, before the layer and in it, one of an expert too."""
    directory, tensors = tmp_path / "head", load_file(published[0] / "model.safetensors")
    shutil.copytree(published[0], directory)
    number = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    left_out = ("_bias", "embed_tokens.weight")
    names = [n for n in of_head(directory, number) if not n.endswith(left_out)]
    for name in names[::4]:
        save_file({n: one for n, one in tensors.items() if n != name}, directory / "model.safetensors")
        with pytest.raises(SpecDecError, match=rf"lacks 1 of its weights, such as {re.escape(name)}: "):
            load_mtp(read_head(directory), None, torch.float32)
    assert len(names) > 8


def test_a_model_packed_without_its_head(
    published: tuple[Path, PreTrainedModel], target: PreTrainedModel, tmp_path: Path, make_engine: Any
) -> None:
    target.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = make_engine(target, hidden_states=(target.config.num_hidden_layers,))
    with pytest.raises(SpecDecError, match="have no MTP head"):
        drafter(engine, tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"num_nextn_predict_layers": 2, "mtp_num_hidden_layers": 2})
    )
    with pytest.raises(SpecDecError, match="one projection for its 2 layers is not supported"):
        read_head(tmp_path)
    assert not engine._heads


def test_a_head_that_is_listed_twice_is_one_head(tmp_path: Path) -> None:
    """A config says it by two keys, or outside and inside; where an index lies beside one file, the file counts."""
    make_model("llama").save_pretrained(tmp_path / "model")
    model = copy_with_mtp(tmp_path / "model", tmp_path / "mtp")
    config = json.loads((model / "config.json").read_text())
    for again in ({"num_nextn_predict_layers": 1}, {"text_config": config}):
        (model / "config.json").write_text(json.dumps(config | again))
        assert has_mtp_head(model) and read_head(model).num_layers == 1
    index = json.dumps({"weight_map": {"mtp.fc.weight": "model-00001-of-00001.safetensors"}})
    for directory, has_head in ((model, True), (tmp_path / "model", False)):
        (directory / "config.json").write_text(json.dumps(config))
        (directory / "model.safetensors.index.json").write_text(index)
        assert has_mtp_head(directory) == has_head


def test_head_keeps_its_routers_bias_in_float32(tmp_path: Path) -> None:
    """The layers behind a DeepSeek V3 that predict the tokens after the next."""
    save_with_layers(tmp_path / "model", num_layers := 2)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    names = [f"model.layers.{2 + i}.mlp.gate.e_score_correction_bias" for i in range(num_layers)]
    for name in names:
        tensors[name] = 8 + 0.02 * torch.randn(tensors[name].shape)
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    head = load_mtp(read_head(tmp_path / "model"), None, torch.bfloat16)
    for name, layer in zip(names, layers_of_mtp(head), strict=True):
        bias = layer.step.model.state_dict()["model.layers.0.mlp.gate.e_score_correction_bias"]
        assert bias.dtype == torch.float32 and torch.equal(bias, tensors[name])
        assert next(layer.decoder.parameters()).dtype == torch.bfloat16
