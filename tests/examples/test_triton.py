"""`examples/triton`: the models of the repository, called as Triton's Python backend would, against `LLM` by itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shared import MakeEngineDir
from tiny import make_model
from transformers import PreTrainedTokenizerFast
from triton_python_backend_utils import SERVER, InferenceRequest, InferenceResponse, Model, Tensor, parse_config

from specdec_cli import LLM, SamplingParams

REPOSITORY = Path(__file__).parents[2] / "examples" / "triton"
PROMPT = "The little dog had a red ball. The little dog had a"
TYPES: dict[str, Any] = {"temperature": np.float32, "top_p": np.float32, "random_seed": np.uint64}


def tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, str | list):
        words = [value] if isinstance(value, str) else value
        return Tensor(name, np.array([word.encode() for word in words], np.object_))
    return Tensor(name, np.array([value], TYPES.get(name, np.int32)))


def infer(**given: Any) -> InferenceResponse:
    outputs = [one["name"] for one in SERVER["specdec_bls"].config["output"]]
    return InferenceRequest("specdec_bls", [tensor(*one) for one in given.items()], outputs).exec()


def ask(**given: Any) -> dict[str, Any]:
    response = infer(**given)
    assert not response.has_error(), response.error()
    found = {one.name(): one.as_numpy() for one in response.output_tensors()}
    return {name: value.tolist() if name == "output_ids" else value[0] for name, value in found.items()}


@pytest.fixture(scope="module")
def draft_dir(make_engine_dir: MakeEngineDir, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A model that the target agrees with often, and not always."""
    model = make_model("llama", vocab_size=len(tokenizer))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    return make_engine_dir(model, max_draft_len=0, speculative_decoding_mode="none")


@pytest.fixture(scope="module")
def server(llama_engine_dir: Path, draft_dir: Path) -> Iterator[None]:
    directories = {"specdec_target": llama_engine_dir, "specdec_draft": draft_dir}
    for name, directory in directories.items():
        SERVER[name] = Model(REPOSITORY / name, {"engine_dir": str(directory)})
    SERVER["specdec_bls"] = Model(REPOSITORY / "specdec_bls", {"tokenizer_dir": str(llama_engine_dir)})
    yield
    for model in SERVER.values():
        model.finalize()
    SERVER.clear()


@pytest.fixture(scope="module")
def llm(llama_engine_dir: Path) -> Iterator[LLM]:
    with LLM(llama_engine_dir) as opened:
        yield opened


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_greedy_output_is_the_targets_own(num_draft_tokens: int, llm: LLM) -> None:
    (expected,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=30))
    found = ask(text_input=PROMPT, max_tokens=30, num_draft_tokens=num_draft_tokens)
    assert found["output_ids"] == expected.token_ids
    assert found["text_output"].decode() == expected.text
    assert found["num_steps"] + found["total_accepted_draft_tokens"] == len(expected.token_ids)
    if num_draft_tokens == 0:
        assert (found["total_draft_tokens"], found["acceptance_rate"]) == (0, 0.0)
    else:
        assert 0 < found["total_accepted_draft_tokens"] < found["total_draft_tokens"]
        assert found["acceptance_rate"] == pytest.approx(
            found["total_accepted_draft_tokens"] / found["total_draft_tokens"]
        )


@pytest.mark.usefixtures("server")
def test_every_step_asks_each_model_once() -> None:
    calls = {name: model.num_calls for name, model in SERVER.items()}
    found = ask(text_input=PROMPT, max_tokens=12, num_draft_tokens=4)
    assert SERVER["specdec_target"].num_calls - calls["specdec_target"] == found["num_steps"]
    num_drafts = SERVER["specdec_draft"].num_calls - calls["specdec_draft"]
    assert found["num_steps"] - 1 <= num_drafts <= found["num_steps"]  # nothing is drafted for a last token


@pytest.mark.usefixtures("server")
def test_a_stop_word_ends_the_output_wherever_its_steps_end(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=30))
    assert whole.text is not None
    word = whole.text[6:12]
    (expected,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=30, stop=word))
    for num_draft_tokens in (0, 3, 10):
        found = ask(text_input=PROMPT, max_tokens=30, num_draft_tokens=num_draft_tokens, stop_words=["never", word])
        assert found["text_output"].decode() == expected.text == whole.text[: whole.text.index(word)]


@pytest.mark.usefixtures("server")
def test_an_error_is_that_requests_own_and_the_cache_is_free_afterwards() -> None:
    wrong = {
        "at least 1": {"max_tokens": 0},
        "specdec_target: ": {"max_tokens": 10_000},
        "specdec_draft: ": {"max_tokens": 30, "num_draft_tokens": 4, "temperature": -1.0},
        "drafts of at most 10 tokens: 11": {"max_tokens": 30, "num_draft_tokens": 11},
    }
    for words, given in wrong.items():
        response = infer(text_input=PROMPT, **given)
        error = response.error()
        assert error is not None and words in error.message(), words
    assert len(ask(text_input=PROMPT, max_tokens=5, num_draft_tokens=2)["output_ids"]) == 5
    for name in ("specdec_target", "specdec_draft"):
        blocks = SERVER[name].model._llm.engine._blocks
        blocks.check_integrity()
        assert blocks.num_free_blocks == blocks.num_blocks - 1


def test_configs_name_each_other() -> None:
    configs = {path.parent.name: parse_config(path.read_text()) for path in REPOSITORY.glob("*/config.pbtxt")}
    assert set(configs) == {"specdec_bls", "specdec_target", "specdec_draft"}
    parameters = configs["specdec_bls"]["parameters"]
    assert {parameters[name]["string_value"] for name in ("target_model_name", "draft_model_name")} < set(configs)
