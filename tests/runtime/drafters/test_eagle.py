"""A trained drafter drafts what its formula says, changes no token, and is found again with the target's own K/V."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import outputs, run
from heads import Eagle, eagle_drafts, eagle_logits, hidden_states, make_eagle, save_eagle, some
from safetensors.torch import load_file
from sentences import Said
from tiny import hf_greedy, make_model, repetitive_prompt
from torch import Tensor
from transformers import PreTrainedModel

from runtime.checkpoint.config import DraftOutput
from runtime.checkpoint.quant.weight import take_quantized
from runtime.core.batch import Row
from runtime.core.params import SamplingConfig
from runtime.core.request import Draft, Request, Sequence
from runtime.drafters.head_draft import HeadDraft, open_head
from runtime.drafters.heads.head_config import is_head, read_head
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.util.errors import SpecDecError

DRAFT_LEN, NUM_NEW_TOKENS = 4, 16
STATES = (2, 3, 3)
PROMPTS = [tuple(repetitive_prompt(i, 6 + 5 * i)) for i in (0, 2, 4)]
GREEDY = SamplingConfig()
SAMPLED = SamplingConfig(temperature=0.9, top_k=0, top_p=0.95, random_seed=5)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("llama", num_hidden_layers=6)


@pytest.fixture(scope="module")
def engine_dir(model: PreTrainedModel, make_engine_dir: Any) -> Path:
    directory: Path = make_engine_dir(model, hidden_states=STATES)
    return directory


@pytest.fixture(scope="module")
def head(model: PreTrainedModel) -> Eagle:
    return make_eagle(model, draft_vocab=20)


@pytest.fixture(scope="module")
def head_dir(head: Eagle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_eagle(head, tmp_path_factory.mktemp("head"), "sailab")


@pytest.fixture
def engine(engine_dir: Path) -> Iterator[Engine]:
    with Engine.open(engine_dir) as opened:
        yield opened


SMALL: dict[str, Any] = {"kv_cache": KVCacheConfig(max_tokens=84), "max_num_tokens": 8}
"""Room for two of the three requests; a prompt of 26 tokens is computed eight at a time, by the head too."""


@pytest.fixture
def small_engine(engine_dir: Path) -> Iterator[Engine]:
    with Engine.open(engine_dir, **SMALL) as opened:
        yield opened


class Recording(HeadDraft):
    """Keeps what it proposed, and for which tokens."""

    seen: list[tuple[list[int], list[int]]]
    drafts: list[Draft]

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        drafts = super().propose(sequences, max_draft_len)
        self.seen += [(list(s.tokens), d.tokens) for s, d in zip(sequences, drafts, strict=True) if d.tokens]
        self.drafts += drafts
        return drafts


def drafter(engine: Engine, directory: Path, *, use_logits: bool = False) -> Recording:
    head, cache = open_head(engine, read_head(directory))
    made = Recording(engine, head, cache, use_logits=use_logits)
    made.seen, made.drafts = [], []
    return made


def make_requests(sampling: SamplingConfig = GREEDY) -> list[Request]:
    return [Request(i, prompt, NUM_NEW_TOKENS, sampling=sampling) for i, prompt in enumerate(PROMPTS)]


def answer(engine: Engine, loop: str, requests: list[Request], drafter: Any) -> list[list[int]]:
    return outputs(run(engine, loop, requests, drafter, DRAFT_LEN))


def check_drafts(seen: list[tuple[list[int], list[int]]], head: Eagle, model: PreTrainedModel, least: int) -> None:
    assert sum(len(draft) for _, draft in seen) >= least
    longest: list[tuple[list[int], Tensor]] = []
    for tokens, draft in some(seen):
        states = next((states for text, states in longest if text[: len(tokens)] == tokens), None)
        if states is None:
            states = hidden_states(model, tokens, head.states)
            longest.append((tokens, states))
        assert draft == eagle_drafts(head, model, tokens, len(draft), states[: len(tokens) - 1]), tokens


def expected(model: PreTrainedModel) -> list[list[int]]:
    return [hf_greedy(model, list(prompt), NUM_NEW_TOKENS) for prompt in PROMPTS]


def test_drafts_are_the_formulas_and_output_hugging_faces(
    model: PreTrainedModel, head: Eagle, head_dir: Path, make_engine: Any
) -> None:
    """Compiled; the drafts of heads that are not are checked below."""
    engine = make_engine(model, hidden_states=STATES, compiler="aot")
    eagle = drafter(engine, head_dir)
    assert answer(engine, "orchestrator", make_requests(), eagle) == expected(model)
    check_drafts(eagle.seen, head, model, 80)
    assert eagle.head.program is not None


# Name -> (how the head is made, how it is saved).
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "as SafeAILab, no rope_theta": ({"theta": 10000.0}, "sailab"),
    "as SpecForge": ({"draft_vocab": 20, "states": (1, 3, 5)}, "specforge"),
    "as speculators": ({"draft_vocab": 20, "states": (2, 3, 3)}, "speculators"),
    "norm before the residual": ({"flags": ["norm_before_residual"]}, "speculators"),
    "norm before fc": ({"flags": ["norm_before_fc"]}, "specforge"),
    "EAGLE 3.1": ({"flags": ["fc_norm", "norm_output", "norm_before_residual"]}, "speculators"),
    "Qwen3's layer": ({"model_type": "qwen3"}, "speculators"),
    "window": ({"model_type": "qwen3", "window": 6}, "speculators"),
    "two layers": ({"num_layers": 2}, "speculators"),
    "width of its own": ({"hidden": 48, "own_embedding": True}, "speculators"),
    "own embeddings, scaled logits": ({"own_embedding": True, "scale": 0.5}, "speculators"),
    "four states": ({"states": (1, 2, 3, 4)}, "specforge"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, model: PreTrainedModel, tmp_path: Path, make_engine: Any) -> None:
    settings, saved_as = FORMS[form]
    head = make_eagle(model, **settings)
    changes = {"target_hidden_size": 32} if head.hidden != 32 else {}
    directory = save_eagle(head, tmp_path, saved_as, **changes)
    engine = make_engine(model, hidden_states=head.states)
    eagle = drafter(engine, directory)
    assert answer(engine, "leader", make_requests(), eagle) == expected(model)
    check_drafts(eagle.seen, head, model, 80)
    assert eagle.head.program is None


def test_what_it_never_drafts_has_no_probability(engine: Engine, head: Eagle, head_dir: Path) -> None:
    eagle = drafter(engine, head_dir, use_logits=True)
    answer(engine, "leader", make_requests(replace(SAMPLED, top_p=1.0)), eagle)  # which cuts no other id
    drafts = eagle.drafts
    assert sum(len(draft.tokens) for draft in drafts) > 80
    others = [i for i in range(head.vocab) if i not in head.ids.tolist()]
    for draft in drafts:
        if draft.tokens:
            assert draft.probs is not None and draft.probs[:, others].count_nonzero() == 0
            assert draft.probs.gather(1, torch.tensor(draft.tokens)[:, None]).min() > 0


IDS = tuple(i for i in range(32) if i % 3)


def with_output(head: Eagle, ids: Seq[int], weight: Tensor) -> Eagle:
    """The head as if it was published with these ids alone, and these (ids, hidden) weights for them."""
    own = torch.tensor(ids)
    return replace(head, tensors=head.tensors | {"lm_head.weight": weight, "d2t": own - torch.arange(len(own))})


@pytest.mark.parametrize(
    ("compiler", "qformat", "ids", "own_ids"),
    [
        ("none", "int8", IDS, None),
        pytest.param("aot", "int4", (), None, marks=pytest.mark.slow),
        pytest.param("aot", "int4", IDS, 20, marks=pytest.mark.slow),
    ],
)
def test_quantized_output_layer(
    compiler: str, qformat: Any, ids: tuple[int, ...], own_ids: int | None,
    model: PreTrainedModel, tmp_path: Path, make_engine: Any,
) -> None:  # fmt: skip
    """Tokens are quantized to 8 bits too, so that of two candidates that are nearly equal either may come."""
    head = make_eagle(model, draft_vocab=own_ids)
    directory = save_eagle(head, tmp_path / "head", "sailab")
    build = {"hidden_states": STATES, "draft_output": DraftOutput(qformat, len(ids) or None), "draft_ids": ids}
    engine = make_engine(model, compiler=compiler, head_dir=directory, **build)
    eagle = drafter(engine, directory)
    assert answer(engine, "leader", make_requests(), eagle) == expected(model)
    kept = {
        name.rpartition(".")[2]: one for name, one in load_file(engine.directory / "head_output.safetensors").items()
    }
    values = kept["weight_values"]
    if qformat == "int4":
        values = torch.stack((values & 15, values >> 4), -1).flatten(1).to(torch.int8) - 8
    weight = values.double() * kept["weight_scales"].double().repeat_interleave(32 // kept["weight_scales"].shape[1], 1)
    own = list(ids) if own_ids is None and ids else head.ids.tolist()
    torch.testing.assert_close(
        weight, head.tensors["lm_head.weight"][list(ids) if own_ids is None and ids else slice(None)].double(),
        atol={"int4": 0.12, "int8": 0.01}[qformat], rtol=0,
    )  # fmt: skip
    reference = with_output(head, own, weight)
    num_drafted = num_equal = 0
    for tokens, draft in eagle.seen:
        states = hidden_states(model, tokens, head.states)[: len(tokens) - 1]
        logits = eagle_logits(reference, model, [*tokens, *draft], len(tokens) - 1, len(draft), states)
        for token, row in zip(draft, logits, strict=True):
            assert row.max() - row[token] < 0.02 * row[own].abs().max()
            num_drafted, num_equal = num_drafted + 1, num_equal + int(row.argmax() == token)
    assert num_drafted >= 80 and num_equal >= 0.98 * num_drafted
    packed = eagle.head.lm_head  # type: ignore[attr-defined]
    assert packed.out_features == len(own) if compiler == "none" else packed.num_outputs == len(own)


def test_quantized_layers(model: PreTrainedModel, tmp_path: Path, make_engine: Any, said: Said) -> None:
    """Drafts are those of the numbers that are kept, but where tokens in 8 bits make another one the likeliest."""
    head = make_eagle(model)
    directory = save_eagle(head, tmp_path / "head", "sailab")
    build = {"hidden_states": STATES, "draft_output": DraftOutput(layers="int4"), "head_dir": directory}
    engine = make_engine(model, **build)
    eagle = drafter(engine, directory)
    assert answer(engine, "leader", make_requests(), eagle) == expected(model)
    kept = take_quantized(load_file(engine.directory / "head_output.safetensors"))
    meant = {f"{name.partition('.')[2]}.weight": one.dequantize() for name, one in kept.items()}
    in_bits = {name for name, one in head.tensors.items() if one.dim() == 2 and not name.startswith(("lm_", "embed_"))}
    assert meant.keys() == in_bits
    num_equal, states_of = [], [hidden_states(model, tokens, STATES)[:-1] for tokens, _ in eagle.seen[::2]]
    for reference in (head, replace(head, tensors=head.tensors | meant)):
        drafts = (
            draft == eagle_drafts(reference, model, tokens, len(draft), states)
            for (tokens, draft), states in zip(eagle.seen[::2], states_of, strict=True)
        )
        num_equal.append(sum(drafts))
    assert len(states_of) > 10 and num_equal[0] < 0.8 * len(states_of) <= num_equal[1], num_equal
    other = save_eagle(make_eagle(model, draft_vocab=20), tmp_path / "other", "sailab")
    with pytest.raises(SpecDecError) as refused:
        drafter(engine, other)
    said(refused, other)


def test_nothing_is_computed_twice(engine: Engine, model: PreTrainedModel, head: Eagle, head_dir: Path) -> None:
    """A second request finds the first's prompt, and a third what the first has answered; a fourth parts from it."""
    eagle = drafter(engine, head_dir)
    computed: list[int] = []
    compute = eagle._compute_known

    def counted(rows: list[Row]) -> Any:
        computed.extend(len(row.tokens) for row in rows)
        return compute(rows)

    eagle._compute_known = counted  # type: ignore[method-assign]
    prompt = PROMPTS[-1]
    (first,) = answer(engine, "leader", [Request(0, prompt, NUM_NEW_TOKENS)], eagle)
    # Each token after the first once: the last has no draft behind it.
    assert len(prompt) + NUM_NEW_TOKENS - 3 <= sum(computed) <= len(prompt) + NUM_NEW_TOKENS - 1
    for again, most in ((prompt, 1), ((*prompt, *first[:-4]), 4), ((*prompt, *first[:9], 5), 3)):
        computed.clear()
        answer(engine, "leader", [Request(1, tuple(again), 6)], eagle)
        assert 0 < sum(computed) <= most + 6
    check_drafts(eagle.seen, head, model, 50)


