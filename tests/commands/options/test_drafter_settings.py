"""Values of the speculation flags, and which part of them is wrong."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from sentences import Said

from commands.options.drafter_flags import DrafterFlags, LeaderDrafterFlags
from commands.options.engine_flags import ModelEngineOptions
from commands.options.leader_flags import LeaderOptions
from commands.options.speculation_flags import SpeculationOptions, parse_drafter_names
from runtime.drafters.lists import Devices
from runtime.drafters.spec import DrafterSpec
from runtime.drafters.specs import (
    AnswerDrafter,
    CustomDrafter,
    DraftTargetDrafter,
    NgramDrafter,
    SelfDrafter,
    SuffixDrafter,
)
from runtime.drafters.speculation import Speculation
from runtime.util.errors import UsageError

DRAFT = Path("draft-engine")


def parse_config(flag: str, text: str, **more: Any) -> tuple[DrafterSpec, Devices]:
    """The drafter of one list, and the target's devices."""
    (drafter,), device_ids = SpeculationOptions(DrafterFlags(**{flag: text, **more})).resolve()
    return drafter, device_ids


LISTS: list[tuple[str, list[str], DrafterSpec, Devices]] = [
    ("ngram_config", [" [ 10 , 2 , [ 0 ] ] ", "(10, 2, (0,))", "10,2,[0]"], NgramDrafter(10, 2), (0,)),
    ("draft_target_model_config", ["[4,[0],[1],true]"], DraftTargetDrafter(DRAFT, 4, True, (0,)), (1,)),
    ("draft_target_model_config", ["(4, (0,), (1,), False)"], DraftTargetDrafter(DRAFT, 4, False, (0,)), (1,)),
    ("self_draft_config", ["[8,[0]]"], SelfDrafter(8), (0,)),
    ("self_draft_config", ["8"], SelfDrafter(8), None),
    ("self_draft_config", ["(3,[0],True)"], SelfDrafter(3, use_logits=True), (0,)),
]


@pytest.mark.parametrize(("flag", "texts", "drafter", "devices"), LISTS)
def test_a_list_is_lengths_devices_and_the_rule(
    flag: str, texts: list[str], drafter: DrafterSpec, devices: Devices
) -> None:
    more = {"draft_engine_dir": DRAFT} if flag.startswith("draft") else {}
    assert [parse_config(flag, text, **more) for text in texts] == [(drafter, devices)] * len(texts)


def test_devices_are_as_many_as_ranks_or_left_out() -> None:
    assert parse_config("ngram_config", "[10,2,[4,5,6,7]]")[1] == (4, 5, 6, 7)
    assert parse_config("suffix_config", "[10,[4,5]]")[1] == (4, 5)
    drafter, devices = parse_config("draft_target_model_config", "[4,[0],[2,3],True]", draft_engine_dir=DRAFT)
    assert isinstance(drafter, DraftTargetDrafter)
    assert (drafter.device_ids, devices) == ((0,), (2, 3))
    assert parse_config("ngram_config", "10,2")[1] is None
    assert parse_config("ngram_config", "[10,2]")[1] is None
    assert parse_config("suffix_config", "10")[1] is None


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[10,2,[0]", "[10,2,[0]"),
        ("__import__('os').getcwd()", ""),
        ("[" * 10_000, ""),
        ("{[10]: 2}", "{[10]: 2}"),
        ("10", "2; 3; 10"),
        ("[0,2,[0]]", "max_draft_len; `--ngram-config`; 1; 0"),
        ("[1.5,2,[0]]", "max_draft_len; `--ngram-config`; 1; 1.5"),
        ("[True,2,[0]]", "max_draft_len"),
        ("[10,0,[0]]", "max_matching_ngram_size; `--ngram-config`; 1; 0"),
        ("[10,2,[]]", "[]"),
        ("[10,2,[-1]]", "[-1]"),
        ("abc", "`--draft-target-model-config`; abc"),
        ("[4,[0],[0],yes]", "`--draft-target-model-config`; [4,[0],[0],yes]"),
        ("[]", "`--draft-target-model-config`; 1; 4; []"),
        ("[10,2,[0]]", "draft_device_list; `--draft-target-model-config`; 2"),
        ("[0,[0],[0],True]", "draft_len; `--draft-target-model-config`; 1; 0"),
        ("[4,[],[0],True]", "draft_device_list; `--draft-target-model-config`; []"),
        ("[4,[True],[0],True]", "draft_device_list; `--draft-target-model-config`; [True]"),
        ("[4,[0],[],True]", "target_device_list; `--draft-target-model-config`; []"),
        ("[4,[0],[0],1]", "use_logits; `--draft-target-model-config`; 1"),
    ],
)
def test_malformed_list_names_the_part_that_is_wrong(text: str, wrong: str, said: Said) -> None:
    """N-gram lookup's, unless the flag that is named is the draft model's."""
    flags = {"draft_engine_dir": DRAFT, "draft_target_model_config": text} if "draft-target" in wrong else {}
    with pytest.raises(UsageError) as raised:
        SpeculationOptions(DrafterFlags(**flags or {"ngram_config": text})).resolve()
    said(raised, *wrong.split("; "))
    assert raised.value.hint


