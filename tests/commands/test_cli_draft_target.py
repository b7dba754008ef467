"""`run` with a draft model: the text is Hugging Face's whatever the draft model says, and the JSON tells what ran."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import PROMPT, PROMPTS, Result, Specdec, assert_valid, draft_model, each, ids_of, texts_of
from draft_models import WITH_DRAFTS, MakeDraftEngineDir, padded
from sentences import Said
from shared import record_anew
from tiny import hf_greedy, make_model
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

Run = Callable[..., Result]
TOKENS, LOGITS = "[4,[0],[0],False]", "[4,[0],[0],True]"
RULES = pytest.mark.parametrize("config", [TOKENS, LOGITS], ids=["tokens", "logits"])


@pytest.fixture(scope="session")
def draft_engine_dirs(
    draft_engine_dir: Path, equal_draft_engine_dir: Path, make_draft_engine_dir: MakeDraftEngineDir,
    tokenizer: PreTrainedTokenizerFast,
) -> dict[str, Path]:  # fmt: skip
    """A draft model that always agrees with the target, one that sometimes does, one of another family."""
    stranger = make_draft_engine_dir(make_model("qwen3", vocab_size=len(tokenizer)))
    return {"equal": equal_draft_engine_dir, "similar": draft_engine_dir, "strange": stranger}


@RULES
@pytest.mark.parametrize("draft", ["equal", "similar", "strange"])
@pytest.mark.parametrize("num_prompts", [5, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 3))])
def test_greedy_output_is_what_hf_generates(
    run: Run, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, draft_engine_dirs: dict[str, Path],
    config: str, draft: str, num_prompts: int,
) -> None:  # fmt: skip
    """5 prompts are more than max_batch_size 4: they are run in groups."""
    prompts = PROMPTS[:num_prompts]
    flags = draft_model(draft_engine_dirs[draft], config)
    document = run(*each("--input-text", prompts), *flags, "--max-output-len", 24, "--json").document
    assert_valid("run", document)
    assert ids_of(document) == [
        hf_greedy(llama, tokenizer(prompt)["input_ids"], 24, eos_token_id=2) for prompt in prompts
    ]
    total = document["total"]
    assert total["num_draft_tokens"] > 0
    if draft == "equal":
        assert total["num_accepted_draft_tokens"] == total["num_draft_tokens"]
    if draft == "similar":
        assert 0 < total["num_accepted_draft_tokens"] < total["num_draft_tokens"]


@RULES
def test_document_names_the_draft_model_and_its_settings(run: Run, draft_engine_dir: Path, config: str) -> None:
    document = run(*draft_model(draft_engine_dir, config), "--max-output-len", 6, "--json").document
    assert document["settings"]["draft_target_model_config"] == {
        "max_draft_len": 4,
        "draft_device_id": 0,
        "draft_device_ids": [0] if "[0]" in config else None,
        "device_id": 0,
        "device_ids": [0],
        "use_logits": config == LOGITS,
        "draft_engine_dir": str(draft_engine_dir),
    }
    assert document["settings"]["ngram_config"] is None and document["settings"]["drafter"] is None
    built = json.loads((draft_engine_dir / "config.json").read_text())
    assert document["draft_engine"]["engine_dir"] == str(draft_engine_dir)
    assert document["draft_engine"]["build_config"] == built["build_config"]
    assert document["engine"]["engine_dir"] != document["draft_engine"]["engine_dir"]
    plain = run("--max-output-len", 6, "--json").document
    assert plain["draft_engine"] is None and plain["settings"]["draft_target_model_config"] is None


@pytest.mark.parametrize("draft_len", [1, 3, 10])
def test_draft_len_bounds_the_drafts(run: Run, equal_draft_engine_dir: Path, draft_len: int) -> None:
    flags = draft_model(equal_draft_engine_dir, f"[{draft_len},[0],[0],False]")
    total = run(*flags, "--max-output-len", 40, "--end-id", 0, "--json").document["total"]
    assert len(total["num_drafts_per_position"]) == draft_len
    assert total["num_drafts_per_position"][-1] > 0


def test_draft_model_speculates_for_a_compiled_target(
    specdec: Specdec, llama_engine_dir: Path, draft_engine_dir: Path, llama: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
) -> None:  # fmt: skip
    arguments = ["--engine-dir", llama_engine_dir, "--input-text", PROMPT, "--max-output-len", 40, "--json"]
    document = specdec("run", *arguments, *draft_model(draft_engine_dir, LOGITS)).document
    assert ids_of(document) == [hf_greedy(llama, tokenizer(PROMPT)["input_ids"], 40, eos_token_id=2)]
    assert document["total"]["num_accepted_draft_tokens"] > 0


def test_target_as_its_own_draft_model_works_with_a_warning(
    run: Run, llama_engine_dir: Path, tmp_path: Path, said: Said
) -> None:
    plain = run("--max-output-len", 12, "--json").document
    (tmp_path / "link").symlink_to(llama_engine_dir)
    for draft_engine_dir in (llama_engine_dir, tmp_path / "link"):
        result = run(*draft_model(draft_engine_dir), "--max-output-len", 12, "--json")
        assert ids_of(result.document) == ids_of(plain)
        said(result)
        assert result.stderr.count("\n") == 1


def test_other_draft_models_run_without_a_warning(
    run: Run, draft_engine_dir: Path, equal_draft_engine_dir: Path
) -> None:
    for directory in (draft_engine_dir, equal_draft_engine_dir):
        assert run(*draft_model(directory), "--max-output-len", 3).stderr == ""


@RULES
@pytest.mark.parametrize("sampling", [[], ["--temperature", 1.5]], ids=["greedy", "sampling"])
def test_padded_draft_model_proposes_ids_of_the_target_only(
    run: Run, make_draft_engine_dir: MakeDraftEngineDir, tokenizer: PreTrainedTokenizerFast, config: str,
    sampling: list[object],
) -> None:  # fmt: skip
    """The ids of padding are the most probable by far, and the target does not have them."""
    model = padded(make_model("llama", vocab_size=len(tokenizer)), 20)
    model.get_output_embeddings().weight.data[len(tokenizer) :] *= 10
    flags = draft_model(make_draft_engine_dir(model), config)
    document = run(*flags, *sampling, "--max-output-len", 24, "--json").document
    total = document["total"]
    assert total["num_accepted_draft_tokens"] == total["num_draft_tokens"] > 0
    if not sampling or config == TOKENS:
        assert ids_of(document) == ids_of(run(*sampling, "--max-output-len", 24, "--json").document)


@pytest.fixture(scope="session")
def padded_engine_dir(make_draft_engine_dir: MakeDraftEngineDir, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A target with 20 ids that its tokenizer lacks, and that it generates."""
    model = padded(make_model("llama", vocab_size=len(tokenizer)), 20)
    return make_draft_engine_dir(model, **WITH_DRAFTS)


