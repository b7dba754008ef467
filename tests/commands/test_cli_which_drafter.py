"""`specdec drafters`: what it tries for a model, what it promises, and what it says of the hub."""

import json
import time
import tomllib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from command_line import Specdec, assert_valid, each
from gguf import GGMLQuantizationType as Q
from quantized import save_gguf
from test_cli_errors import assert_one_clear_error

from commands.drafters.document import DraftersDocument
from commands.drafters.work import show_document
from commands.output.output import Output
from runtime.core.params import SamplingParams
from runtime.drafters import published
from runtime.drafters.published import published_for
from runtime.drafters.specs import DRAFTERS, DraftTargetDrafter
from runtime.llm import LLM
from runtime.measure.tuning import live
from runtime.measure.tuning.tune import Answered, answer
from runtime.measure.tuning.which import open_sample, rival_of_model

TEXTS = ["Once upon a time there was a little dog.", "The dog looked for the ball in the park, and the dog"]


def test_a_model_with_an_mtp_head_and_a_draft_model_beside(
    specdec: Specdec,
    mtp_dirs: tuple[Path, Path],
    llama_dir: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draft model has the target's weights: its drafts are right. Each is timed in one round instead of six."""
    monkeypatch.setattr(live.LiveRun, "num_rounds", 1)
    monkeypatch.setattr(live, "_MAX_ROUNDS", 1)
    model = mtp_dirs[1]
    sample = [*each("--input-text", TEXTS), "--max-output-len", 8, "--compiler", "none", "--measure"]
    document = specdec("drafters", model, *sample, "--draft-model-dir", llama_dir, "--json").document
    show_document(DraftersDocument.model_validate(document), Output())  # another run may choose another lookup
    printed = "".join(capfd.readouterr().out.split())
    for one in document["tried"]:
        assert one["draft_len"] == 0 or "".join(f"{one['drafter']}: {one['command']}".split()) in printed
    assert_valid("drafters", document)
    assert document["is_own_sample"] and document["num_prompts"] == 2
    tried: dict[str, dict[str, Any]] = {one["drafter"]: one for one in document["tried"]}
    assert tried["no drafter"]["speedup"] == 1 and tried["no drafter"]["draft_len"] == 0
    assert "--spec-decode-algo MTP" in tried["MTP"]["command"]
    assert 1 <= tried["MTP"]["tokens_per_step"] <= 1 + tried["MTP"]["draft_len"]
    (beside,) = (one for one in document["tried"] if f"--draft-model-dir {llama_dir} " in one["command"])
    assert 1 + beside["draft_len"] / 2 < beside["tokens_per_step"] <= 1 + beside["draft_len"]
    for one in document["tried"]:
        by_speed = one["tokens_per_second"] / tried["no drafter"]["tokens_per_second"]
        assert one["speedup"] == pytest.approx(by_speed)
        assert one["predicted_by_measured"] == pytest.approx(one["speedup"] / one["measured_speedup"])
    speeds = [one["tokens_per_second"] for one in document["tried"]]
    assert speeds == sorted(speeds, reverse=True)
    assert any("own copy" in one["drafter"] and "--self-draft" in one["command"] for one in document["not_tried"])


def test_no_copy_of_layers_in_four_bits(specdec: Specdec, tmp_path: Path) -> None:
    """Though the output layer, which is the embedding, has eight."""
    save_gguf(tmp_path / "model.gguf", Q.Q4_1, is_tied=True)
    traces = tmp_path / "traces.jsonl"
    traces.write_text(json.dumps({"prompt_ids": list(range(3, 20)), "output_ids": [5, 6, 7]}))
    asked = ["--traces", traces, "--max-output-len", 8, "--compiler", "none", "--json"]
    (left,) = specdec("drafters", tmp_path / "model.gguf", *asked).document["not_tried"]
    assert "4 bits already" in left["reason"] and left["command"] == ""


def test_a_machine_that_gets_slower_slows_target_and_draft_model_alike(
    llama_engine_dir: Path, draft_engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is a million times as slow after the target's answers is a clock that runs so fast."""
    real, drafter = time.perf_counter, DraftTargetDrafter(str(draft_engine_dir), 3)
    with LLM(str(llama_engine_dir), mode="leader") as llm:
        template = llm.request_of(SamplingParams(temperature=0, max_tokens=12))
        requests = [template.with_prompt(i, list(llm.encode(text)[0])) for i, text in enumerate(TEXTS)]
        untold = lambda title, total: nullcontext(lambda: None)  # noqa: E731
        traces = answer(llm, requests, [None] * len(requests), untold)
        sample = open_sample(llm, Answered(requests, traces, 12), untold)
        before = rival_of_model(sample, llm, drafter, untold)
        monkeypatch.setattr(time, "perf_counter", lambda: 1e6 * real())
        after = rival_of_model(sample, llm, drafter, untold)
    assert after.draft_s < 1000 * before.draft_s and after.seconds < 1000 * before.seconds


def test_errors_are_one_sentence(specdec: Specdec, llama_engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_one_clear_error(specdec("drafters"), 2, ("no model is given",))
    assert_one_clear_error(specdec("drafters", llama_engine_dir), 2, ("this is an engine", str(llama_engine_dir)))
    traces = ["--traces", "t.jsonl", "--input-text", "a"]
    assert_one_clear_error(specdec("drafters", "demo", *traces), 2, ("--traces", "t.jsonl"))
    assert_one_clear_error(specdec("drafters", "demo", "--model-dir", "demo"), 2, ("two models are given",))
    monkeypatch.setenv("SPECDEC_MODEL_DIR", "demo")  # gives way to the word
    assert_one_clear_error(specdec("drafters", "./none"), 1, ("./none",))


def test_the_table_of_families() -> None:
    qwen3 = {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096}
    assert [one.kind for one in published_for(qwen3, "Qwen3-8B")] == ["pard", "draft-target", "eagle3"]
    assert [one.kind for one in published_for(qwen3 | {"hidden_size": 2560}, "Qwen3-4B")] == ["pard", "draft-target"]
    assert [one.repo for one in published_for(qwen3 | {"hidden_size": 1024}, "Qwen3-0.6B")] == ["amd/PARD-Qwen3-0.6B"]
    distilled = published_for({"model_type": "qwen2", "vocab_size": 152064}, "DeepSeek-R1-Distill-Qwen-7B")
    assert [one.repo for one in distilled] == ["amd/PARD-DeepSeek-R1-Distill-Qwen-1.5B"]
    inside = {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", "hidden_size": 1536}}
    assert [one.repo for one in published_for(inside, "gemma-4-E2B-it")] == ["google/gemma-4-E2B-it-assistant"]
    assert published_for({"model_type": "bloom"}, "bloom") == []
    table = tomllib.loads(Path(published.__file__).with_name("published.toml").read_text("utf-8"))
    kinds = {*DRAFTERS, *(getattr(spec, "kind", "") for spec in DRAFTERS.values())}
    for family in table["family"]:
        assert {*family} <= {"name", "model_type", "vocab_size", "target", "drafters"}
        for one in family["drafters"]:
            assert {*one} <= {"repo", "kind", "hidden_size", "source"} and one["kind"] in kinds
            assert one["source"].startswith("https://")
