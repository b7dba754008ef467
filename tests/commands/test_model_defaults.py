"""Defaults of sampling: as the model's generation_config.json has it, in every command alike."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import Specdec, edit_json, ids_of
from sentences import Said
from shared import record_anew
from tiny import hf_greedy
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from runtime.checkpoint.generation_config import read_model_defaults
from runtime.core.params import MODEL_DEFAULTS
from specdec_cli import LLM, NgramDrafter, SamplingParams, SpecDecWarning

PROMPT = "the ball the ball the ball the"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)
MESSAGES = [{"role": "user", "content": PROMPT}]
PENALTIES = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
SAMPLED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05}
NUM_TOKENS = 16


def says(engine_dir: Path, directory: Path, **values: Any) -> Path:
    """A copy of the engine whose model says this of how tokens are chosen."""
    shutil.copytree(engine_dir, directory)
    edit_json(directory / "generation_config.json", **values)
    edit_json(directory / "tokenizer_config.json", chat_template=TEMPLATE)
    record_anew(directory)
    return directory


@pytest.fixture(scope="module")
def penalized_dir(llama_engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return says(llama_engine_dir, tmp_path_factory.mktemp("penalized") / "engine", **PENALTIES)


@pytest.fixture(scope="module")
def chatty_dir(llama_engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return says(llama_engine_dir, tmp_path_factory.mktemp("chatty") / "engine", **SAMPLED)


@pytest.fixture(scope="module")
def expected(
    llama_dir: Path, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> list[int]:
    """Tokens of Hugging Face's greedy `generate` for the prompt with such a generation_config.json."""
    directory = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(llama_dir, directory)
    edit_json(directory / "generation_config.json", **PENALTIES)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.generation_config.repetition_penalty == 1.3
    return hf_greedy(model, tokenizer(PROMPT)["input_ids"], NUM_TOKENS, 2)


def test_run_applies_the_models_penalties_as_hugging_face_does(
    specdec: Specdec, penalized_dir: Path, expected: list[int], llama: PreTrainedModel, tokenizer: Any, said: Said
) -> None:
    flags = ["run", "--engine-dir", penalized_dir, "--max-output-len", NUM_TOKENS, "--json", PROMPT]
    result = specdec(*flags)
    assert ids_of(result.document) == [expected]
    said(result, "generation_config.json", "repetition_penalty", "1.3", "no_repeat_ngram_size", "3", "1", "0")
    sampling = result.document["settings"]["sampling"]
    assert {name: sampling[name] for name in PENALTIES} == PENALTIES, "the document has what was applied"
    assert ids_of(specdec(*flags, "--ngram-config", "4,2").document) == [expected]

    plain = hf_greedy(llama, tokenizer(PROMPT)["input_ids"], NUM_TOKENS, 2)
    assert plain != expected
    off = specdec(*flags, "--repetition-penalty", 1, "--no-repeat-ngram-size", 0)
    assert ids_of(off.document) == [plain] and off.stderr == ""


def test_python_applies_them_once_told(penalized_dir: Path, expected: list[int], said: Said) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    with LLM(penalized_dir) as llm:
        with pytest.warns(SpecDecWarning) as told:
            assert llm.generate(PROMPT, greedy)[0].token_ids == expected
            assert llm.generate(PROMPT, greedy, drafter=NgramDrafter())[0].token_ids == expected
        said(told, "repetition_penalty", "1.3")
        assert len(told) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_batch_applies_them_and_samples_as_the_model_says(
    path: str, specdec: Specdec, penalized_dir: Path, chatty_dir: Path, tmp_path: Path
) -> None:
    """A request that says nothing is answered as one that says what the file says."""

    def answers(engine_dir: Path, **fields: Any) -> list[str]:
        asked = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": MESSAGES}
        body = asked | {"model": "engine", "seed": 5, "max_tokens": NUM_TOKENS} | fields
        line = {"custom_id": "a", "method": "POST", "url": path, "body": body}
        name = f"{engine_dir.parent.name}-{'-'.join(fields)}"
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line))
        files = ["-i", tmp_path / f"{name}.jsonl", "-o", tmp_path / f"{name}.out"]
        assert specdec("batch", "--engine-dir", engine_dir, *files).exit_code == 0
        document = json.loads((tmp_path / f"{name}.out").read_text())["response"]["body"]
        return [choice.get("text") or choice["message"]["content"] for choice in document["choices"]]

    if path == "/v1/completions":
        penalties = {"repetition_penalty": PENALTIES["repetition_penalty"]}
        assert answers(penalized_dir) == answers(penalized_dir, **penalties)
        assert answers(penalized_dir, temperature=0) != answers(penalized_dir, temperature=0, repetition_penalty=1.0)
    else:
        given = {name: value for name, value in SAMPLED.items() if name != "do_sample"}
        assert answers(chatty_dir) == answers(chatty_dir, **given) != answers(chatty_dir, temperature=0)


def test_chat_is_sampled_as_the_model_says(specdec: Specdec, chatty_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chat(*flags: object) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT + "\n"))
        return specdec("chat", "--engine-dir", chatty_dir, "--max-output-len", NUM_TOKENS, *flags).stdout

    given = [f for name in ("temperature", "top_k", "top_p", "min_p") for f in (f"--{name}", SAMPLED[name])]
    line = "sampled as the model's generation_config.json says: temperature 0.6, top_p 0.9, top_k 20, min_p 0.05\n"
    by_default, sampled = chat(), chat(*given)
    assert line in by_default and by_default.replace(line, "") == sampled
    assert chat("--temperature", 0) == chat("--top-k", 1) != sampled
    with LLM(chatty_dir) as llm:
        values = {name: value for name, value in SAMPLED.items() if name != "do_sample"}
        assert llm.chat_params() == SamplingParams(max_tokens=None, **values)  # type: ignore[arg-type]
        (output,) = llm.chat(MESSAGES, SamplingParams(seed=0, max_tokens=NUM_TOKENS, **values))
        assert (output.text or "") in by_default
        room = llm.bundle.config.build_config.max_request_len
        (whole,) = llm.chat(MESSAGES)
        assert whole.finish_reason == "end_id" or len(whole.prompt_token_ids) + len(whole.token_ids) == room
        assert "".join(map(str, llm.stream_chat(MESSAGES, SamplingParams(seed=0, max_tokens=8)))) != ""


@pytest.mark.parametrize(
    ("values", "sampling", "not_done"),
    [
        ({}, {}, ()),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}, ()),
        ({"temperature": 0.6, "top_k": -1}, {"temperature": 0.6, "top_k": 0}, ()),
        ({"top_k": 50.0, "num_beams": 1, "typical_p": 1.0, "suppress_tokens": []}, {"top_k": 50}, ()),
        ({"num_beams": 4, "min_new_tokens": 2, "suppress_tokens": [5]}, {},
         ("num_beams", "min_new_tokens", "suppress_tokens")),
    ],
)  # fmt: skip
def test_what_a_file_says(tmp_path: Path, values: dict[str, Any], sampling: dict[str, float], not_done: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    defaults = read_model_defaults(tmp_path, MODEL_DEFAULTS)
    assert (defaults.sampling, defaults.not_done) == (sampling, not_done)