@RULES
def test_padded_target_is_followed_to_its_first_id_of_padding(
    specdec: Specdec, padded_engine_dir: Path, equal_draft_engine_dir: Path, config: str
) -> None:
    """The draft model, which cannot read that id, proposes nothing from there on."""
    arguments = ["--engine-dir", padded_engine_dir, *each("--input-text", PROMPTS), "--end-id", 0]
    arguments += ["--max-output-len", 40, "--json"]
    document = specdec("run", *arguments, *draft_model(equal_draft_engine_dir, config)).document
    model = AutoModelForCausalLM.from_pretrained(padded_engine_dir.parent / "model", attn_implementation="eager")
    for request in document["requests"]:
        expected = hf_greedy(model, request["prompt_ids"], 40, eos_token_id=0)
        assert request["output_ids"] == expected
        num_readable = next(i for i, token in enumerate(expected) if token >= 300)
        assert request["stats"]["num_spec_steps"] <= num_readable + 1
    assert document["total"]["num_accepted_draft_tokens"] > 0


def test_prompt_may_have_an_id_of_padding(
    specdec: Specdec, padded_engine_dir: Path, equal_draft_engine_dir: Path, tmp_path: Path
) -> None:
    """Such as the ids that `--output-csv` wrote: where the target goes on, the draft model has nothing to say."""
    (tmp_path / "ids.csv").write_text("5,310,6\n")
    arguments = ["--engine-dir", padded_engine_dir, "--input-file", tmp_path / "ids.csv", "--max-output-len", 6]
    plain = specdec("run", *arguments, "--json").document
    assert ids_of(specdec("run", *arguments, *draft_model(equal_draft_engine_dir), "--json").document) == ids_of(plain)