def test_it_catches_up_where_others_drafted(
    small_engine: Engine, model: PreTrainedModel, head: Eagle, head_dir: Path
) -> None:
    """Every other step has a draft of something else, and one of three none."""
    eagle = drafter(small_engine, head_dir)

    class Alternating:
        count = 0

        def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
            self.count += 1
            if self.count % 3 == 0:
                return eagle.propose(sequences, max_draft_len)
            return [Draft([7, 9, 7][: s.max_draft_len] if self.count % 3 == 1 else []) for s in sequences]

        def forget(self, request_id: int) -> None:
            eagle.forget(request_id)

    assert answer(small_engine, "leader", make_requests(), Alternating()) == expected(model)
    check_drafts(eagle.seen, head, model, 30)


def test_blocks_that_another_request_had_hold_its_own_numbers(
    engine_dir: Path, model: PreTrainedModel, head: Eagle, head_dir: Path
) -> None:
    """There are blocks for two requests, so that the third and the fourth get those of the first."""
    with Engine.open(engine_dir, kv_cache=KVCacheConfig(max_tokens=100), max_num_tokens=8) as engine:
        eagle = drafter(engine, head_dir)
        for i in range(1, 5):
            answer(engine, "leader", [Request(i, tuple(repetitive_prompt(i, 26)), 24)], eagle)
        check_drafts(eagle.seen, head, model, 60)


