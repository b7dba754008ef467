"""Commands and servers of models whose layers have states: their answers are Hugging Face's, with drafts and without.

What is theirs alone is in `tests/runtime/engine/test_state_engines.py`. Nothing here is compiled.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command_line import PROMPTS, Specdec, each
from draft_models import WITH_DRAFTS, MakeDraftEngineDir
from fastapi.testclient import TestClient
from sentences import Said
from tiny import hf_greedy, make_model
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from commands.serve.flags import ServerOptions
from commands.serve.http.bodies import Clock
from commands.serve.work import guarded_app, open_served
from runtime.drafters.specs import NgramDrafter
from specdec_cli import LLM

NGRAM = ["--ngram-config", "[4,1,[0]]"]
UNCOMPILED = ["--compiler", "none"]
TEMPLATE = "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}\n{% endfor %}"
NUM_TOKENS = 10


@pytest.fixture(scope="module", params=["lfm2", "qwen3.5", "nemotron-h"])
def hybrid(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return make_model(request.param, vocab_size=len(tokenizer))


@pytest.fixture(scope="module")
def hybrid_dir(
    hybrid: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    directory = tmp_path_factory.mktemp("hybrid")
    hybrid.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [NGRAM, [*NGRAM, "--mode", "leader"], ["--self-draft-config", "[3,[0],False]"]],
    ids=["orchestrator", "leader", "self-draft"],
)
def test_greedy_output_is_hugging_faces(
    arguments: list[str], hybrid: PreTrainedModel, hybrid_dir: Path, specdec: Specdec
) -> None:
    where = ["--model-dir", hybrid_dir, *UNCOMPILED, *each("--input-text", PROMPTS[:3])]
    result = specdec("run", *where, *arguments, "--max-output-len", NUM_TOKENS, "--check-lossless", "--json")
    for one in result.document["requests"]:
        assert one["output_ids"] == hf_greedy(hybrid, one["prompt_ids"], len(one["output_ids"]))


@pytest.mark.slow
def test_drafts_by_probabilities_leave_the_distribution(hybrid_dir: Path, specdec: Specdec) -> None:
    """Compare 2,000 and more steps by chi-squared."""
    sampled = ["--self-draft-config", "[3,[0],True]", "--temperature", 1, "--max-output-len", 16, "--check-lossless"]
    where = ["--model-dir", hybrid_dir, *UNCOMPILED, *each("--input-text", PROMPTS)]
    assert specdec("run", *where, *sampled, "--json").document["checks"]["lossless"]["passed"]


@pytest.mark.slow
def test_a_model_is_split_or_refused(
    hybrid: PreTrainedModel, hybrid_dir: Path, specdec: Specdec, tmp_path: Path, said: Said
) -> None:
    """Split by transformers' plan: there is none of LFM2, and pieces of Nemotron-H's small experts are too small."""
    result = specdec("convert", "--model-dir", hybrid_dir, "--tp-size", 2, "--output-dir", tmp_path / "c")
    if hybrid.config.model_type != "qwen3_5_text":
        assert result.exit_code == 1
        said(result, "lfm2" if hybrid.config.model_type == "lfm2" else "experts")
        return
    assert result.exit_code == 0
    built = [*UNCOMPILED, "--max-draft-len", 4, "--speculative-decoding-mode", "draft_tokens_external"]
    assert specdec("build", "--checkpoint-dir", tmp_path / "c", "--output-dir", tmp_path / "e", *built).exit_code == 0
    where = ["--engine-dir", tmp_path / "e", "--ngram-config", "[4,1,[0,1]]", *each("--input-text", PROMPTS[:2])]
    result = specdec("run", *where, "--max-output-len", NUM_TOKENS, "--json")
    for one in result.document["requests"]:
        assert one["output_ids"] == hf_greedy(hybrid, one["prompt_ids"], len(one["output_ids"]))


@pytest.mark.parametrize(
    "hybrid", ["qwen3.5", *(pytest.param(one, marks=pytest.mark.slow) for one in ("lfm2", "nemotron-h"))], indirect=True
)
def test_a_server_answers_several_at_once(
    hybrid: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, make_draft_engine_dir: MakeDraftEngineDir
) -> None:
    engine_dir = make_draft_engine_dir(hybrid, **WITH_DRAFTS)
    prompts = [3 * prompt for prompt in PROMPTS[:4]]
    with LLM(engine_dir) as llm:
        settings, clock = ServerOptions(), Clock()
        model = open_served(llm, llm.session(NgramDrafter(4, 1), "fixed"), clock, ("tiny",), settings)
        expected = {p: tokenizer.decode(hf_greedy(hybrid, list(llm.encode(p)[0]), NUM_TOKENS)) for p in prompts}
        with TestClient(guarded_app(model, clock, settings, is_of_this_machine=False)) as client:

            def complete(prompt: str, **body: object) -> list[dict[str, object]]:
                asked = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "n": 2, "ignore_eos": True}
                choices: list[dict[str, object]] = client.post("/v1/completions", json=asked | body).json()["choices"]
                return choices

            with ThreadPoolExecutor(8) as executor:
                for prompt, choices in zip(2 * prompts, executor.map(complete, 2 * prompts), strict=True):
                    assert [choice["text"] for choice in choices] == [expected[prompt]] * 2
            scored = [complete(prompts[0], n=1, echo=True, logprobs=1) for _ in range(2)]
            assert scored[0] == scored[1]
            assert str(scored[0][0]["text"]).endswith(expected[prompts[0]])