def test_top_k_may_be_as_large_as_the_targets_vocabulary(
    specdec: Specdec, padded_engine_dir: Path, equal_draft_engine_dir: Path
) -> None:
    arguments = ["--engine-dir", padded_engine_dir, "--input-text", "The dog", "--top-k", 310, "--max-output-len", 6]
    plain = specdec("run", *arguments, "--json").document
    assert ids_of(specdec("run", *arguments, *draft_model(equal_draft_engine_dir), "--json").document) == ids_of(plain)


def test_draft_model_without_a_tokenizer_is_taken_at_its_vocabularys_size(
    run: Run, bare_draft_engine_dir: Path, said: Said
) -> None:
    result = run(*draft_model(bare_draft_engine_dir), "--max-output-len", 12, "--json")
    assert ids_of(result.document) == ids_of(run("--max-output-len", 12, "--json").document)
    assert result.document["total"]["draft_acceptance_rate"] == 1
    said(result)


def test_tokenizers_are_compared_by_content(run: Run, draft_engine_dir: Path, tmp_path: Path) -> None:
    """The same tokens in another order and layout of the file, and other chat templates beside it."""
    directory = tmp_path / "draft"
    shutil.copytree(draft_engine_dir, directory)
    data = json.loads((directory / "tokenizer.json").read_text())
    data["model"]["vocab"] = dict(reversed(data["model"]["vocab"].items()))
    (directory / "tokenizer.json").write_text(json.dumps(data, indent=7))
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    record_anew(directory)
    result = run(*draft_model(directory), "--max-output-len", 3)
    assert (result.exit_code, result.stderr) == (0, "")


def test_tokenizer_dir_is_what_the_draft_models_tokenizer_is_compared_with(
    run: Run, draft_engine_dir: Path, other_tokenizer: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path, said: Said,
) -> None:  # fmt: skip
    tokenizer.save_pretrained(tmp_path / "same")
    other_tokenizer.save_pretrained(tmp_path / "other")
    arguments = [*draft_model(draft_engine_dir), "--max-output-len", 3, "--tokenizer-dir"]
    assert run(*arguments, tmp_path / "same").exit_code == 0
    translated = run(*arguments, tmp_path / "other")
    assert translated.exit_code == 0 and "drafts are translated by their text" in translated.stderr
    by_probs = [*draft_model(draft_engine_dir, "[4,[0],[0],True]"), "--tokenizer-dir", tmp_path / "other"]
    refused = run(*by_probs, "--temperature", 0.8)
    assert refused.exit_code == 1
    said(refused, "300", draft_engine_dir, "280", tmp_path / "other")


@RULES
@pytest.mark.parametrize(
    "build", [{"max_batch_size": 1}, {"tokens_per_block": 16}, {"max_draft_len": 10, "max_seq_len": 170}]
)
def test_draft_engines_need_not_be_built_alike(
    run: Run, make_draft_engine_dir: MakeDraftEngineDir, tokenizer: PreTrainedTokenizerFast, config: str,
    build: dict[str, object],
) -> None:  # fmt: skip
    mode = {"speculative_decoding_mode": "draft_tokens_external"} if "max_draft_len" in build else {}
    directory = make_draft_engine_dir(make_model("llama", vocab_size=len(tokenizer)), **build, **mode)
    arguments = [*each("--input-text", PROMPTS[:3]), "--max-output-len", 20, "--json"]
    document = run(*arguments, *draft_model(directory, config)).document
    assert ids_of(document) == ids_of(run(*arguments).document)
    assert document["total"]["num_accepted_draft_tokens"] > 0


