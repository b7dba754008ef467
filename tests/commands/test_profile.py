"""Profiles: what `tune` wrote is what `run` and `summarize` use, for the same engine only."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import PROMPT, PROMPTS, Specdec, assert_valid, each, edit_json, ids_of
from sentences import Said
from test_cli_errors import assert_one_clear_error

from runtime.builder.profile import (
    Figures,
    Profile,
    ProfileEngine,
    ProfileModel,
    engine_digest,
    model_digest,
    read_profile,
    save_profile,
    saved_profile,
    write_profile,
)
from runtime.checkpoint.bundle import read_engine_config
from runtime.drafters.specs import ChainDrafter, DraftTargetDrafter, NgramDrafter, SelfDrafter, SuffixDrafter
from runtime.drafters.speculation import Speculation

FIGURES = Figures(8, 1, 1.5, 0.25, 0.9, 1.4, 1.0, 1.25)
NGRAM = NgramDrafter(4, 3, min_matching_ngram_size=2, ranking="frequent", pool="public")


@pytest.fixture
def profile(llama_engine_dir: Path) -> Profile:
    digest = engine_digest(read_engine_config(llama_engine_dir))
    return Profile(ProfileEngine(str(llama_engine_dir), digest), Speculation((NGRAM,), "fixed"), FIGURES)


@pytest.fixture
def path(profile: Profile, tmp_path: Path) -> Path:
    write_profile(tmp_path / "tuned.json", profile)
    return tmp_path / "tuned.json"


DRAFT = DraftTargetDrafter(Path("/engine"), 3, use_logits=True, device_ids=(1,))
DRAFTERS = [
    *(NGRAM, replace(NGRAM, corpus=Path("/c")), SuffixDrafter(9, "public"), DRAFT, SelfDrafter(3, use_logits=True)),
    *(ChainDrafter([NGRAM, SelfDrafter(5)]), None),
]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_what_is_written_is_what_is_read(drafter: Any, profile: Profile, tmp_path: Path) -> None:
    written = replace(profile, speculation=Speculation.of(drafter, "auto" if drafter else "fixed"))
    write_profile(tmp_path / "p", written)
    assert read_profile(tmp_path / "p") == written


def test_engines_are_told_apart_by_what_they_are_not_by_their_times(llama_engine_dir: Path) -> None:
    config = read_engine_config(llama_engine_dir)
    digest = engine_digest(config)
    assert digest == engine_digest(replace(config, step_costs=(), host_s=9.0))
    others = [
        replace(config, dtype="bfloat16"),
        replace(config, vocab_size=5),
        replace(config, build_config=replace(config.build_config, max_draft_len=3)),
        replace(config, environment=replace(config.environment, torch="0")),
        replace(config, pretrained_config=config.pretrained_config | {"hidden_size": 1}),
    ]
    assert len({digest, *map(engine_digest, others)}) == 6


@pytest.mark.parametrize("leader", [[], ["--disable-kv-cache-reuse"]], ids=["V1", "V2"])
def test_run_drafts_as_the_profile_says(
    leader: list[str], specdec: Specdec, profile: Profile, path: Path, llama_engine_dir: Path
) -> None:
    write_profile(path, replace(profile, speculation=profile.speculation.in_mode("fixed")))  # type: ignore[arg-type]
    common = ["--engine-dir", llama_engine_dir, *each("--input-text", PROMPTS), "--max-output-len", 30, "--json"]
    document = specdec("run", *common, *leader, "--profile", path).document
    assert_valid("run", document)
    flags = ["--ngram-config", "[4,3,[0]]", "--min-matching-ngram-size", 2, "--ngram-ranking", "frequent"]
    same = specdec("run", *common, *flags, "--ngram-pool", "public", "--draft-len", "fixed").document
    settings = document["settings"]
    assert settings["profile"] == str(path) and same["settings"]["profile"] is None
    assert (settings["ngram_config"], settings["draft_len_mode"]) == (same["settings"]["ngram_config"], "fixed")
    assert ids_of(document) == ids_of(same)
    if not leader:  # automatic lengths go by what steps take
        for key in ("num_steps", "num_draft_tokens", "num_accepted_draft_tokens"):
            assert document["total"][key] == same["total"][key]


def test_run_drafts_with_a_profiles_models(
    specdec: Specdec, profile: Profile, path: Path, self_draft_engine_dir: Path, draft_engine_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The draft model's engine was named from another directory."""
    identity = ProfileEngine("engine", engine_digest(read_engine_config(self_draft_engine_dir)))
    monkeypatch.chdir(draft_engine_dir.parent)
    models = ChainDrafter([DraftTargetDrafter(Path(draft_engine_dir.name), 3), SelfDrafter(4)])
    write_profile(path, replace(profile, engine=identity, speculation=Speculation.of(models, "fixed")))
    monkeypatch.chdir(path.parent)
    common = ["--engine-dir", self_draft_engine_dir, "--input-text", PROMPT, "--max-output-len", 12]
    document = specdec("run", *common, "--profile", path, "--check-lossless", "--json").document
    assert document["settings"]["drafters"] == ["draft-target", "self"]
    assert document["settings"]["self_draft_config"]["max_draft_len"] == 4
    assert document["checks"]["lossless"]["passed"] and document["total"]["draft_model_time_s"] > 0


