"""Models by their configs as published, with tokenizers as the hub has them, by every way to run one: Hugging Face's
tokens and texts each time."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Specdec, ids_of
from published import PUBLISHED, RUN, load_hugging_face, seed_of, shrunk, write_model, write_tokenizer
from tiny import hf_greedy
from transformers import AutoTokenizer

from commands.inputs.dataset import summarization_prompt
from runtime.builder.engine_cache import EngineSettings
from runtime.checkpoint.config import BuildConfig
from specdec_cli import LLM, SamplingParams

PROMPT = "Once upon a time there was a little dog. The little dog had a red ball. The"
NUM_TOKENS, LIMIT = 8, 200
NOT_READ_BY_TRANSFORMERS = {"dbrx-instruct"}  # its config.json
LENGTHS = ["--max-seq-len", 192, "--dtype", "float32"]


@pytest.fixture
def without_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a minute for each, and does not matter here."""
    compiled = EngineSettings.build_config

    def build_config(settings: EngineSettings, num_positions: int) -> BuildConfig:
        return replace(compiled(settings, num_positions), compiler="none")

    monkeypatch.setattr(EngineSettings, "build_config", build_config)


def cut(ids: list[int], end_ids: int | list[int] | None) -> list[int]:
    """Up to the first end id, itself included."""
    ends = {end_ids} if isinstance(end_ids, int) else set(end_ids or ())
    return ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))]


@pytest.mark.slow  # `tests/runtime/model/test_published.py` has some of them by default
@pytest.mark.parametrize("name", [name for name in RUN if name not in NOT_READ_BY_TRANSFORMERS])
def test_every_way_gives_hugging_faces_answers(
    name: str, without_compiler: None, specdec: Specdec, articles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published, model_dir = PUBLISHED[name], tmp_path / "model"
    write_model(shrunk(published.config, limit=LIMIT), model_dir, seed_of(name), prompt=[5, 6, 7], num_new_tokens=24)
    write_tokenizer(published, model_dir)
    tokenizer, model = AutoTokenizer.from_pretrained(model_dir), load_hugging_face(model_dir)
    end_ids = model.generation_config.eos_token_id

    def expected(prompt_ids: list[int]) -> list[int]:
        return cut(hf_greedy(model, prompt_ids, NUM_TOKENS), end_ids)

    ids = expected(tokenizer(PROMPT)["input_ids"])
    asked = ["--input-text", PROMPT, "--max-output-len", NUM_TOKENS, "--json"]
    assert ids_of(specdec("run", "--model-dir", model_dir, *LENGTHS, *asked).document) == [ids]

    work: dict[str, Any] = {"checkpoint": tmp_path / "checkpoint", "engine": tmp_path / "engine"}
    convert = ["--model-dir", model_dir, "--output-dir", work["checkpoint"], "--dtype", "float32"]
    assert specdec("convert", *convert).exit_code == 0
    build = ["--max-input-len", 128, "--max-seq-len", 192, "--compiler", "none"]
    built = specdec("build", "--checkpoint-dir", work["checkpoint"], "--output-dir", work["engine"], *build)
    assert built.exit_code == 0, built.stderr
    assert "token ids only" not in built.stderr
    assert ids_of(specdec("run", "--engine-dir", work["engine"], *asked).document) == [ids]

    messages = [{"role": "user", "content": PROMPT}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    reply = expected(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT + "\n"))
    chat = specdec("chat", "--engine-dir", work["engine"], "--max-output-len", NUM_TOKENS, "--temperature", 0)
    assert chat.exit_code == 0, chat.stderr
    assert tokenizer.decode(reply, skip_special_tokens=True).strip() in chat.stdout

    summarize = ["--model-dir", model_dir, *LENGTHS, "--dataset", articles, "--test-engine", "--output-len", NUM_TOKENS]
    document = specdec("summarize", *summarize, "--max-ite", 1, "--json").document
    for one in document["requests"]:
        prompt_ids = tokenizer(summarization_prompt(one["prompt"]))["input_ids"]
        if len(prompt_ids) == len(one["prompt_ids"]):  # no longer than the engine takes
            assert list(one["outputs"].values()) == [expected(prompt_ids)]

    with LLM(str(work["engine"])) as llm:
        output = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))[0]
        before = tokenizer.decode(tokenizer(PROMPT)["input_ids"], skip_special_tokens=True)
        whole = tokenizer.decode([*tokenizer(PROMPT)["input_ids"], *ids], skip_special_tokens=True)
        assert output.token_ids == ids and f"{before}{output.text}" == whole
        assert llm.chat(messages, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))[0].token_ids == reply  # type: ignore[arg-type]