def test_numbers_that_are_none_change_nothing(engine: Engine, model: PreTrainedModel, head_dir: Path) -> None:
    eagle = drafter(engine, head_dir)
    eagle.head.fc.weight.fill_(torch.nan)  # type: ignore[attr-defined]
    assert answer(engine, "leader", make_requests(), eagle) == expected(model)


# Name -> (changes of its config, changes of its tensors, what is said).
BAD: dict[str, tuple[dict[str, Any], dict[str, Tensor], str]] = {
    "width": ({"hidden_size": 64}, {}, "hidden size of 64"),
    "vocabulary": ({"vocab_size": 64}, {}, "vocabulary of 64"),
    "layers": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 5, 6]}}, {}, "target has 6 layers"),
    "ids that are none": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "1"}}, {}, "is not a list of layers"),
    "other states": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, {}, "reads 1, 2, 3"),
    "last state": ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "last hidden state only"),
    "d2t": ({}, {"d2t": torch.arange(20)}, "outside the target's vocabulary of 32"),
    "d2t twice": ({}, {"d2t": -torch.arange(20)}, "names an id of the target twice"),
    "d2t of another size": ({}, {"d2t": torch.arange(3)}, "d2t` is int64 [3]"),
    "draft vocabulary": ({"draft_vocab_size": 21}, {}, "lm_head.weight is [20, 32]"),
    "layers that are not there": ({"num_hidden_layers": 2}, {}, "lacks 9 of its weights, such as layers.1"),
    "kind of layer": ({"model_type": "gpt2"}, {}, "cannot be made from its config.json"),
    "kind of head": ({"speculators_model_type": "dflash2"}, {}, "not supported, DFlash 2"),
    "no numbers": ({}, {"norm.weight": torch.full((32,), torch.nan)}, "32 of 32 numbers of `norm.weight` are NaN"),
    "fc": ({}, {"fc.weight": torch.zeros(32, 64)}, "fc.weight is [32, 64], and should be [32, 96] by its config"),
}