@RULES
def test_small_kv_caches_give_the_same_text(run: Run, draft_engine_dir: Path, config: str) -> None:
    arguments = [*each("--input-text", PROMPTS[:3]), "--max-output-len", 20, "--json"]
    document = run(*arguments, *draft_model(draft_engine_dir, config), "--max-tokens-in-paged-kv-cache", 48).document
    assert ids_of(document) == ids_of(run(*arguments).document)
    assert document["total"]["num_draft_tokens"] > 0


def test_draft_models_time_is_a_part_of_the_drafting_time(run: Run, draft_engine_dir: Path) -> None:
    total = run(*draft_model(draft_engine_dir), "--max-output-len", 24, "--json").document["total"]
    assert total["num_iterations"] == total["num_steps"]
    assert 0 < total["draft_model_time_s"] < total["draft_time_s"] < total["wall_s"]


def test_only_a_draft_model_has_a_time_of_its_own(run: Run) -> None:
    ngram = run("--ngram-config", "[4,2,[0]]", "--max-output-len", 24, "--json").document["total"]
    assert ngram["draft_time_s"] > ngram["draft_model_time_s"] == 0


def test_terminal_shows_where_the_time_goes(run: Run, draft_engine_dir: Path) -> None:
    shown = run(*draft_model(draft_engine_dir), "--max-output-len", 24).stdout.replace("\n", " ")
    milliseconds = r"[\d.,]+ ms \((\d+\.\d) %\)"
    times = re.search(rf"a step: target {milliseconds}, drafting {milliseconds}.*, host {milliseconds}", shown)
    assert times, shown
    assert sum(map(float, times.groups())) == pytest.approx(100, abs=0.2)


SAMPLING: list[object] = ["--temperature", 0.8, "--random-seed", 3]


@pytest.mark.parametrize(
    ("sampling", "interval"),
    [
        pytest.param([], 3, id="greedy-3"),
        pytest.param(SAMPLING, 1, id="sampling-1"),
        pytest.param([], 1, id="greedy-1", marks=pytest.mark.slow),
        pytest.param(SAMPLING, 3, id="sampling-3", marks=pytest.mark.slow),
    ],
)
@RULES
def test_streamed_text_is_the_text(
    run: Run, draft_engine_dir: Path, config: str, sampling: list[object], interval: int
) -> None:
    arguments = [*draft_model(draft_engine_dir, config), *sampling, "--max-output-len", 40, "--quiet"]
    text = run(*arguments).stdout
    assert run(*arguments, "--streaming", "--streaming-interval", interval).stdout == text
    word = text[20:23]
    stopped = run(*arguments, "--stop-words", word).stdout
    assert word not in stopped and text.startswith(stopped.removesuffix("\n"))
    assert run(*arguments, "--stop-words", word, "--streaming", "--streaming-interval", interval).stdout == stopped


@RULES
def test_end_id_and_stop_words_end_the_text_where_they_do_without_a_drafter(
    run: Run, equal_draft_engine_dir: Path, config: str
) -> None:
    """Ids end at every place inside a run of accepted tokens."""
    flags = draft_model(equal_draft_engine_dir, config)
    free = run("--max-output-len", 12, "--end-id", 0, "--json").document
    (ids,), (text,) = ids_of(free), texts_of(free)
    for end_id in sorted(set(ids)):
        document = run(*flags, "--max-output-len", 12, "--end-id", end_id, "--json").document
        assert ids_of(document) == [ids[: ids.index(end_id) + 1]]
    for word in sorted({text[i : i + 2] for i in range(4, 10)}):
        document = run(*flags, "--max-output-len", 12, "--end-id", 0, "--stop-words", word, "--json").document
        assert texts_of(document) == [text[: text.index(word)]]