@pytest.mark.parametrize("text", ["", ":", "abc", "abc:", ":abc", "package.module.factory"])
def test_drafter_of_another_form_is_wrong_usage(text: str, said: Said) -> None:
    with pytest.raises(UsageError) as raised:
        parse_config("drafter", text)
    said(raised, "`--drafter`", text)
    assert raised.value.hint


FLAGS = {
    "--ngram-config": "[10,2,[0]]",
    "--draft-target-model-config": "[4,[0],[0],False]",
    "--drafter": "my_drafter:make",
}


@pytest.mark.parametrize("given", [flags for n in (2, 3) for flags in combinations(FLAGS, n)], ids=" ".join)
def test_one_drafter_is_enough(given: tuple[str, ...], said: Said) -> None:
    values = {flag[2:].replace("-", "_"): FLAGS[flag] for flag in given}
    with pytest.raises(UsageError) as raised:
        SpeculationOptions(DrafterFlags(draft_engine_dir=DRAFT, **values)).resolve()
    said(raised, *(f"`{flag}`" for flag in given))


OPTIONS: dict[str, Any] = {
    "ngram_ranking": "recent",
    "min_matching_ngram_size": 2,
    "ngram_pool": "public",
    "ngram_corpus": Path("c"),
}
CONFIGS: dict[str, Any] = {
    "ngram": {"ngram_config": "[10,3,[0]]"},
    "suffix": {"suffix_config": "[8,[0]]"},
    "draft-target": {"draft_target_model_config": "[4,[0],[0],False]", "draft_engine_dir": DRAFT},
    "self": {"self_draft_config": "[8,[0]]"},
    "custom": {"drafter": "my_drafter:make"},
}
SETTINGS: dict[str, DrafterSpec] = {
    "ngram": NgramDrafter(10, 3),
    "suffix": SuffixDrafter(8),
    "draft-target": DraftTargetDrafter(DRAFT, 4, device_ids=(0,)),
    "self": SelfDrafter(8),
    "custom": CustomDrafter("my_drafter", "make"),
}


def parse(drafters: str | None = None, **flags: Any) -> tuple[DrafterSpec, ...]:
    """Read them by the flags of orchestrator mode."""
    return SpeculationOptions(DrafterFlags(**flags), drafters=drafters).resolve()[0].drafters


def flags_of(*names: str) -> dict[str, Any]:
    return {key: value for name in names for key, value in CONFIGS[name].items()}


def leader(
    algorithm: str | None = None, max_draft_len: int | None = None, max_size: int | None = None
) -> LeaderOptions:
    return LeaderOptions(None, algorithm, LeaderDrafterFlags(max_draft_len, max_size))


