"""What the speculation flags say, and which part of them is wrong."""

from itertools import combinations
from pathlib import Path

import pytest

from commands.drafter_settings import (
    CustomSettings,
    DraftTargetSettings,
    NgramSettings,
    parse_custom_drafter,
    parse_draft_target_model_config,
    parse_drafter,
    parse_ngram_config,
)
from runtime.errors import UsageError

DRAFT = Path("draft-engine")


@pytest.mark.parametrize("text", ["[10,2,[0]]", " [ 10 , 2 , [ 0 ] ] ", "(10, 2, (0,))"])
def test_ngram_config_is_draft_length_pattern_length_and_device(text: str) -> None:
    assert parse_ngram_config(text) == NgramSettings(max_draft_len=10, max_matching_ngram_size=2, device_id=0)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("abc", "not a list: abc"),
        ("", "not a list: "),
        ("[10,2,[0]", "not a list: [10,2,[0]"),
        ("__import__('os').getcwd()", "not a list"),
        ("[" * 10_000, "not a list"),
        ("10", "3 entries: 10"),
        ("{1: 2}", "3 entries"),
        ("[10,2]", "3 entries: [10,2]"),
        ("[10,2,[0],1]", "3 entries"),
        ("[0,2,[0]]", "max_draft_len in `--ngram-config` must be a whole number of at least 1: 0"),
        ("[-1,2,[0]]", "max_draft_len"),
        ("[1.5,2,[0]]", "max_draft_len in `--ngram-config` must be a whole number of at least 1: 1.5"),
        ("[True,2,[0]]", "max_draft_len"),
        ("['4',2,[0]]", "max_draft_len in `--ngram-config` must be a whole number of at least 1: '4'"),
        ("[10,0,[0]]", "max_matching_ngram_size in `--ngram-config` must be a whole number of at least 1: 0"),
        ("[10,2,[]]", "must name a device: []"),
        ("[10,2,0]", "must name a device: 0"),
        ("[10,2,[-1]]", "must hold device numbers: [-1]"),
        ("[10,2,['0']]", "must hold device numbers: ['0']"),
        ("[10,2,[0,1]]", "more than one device"),
    ],
)
def test_malformed_ngram_config_names_the_part_that_is_wrong(text: str, wrong: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_ngram_config(text)
    assert wrong in raised.value.message
    assert raised.value.hint


@pytest.mark.parametrize(
    ("text", "use_logits"),
    [
        ("[4,[0],[1],True]", True),
        ("[4,[0],[1],False]", False),
        (" [ 4 , [ 0 ] , [ 1 ] , True ] ", True),
        ("(4, (0,), (1,), False)", False),
    ],
)
def test_draft_target_model_config_is_draft_length_two_devices_and_the_rule(text: str, use_logits: bool) -> None:
    assert parse_draft_target_model_config(text, DRAFT) == DraftTargetSettings(
        max_draft_len=4, draft_device_id=0, device_id=1, use_logits=use_logits, draft_engine_dir=DRAFT
    )


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("abc", "`--draft-target-model-config` is not a list: abc"),
        ("", "not a list: "),
        ("[4,[0],[0],True", "not a list: [4,[0],[0],True"),
        ("[4,[0],[0],true]", "not a list: [4,[0],[0],true]"),
        ("__import__('os').getcwd()", "not a list"),
        ("[" * 10_000, "not a list"),
        ("4", "4 entries: 4"),
        ("'abcd'", "4 entries"),
        ("[4,[0],[0]]", "4 entries: [4,[0],[0]]"),
        ("[4,[0],[0],True,1]", "4 entries"),
        ("[10,2,[0]]", "4 entries: [10,2,[0]]"),
        ("[0,[0],[0],True]", "draft_len in `--draft-target-model-config` must be a whole number of at least 1: 0"),
        ("[-4,[0],[0],True]", "draft_len in `--draft-target-model-config` must be a whole number of at least 1: -4"),
        ("[4.0,[0],[0],True]", "draft_len in `--draft-target-model-config` must be a whole number of at least 1: 4.0"),
        ("[True,[0],[0],True]", "draft_len in `--draft-target-model-config` must be a whole number"),
        ("['4',[0],[0],True]", "draft_len in `--draft-target-model-config` must be a whole number of at least 1: '4'"),
        ("[None,[0],[0],True]", "draft_len"),
        ("[4,[],[0],True]", "draft_device_list in `--draft-target-model-config` must name a device: []"),
        ("[4,0,[0],True]", "draft_device_list in `--draft-target-model-config` must name a device: 0"),
        ("[4,[-1],[0],True]", "draft_device_list in `--draft-target-model-config` must hold device numbers: [-1]"),
        ("[4,['0'],[0],True]", "draft_device_list in `--draft-target-model-config` must hold device numbers: ['0']"),
        ("[4,[True],[0],True]", "draft_device_list in `--draft-target-model-config` must hold device numbers: [True]"),
        ("[4,[0,1],[0],True]", "draft_device_list in `--draft-target-model-config` names more than one device"),
        ("[4,[0],[],True]", "target_device_list in `--draft-target-model-config` must name a device: []"),
        ("[4,[0],0,True]", "target_device_list in `--draft-target-model-config` must name a device: 0"),
        ("[4,[0],[-1],True]", "target_device_list in `--draft-target-model-config` must hold device numbers: [-1]"),
        ("[4,[0],[0,1],True]", "target_device_list in `--draft-target-model-config` names more than one device"),
        ("[4,[0],[0],0]", "use_logits in `--draft-target-model-config` must be True or False: 0"),
        ("[4,[0],[0],1]", "use_logits in `--draft-target-model-config` must be True or False: 1"),
        ("[4,[0],[0],'True']", "use_logits in `--draft-target-model-config` must be True or False: 'True'"),
        ("[4,[0],[0],None]", "use_logits in `--draft-target-model-config` must be True or False: None"),
    ],
)
def test_malformed_draft_target_model_config_names_the_part_that_is_wrong(text: str, wrong: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_draft_target_model_config(text, DRAFT)
    assert wrong in raised.value.message
    assert raised.value.hint


@pytest.mark.parametrize(
    ("text", "module", "factory"),
    [("my_drafter:make", "my_drafter", "make"), ("package.module:Drafter", "package.module", "Drafter")],
)
def test_drafter_of_ones_own_is_a_module_and_a_factory(text: str, module: str, factory: str) -> None:
    settings = parse_custom_drafter(text)
    assert (settings.module, settings.factory) == (module, factory)
    assert settings.max_draft_len is None


@pytest.mark.parametrize("text", ["", ":", "abc", "abc:", ":abc", "package.module.factory"])
def test_drafter_of_another_form_is_wrong_usage(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_custom_drafter(text)
    assert raised.value.message == f"`--drafter` is not of the form module:factory: {text}"
    assert raised.value.hint


FLAGS = {
    "--ngram-config": "[10,2,[0]]",
    "--draft-target-model-config": "[4,[0],[0],False]",
    "--drafter": "my_drafter:make",
}


@pytest.mark.parametrize("given", [flags for n in (2, 3) for flags in combinations(FLAGS, n)], ids=" ".join)
@pytest.mark.parametrize("draft_engine_dir", [None, DRAFT])
def test_one_drafter_is_enough(given: tuple[str, ...], draft_engine_dir: Path | None) -> None:
    values = [FLAGS[flag] if flag in given else None for flag in FLAGS]
    with pytest.raises(UsageError) as raised:
        parse_drafter(values[0], values[1], draft_engine_dir, values[2])
    assert raised.value.message == f"{' and '.join(f'`{flag}`' for flag in given)} cannot be given together"
    assert raised.value.hint


@pytest.mark.parametrize(("ngram_config", "drafter"), [(None, None), ("[10,2,[0]]", None), (None, "my_drafter:make")])
def test_draft_engine_needs_its_configuration(ngram_config: str | None, drafter: str | None) -> None:
    with pytest.raises(UsageError) as raised:
        parse_drafter(ngram_config, None, DRAFT, drafter)
    assert raised.value.message == "`--draft-engine-dir` needs `--draft-target-model-config`: draft-engine"
    assert raised.value.hint and "[4,[0],[0],False]" in raised.value.hint


def test_draft_target_model_config_needs_an_engine() -> None:
    with pytest.raises(UsageError) as raised:
        parse_drafter(None, "[4,[0],[0],False]", None, None)
    assert "needs the draft model's engine: [4,[0],[0],False]" in raised.value.message
    assert raised.value.hint and "`--draft-engine-dir`" in raised.value.hint


def test_flags_name_their_drafter() -> None:
    assert parse_drafter(None, None, None, None) is None
    assert parse_drafter("[10,2,[0]]", None, None, None) == NgramSettings(10, 2, 0)
    assert parse_drafter(None, "[4,[0],[1],True]", DRAFT, None) == DraftTargetSettings(4, 0, 1, True, DRAFT)
    assert parse_drafter(None, None, None, "my_drafter:make") == CustomSettings("my_drafter", "make")