def test_a_models_profile_is_taken_with_it_and_saved_as_its_default(
    specdec: Specdec, profile: Profile, path: Path, llama_dir: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """Limits and formats of the engine that is made of the model do not matter."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(path.parent / "cache"))
    model = ProfileModel(str(llama_dir), model_digest(str(llama_dir)))
    write_profile(path, of_model := replace(profile, model=model))
    run = ["run", llama_dir, PROMPT, "--max-output-len", 9, "--compiler", "none", "--json"]
    given = specdec(*run, "--profile", path, "--max-seq-len", 100).document["settings"]
    assert (given["ngram_config"]["ranking"], given["draft_len_mode"]) == ("frequent", "fixed")
    foreign = specdec("run", "demo", PROMPT, "--profile", path)
    assert_one_clear_error(foreign, 1, (str(llama_dir), "not for demo"))
    said(foreign)
    assert specdec(*run).document["settings"]["drafters"] == []
    save_profile(str(llama_dir), of_model)
    by_default = specdec(*run)
    assert by_default.document["settings"]["ngram_config"] == given["ngram_config"]
    said(by_default, "`tune --save`", "`--profile off`")
    for flags in (["--profile", "OFF"], ["--spec-decode-algo", "SUFFIX"]):
        other = specdec(*run, *flags)
        assert other.document["settings"]["ngram_config"] is None and other.stderr == ""
    saved_profile(str(llama_dir)).write_text("{")
    damaged = specdec(*run)
    assert damaged.document["settings"]["drafters"] == []
    said(damaged, "`tune --save`")


def test_profile_of_another_engine_is_refused(specdec: Specdec, path: Path, llama_engine_dir: Path, said: Said) -> None:
    other = path.parent / "other"
    shutil.copytree(llama_engine_dir, other)
    edit_json(other / "config.json", build_config__max_batch_size=2)
    result = specdec("run", "--engine-dir", other, "--input-text", PROMPT, "--profile", path)
    words = (f"for another engine, {llama_engine_dir}, not for {other}: {path}", "`specdec tune --engine-dir")
    assert_one_clear_error(result, 1, words)
    said(result)
    of_model = specdec("run", "demo", PROMPT, "--profile", path)
    assert_one_clear_error(of_model, 1, ("demo",))
    said(of_model)


DAMAGES: list[tuple[str, Any]] = [
    ("not a profile", "[]"),
    ("a format this version cannot read (it reads 3): 1", {"format_version": 1}),
    ("has an unknown key: extra", {"extra": 1}),
    ("draft_len_mode` has a value it cannot have: 'short'", {"draft_len_mode": "short"}),
    ("lacks the key: max_draft_len", {"drafter__max_draft_len": None}),
    ("has numbers that no drafter can have", {"drafter__min_matching_ngram_size": 9}),
    ("names no drafter that a profile can have", {"drafter__name": "custom"}),
    ("lacks the key: model", {"drafter__name": "draft-target", "drafter__use_logits": False}),
    ("is a chain without a list of drafters", {"drafter": {"name": "chain", "drafters": []}}),
    ("drafter 1` names no drafter", {"drafter": {"name": "chain", "drafters": [{"name": "chain"}]}}),
]


@pytest.mark.parametrize(("words", "change"), DAMAGES, ids=[str(damage[1]) for damage in DAMAGES])
def test_damaged_profile_is_one_clear_error(
    words: str, change: Any, specdec: Specdec, path: Path, llama_engine_dir: Path
) -> None:
    if isinstance(change, str):
        path.write_text(change)
    else:
        edit_json(path, **change)
    result = specdec("run", "--engine-dir", llama_engine_dir, "--input-text", PROMPT, "--profile", path)
    assert_one_clear_error(result, 1, (words, str(path)))