def choose(options: LeaderOptions, drafters: str | None = None, **flags: Any) -> tuple[DrafterSpec, ...]:
    """Read them by the flags of leader mode, and those of both modes."""
    speculation = SpeculationOptions(DrafterFlags(**flags), drafters=drafters)
    return speculation.resolve(options.flags(None, speculation))[0].drafters


def test_draft_model_alone_says_what_drafts(tmp_path: Path) -> None:
    expected = (DraftTargetDrafter(tmp_path, 4),)
    assert choose(leader(), draft_engine_dir=tmp_path) == expected
    assert choose(leader("DRAFT_TARGET"), draft_engine_dir=tmp_path) == expected


def test_lookups_are_long_where_they_send_only_what_pays() -> None:
    """A length that is given is the longest; TensorRT-LLM's 4 stays where all of a draft is sent."""
    options = SpeculationOptions(draft_len_mode="fixed")
    fixed, _ = options.resolve(leader("NGRAM").flags(None, options))
    assert choose(leader("NGRAM")) == (NgramDrafter(10, 2),)
    assert choose(leader("NGRAM", 3)) == (NgramDrafter(3, 2),)
    assert fixed == Speculation((NgramDrafter(4, 2),), "fixed")
    assert choose(replace(leader("NGRAM"), mode="orchestrator")) == (NgramDrafter(4, 2),)
    assert choose(leader("SELF")) == (SelfDrafter(4),)


def test_auto_is_suffix_matching_and_what_is_given() -> None:
    """N-gram lookup finds nothing that suffix matching does not find; a flag that only it takes asks for it."""
    assert choose(leader("AUTO")) == (SuffixDrafter(10),)
    of_many = leader("AUTO").flags(None, SpeculationOptions(), answers_many=True)
    assert SpeculationOptions().resolve(of_many)[0].drafters == (SuffixDrafter(10), AnswerDrafter(10))
    assert choose(leader("AUTO"), ngram_pool="public") == (SuffixDrafter(10, "public"),)
    assert choose(leader("AUTO"), ngram_ranking="recent") == (NgramDrafter(10, 2, ranking="recent"), SuffixDrafter(10))
    by_size = leader("AUTO", max_size=3)
    assert choose(by_size) == (NgramDrafter(10, 3), SuffixDrafter(10))
    with_model = choose(LeaderOptions(None, "auto", LeaderDrafterFlags(6, draft_model_dir="small")))
    assert with_model == (SuffixDrafter(6), DraftTargetDrafter("small", 6))


@pytest.mark.parametrize("names", [["ngram", "draft-target"], ["draft-target", "ngram"], [*CONFIGS], ["custom"]])
def test_drafters_are_in_the_order_of_their_names(names: list[str]) -> None:
    drafters = parse(",".join(names), **flags_of(*names))
    assert drafters == tuple(SETTINGS[name] for name in names)
    assert Speculation(drafters).names == names


def test_several_draft_as_much_as_the_longest() -> None:
    settings = Speculation(parse("draft-target,ngram", **flags_of("draft-target", "ngram")))
    assert settings.max_draft_len == 10
    settings = Speculation(parse("ngram,custom", **flags_of("custom", "ngram")))
    assert settings.max_draft_len is None, "one of the user's own may draft what the engine takes"


@pytest.mark.parametrize(
    ("engines", "flags", "expected"),
    [
        (ModelEngineOptions(), {}, (SuffixDrafter(6),)),
        (ModelEngineOptions(), {"draft_engine_dir": DRAFT}, (SuffixDrafter(6), DraftTargetDrafter(DRAFT, 6))),
        (ModelEngineOptions(self_draft="int4"), {}, (SuffixDrafter(6), SelfDrafter(6))),
        (
            ModelEngineOptions(),
            {"draft_engine_dir": DRAFT, "drafter": "a:b"},
            (DraftTargetDrafter(DRAFT, 6), CustomDrafter("a", "b", 6)),
        ),
    ],
    ids=["nothing", "a draft model", "a copy", "one of its own"],
)
def test_auto_in_leader_mode_takes_a_lookup_too(
    engines: ModelEngineOptions, flags: dict[str, Any], expected: tuple[DrafterSpec, ...]
) -> None:
    """And the models that there are; a lookup only where no drafter has a flag of its own."""
    options = LeaderOptions("demo", drafters=LeaderDrafterFlags(6), engines=engines)
    assert choose(options, "auto", **flags) == expected


