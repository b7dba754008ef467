"""Names and flags as the command line's own parts read them."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import typer.main
from sentences import Said

from commands.options.drafter_flags import DrafterFlags, LeaderDrafterFlags
from commands.options.engine_choice import EngineOptions, KVCacheOptions, check_needed_drafter
from commands.options.engine_flags import BuildEngineOptions, ConvertEngineOptions, ModelEngineOptions
from commands.options.leader_flags import LeaderOptions
from commands.options.parameters import commands_of
from commands.options.sampling_flags import SamplingOptions
from commands.options.speculation_flags import SpeculationOptions
from runtime.builder.engine_options import OPTIONS, value_of, words_of
from runtime.core.params import GREEDY, SamplingConfig, SamplingParams
from runtime.drafters.spec import DraftLenMode
from runtime.drafters.specs import SuffixDrafter
from runtime.drafters.speculation import Speculation
from runtime.util.errors import UsageError
from specdec_cli.app import app

BOTH = "`--kv-cache-enable-block-reuse` and `--{}` cannot be given together"


@pytest.mark.parametrize(
    ("reuse", "no_reuse", "is_leader", "disable_reuse", "wrong"),
    [
        (False, True, False, False, "orchestrator mode needs block reuse: `--no-kv-cache-enable-block-reuse`"),
        (True, True, False, False, "orchestrator mode needs block reuse: `--no-kv-cache-enable-block-reuse`"),
        (True, True, True, False, BOTH.format("no-kv-cache-enable-block-reuse")),
        (True, False, True, True, BOTH.format("disable-kv-cache-reuse")),
        (False, True, True, True, None),
        (True, False, True, False, None),
        (True, False, False, False, None),
    ],
)
def test_block_reuse_is_what_orchestrator_mode_needs_and_leader_mode_asks_once(
    reuse: bool, no_reuse: bool, is_leader: bool, disable_reuse: bool, wrong: str | None
) -> None:
    options = KVCacheOptions(reuse, no_reuse)
    if wrong is None:
        options.fitting(is_leader=is_leader, disable_reuse=disable_reuse)
        return
    with pytest.raises(UsageError) as raised:
        options.fitting(is_leader=is_leader, disable_reuse=disable_reuse)
    assert raised.value.message == wrong
    assert raised.value.hint


@pytest.mark.parametrize(("check_lossless", "draft_len_mode"), [(True, "fixed"), (False, "auto")])
def test_what_needs_a_drafter_says_so(check_lossless: bool, draft_len_mode: DraftLenMode, said: Said) -> None:
    check_needed_drafter(Speculation((SuffixDrafter(10),), draft_len_mode), check_lossless=check_lossless)
    check_needed_drafter(Speculation((), "fixed"), check_lossless=False)
    with pytest.raises(UsageError) as raised:
        check_needed_drafter(Speculation((), draft_len_mode), check_lossless=check_lossless)
    said(raised)
    assert raised.value.hint


def test_a_copy_that_nobody_drafts_with_is_told(
    llama_dir: Path, capsys: pytest.CaptureFixture[str], said: Said
) -> None:
    def choose(algorithm: str | None, copy: str = "int4", **settings: Any) -> str:
        leader = LeaderOptions(str(llama_dir), algorithm, engines=ModelEngineOptions(self_draft=copy))
        EngineOptions(leader=leader).choose(SamplingParams(), None, **settings)
        return capsys.readouterr().err

    assert choose("SELF") == choose("AUTO") == choose(None, default_mode="leader", requests_draft=True) == ""
    told = choose("NGRAM")
    said(told, "`--self-draft int4`", "SELF")
    assert choose(None) == told
    with pytest.raises(UsageError) as raised:
        choose(None, check_lossless=True)
    said(raised, "SELF")
    assert choose("NGRAM", "none") == choose("AUTO", "none") == ""
    with pytest.raises(UsageError) as raised:
        choose("SELF", "none")
    said(raised, "`--self-draft none`")


PROFILE = Path("tuned.json")
WITH_MODEL = LeaderDrafterFlags(draft_model_dir="demo-draft")


@pytest.mark.parametrize(
    ("options", "leader", "flag"),
    [
        (SpeculationOptions(DrafterFlags(ngram_pool="public"), profile=PROFILE), LeaderOptions(), "--ngram-pool"),
        (SpeculationOptions(profile=PROFILE), LeaderOptions(spec_decode_algo="NGRAM"), "--spec-decode-algo"),
    ],
)
def test_profile_says_alone_how_to_draft(
    options: SpeculationOptions, leader: LeaderOptions, flag: str, said: Said
) -> None:
    assert replace(options, profile=None).find_profile(leader.drafting_flags, None) is None
    with pytest.raises(UsageError) as raised:
        options.find_profile(leader.drafting_flags, None)
    said(raised, f"`{flag}`", "`--profile`", "tuned.json")


@pytest.mark.parametrize(
    ("engines", "message"), [(ModelEngineOptions(dtype="float16", no_cache=True), "`--dtype`; `--model-dir`; float16")]
)
def test_engine_that_is_there_is_not_built_anew(engines: ModelEngineOptions, message: str, said: Said) -> None:
    LeaderOptions("demo", engines=engines).flags(None, SpeculationOptions())
    LeaderOptions(drafters=WITH_MODEL, engines=engines).flags(None, SpeculationOptions())
    with pytest.raises(UsageError) as raised:
        LeaderOptions(engines=engines).flags(None, SpeculationOptions())
    said(raised, *message.split("; "))


@pytest.mark.parametrize("group", [ModelEngineOptions, ConvertEngineOptions, BuildEngineOptions])
def test_every_command_takes_all_words_of_an_option(group: Any) -> None:
    options = [field.name for field in fields(group) if field.name in OPTIONS]
    words = [(name, *one) for name in options for one in words_of(name).items()]
    for name, word, value in words:
        for given in (group(**{name: word}), group(**{name: word.upper()})):
            given.check()
            assert given.options == {name: value}


def params(random_seed: int = 0, **given: Any) -> SamplingConfig:
    return SamplingOptions(**given).params(seed=random_seed).config()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, GREEDY),
        ({"temperature": 0.8}, SamplingConfig(temperature=0.8, top_k=0)),
        ({"top_p": 0.9}, SamplingConfig(top_k=0, top_p=0.9)),
        ({"top_k": -1}, SamplingConfig(top_k=0)),
        ({"temperature": 0.8, "top_k": 1}, SamplingConfig(temperature=0.8)),
        ({"repetition_penalty": 1.2, "random_seed": 7}, SamplingConfig(repetition_penalty=1.2, random_seed=7)),
    ],
)
def test_asking_for_a_temperature_or_a_cut_is_asking_for_samples(
    given: dict[str, Any], expected: SamplingConfig
) -> None:
    """Unless `--top-k` is given, which decides."""
    assert params(**given) == expected


@pytest.mark.parametrize(
    ("given", "warns"),
    [
        ({"top_k": 1}, False),
        ({"temperature": 0.8}, False),
        ({"top_k": 1, "temperature": 0.8}, True),
        ({"top_k": 1, "top_p": 0.9}, True),
    ],
    ids=str,
)
def test_flags_that_greedy_leaves_without_effect_are_named(
    given: dict[str, Any], warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    params(**given)
    warning = "warning: `--top-k 1` is greedy: `--temperature`, `--top-p` and `--min-p` have no effect\n"
    assert capsys.readouterr() == ("", warning if warns else "")


def test_words_of_choices_are_taken_in_any_case_with_either_hyphen() -> None:
    """Words are taken by flags, and so by variables and files, whose values flags read; and by options of `LLM`."""
    words = 0
    for name, command in commands_of(typer.Context(group := typer.main.get_command(app))).items():
        context = command.context_class(command, info_name=name, **command.context_settings)
        for param in command.params:
            for word in param.type_descriptor.choices or ():
                for other in (word, word.upper(), word.title().replace("-", "_"), word.replace("_", "-")):
                    assert param.process_value(context, other) == word, (name, param.opts)
                words += 1
    assert words > 100 and group.name == "specdec"
    assert value_of("compiler", "Torch_Compile") == "torch-compile" and value_of("kv_cache_dtype", "FP8-E4M3") == "fp8"
    assert value_of("self_draft", "None") is None and value_of("dtype", "BFloat16") == "bfloat16"