def test_bad_heads_are_one_sentence(engine: Engine, head: Eagle, tmp_path: Path) -> None:
    for case, (config, tensors, said) in BAD.items():
        directory = save_eagle(head, tmp_path / case, "sailab", tensors=tensors, **config)
        with pytest.raises(SpecDecError) as error:
            drafter(engine, directory)
        assert said in error.value.message and "\n" not in error.value.message
        assert error.value.hint and not engine._heads


def test_missing_weights(engine: Engine, head: Eagle, tmp_path: Path) -> None:
    lacking = replace(head, tensors={name: one for name, one in head.tensors.items() if "hidden_norm" not in name})
    for form, name in (("sailab", r"midlayer\.hidden_norm"), ("speculators", r"layers\.0\.hidden_norm")):
        with pytest.raises(SpecDecError, match=rf"lacks 1 of its weights, such as {name}"):
            drafter(engine, save_eagle(lacking, tmp_path / form, form))


def test_what_is_a_head(head: Eagle, model: PreTrainedModel, tmp_path: Path) -> None:
    for form in ("sailab", "specforge", "speculators"):
        assert is_head(save_eagle(head, tmp_path / form, form))
    assert read_head(tmp_path / "speculators").max_draft_len == 3
    model.save_pretrained(tmp_path / "model")
    assert not is_head(tmp_path / "model") and not is_head(tmp_path / "nothing")
    with pytest.raises(SpecDecError, match="not describe a trained drafter"):
        read_head(tmp_path / "model")