@pytest.mark.parametrize("text", ["ngram,draft-target", " NGRAM , Draft_Target "])
def test_names_of_drafters_are_read_whatever_their_case(text: str) -> None:
    assert parse_drafter_names(text) == ["ngram", "draft-target"]
    assert parse_drafter_names("None") == []


@pytest.mark.parametrize(
    ("text", "wrong"), [("ngram,hydra", "hydra"), ("ngram,", "'ngram,'"), ("ngram,suffix,ngram", "ngram,suffix,ngram")]
)
def test_unknown_names_of_drafters_list_the_known(text: str, wrong: str, said: Said) -> None:
    with pytest.raises(UsageError) as raised:
        parse_drafter_names(text)
    said(raised, *wrong.split("; "))
    assert raised.value.hint


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({"drafters": "auto"}, ""),
        ({"drafters": "ngram"}, "`--drafters`; `--ngram-config`; ngram"),
        (flags_of("ngram") | {"drafters": "ngram,draft-target"}, "`--draft-target-model-config`; ngram,draft-target"),
        (flags_of("ngram", "suffix") | {"drafters": "ngram"}, "`--suffix-config`; `--drafters`"),
        (flags_of("ngram", "suffix"), "`--ngram-config`; `--suffix-config`"),
        (flags_of("suffix") | OPTIONS, "`--min-matching-ngram-size`; 2"),
        (flags_of("suffix") | {"min_matching_ngram_size": 2}, "`--min-matching-ngram-size`; 2"),
        (flags_of("ngram") | {"min_matching_ngram_size": 4}, "min_matching_ngram_size; 3; 4"),
        (flags_of("ngram") | {"suffix_config": "[4,[1]]", "drafters": "ngram,suffix"}, "[0]; [1]"),
    ],
)
def test_flags_that_do_not_fit_together_are_wrong_usage(given: dict[str, Any], wrong: str, said: Said) -> None:
    with pytest.raises(UsageError) as raised:
        parse(**given)
    said(raised, *wrong.split("; "))
    assert raised.value.hint


@pytest.mark.parametrize(
    ("options", "drafters", "flags", "wrong"),
    [
        (leader("NGRAM"), "ngram", {}, "`--spec-decode-algo`; `--drafters`"),
        (leader(None, 4), "ngram", {"drafter": "a:b"}, "`--drafter`; `--drafters`"),
        (leader(None, 4), "ngram", {"draft_engine_dir": DRAFT}, "`--drafters draft-target`; draft-engine"),
        (leader(None, None, 3), "suffix", {}, "`--drafters ngram`; 3"),
        (leader(None, 5), None, {"ngram_config": "[4,2]"}, "`--spec-decode-max-draft-len`; `--ngram-config`"),
        (leader(), None, {"ngram_pool": "public"}, "`--ngram-pool`; public"),
        (leader("MTP"), None, {}, "`--spec-decode-algo MTP` needs an MTP head; `--draft-model-dir`"),
        (leader("NGRAM"), None, {"min_matching_ngram_size": 3}, "2; 3"),
    ],
)
def test_leader_flags_that_do_not_fit_together_are_wrong_usage(
    options: LeaderOptions, drafters: str | None, flags: dict[str, Any], wrong: str, said: Said
) -> None:
    with pytest.raises(UsageError) as raised:
        choose(options, drafters, **flags)
    said(raised, *wrong.split("; "))
    assert raised.value.hint
