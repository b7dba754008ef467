"""The Python API: what users import answers as Hugging Face does, with any drafter, and its errors say what to do."""

import dataclasses
import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import copy_with_mtp
from sentences import Said
from shared import record_anew
from tiny import eager_logits, hf_greedy, make_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import specdec_cli
from runtime.builder.profile import Figures, Profile, ProfileEngine, engine_digest, write_profile
from runtime.drafters.speculation import Speculation
from runtime.drafters.speculative_config import speculation_of_config
from specdec_cli import (
    LLM,
    AnswerDrafter,
    ChainDrafter,
    Draft,
    DraftTargetDrafter,
    MtpDrafter,
    NgramDrafter,
    SamplingParams,
    SelfDrafter,
    Sequence,
    SpecDecError,
    SpecDecWarning,
    SuffixDrafter,
    TokenCheck,
    UsageError,
    profile_for,
)

PROMPT = "The little dog had a red ball. The"
PROMPTS = [PROMPT, "Once upon a time there was a little dog. The little", "the ball the ball the ball"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(llama_engine_dir: Path) -> Any:
    with LLM(llama_engine_dir) as opened:
        yield opened


@pytest.fixture(scope="module")
def draft_engine_dir(make_engine_dir: Callable[..., Path], tokenizer: PreTrainedTokenizerFast) -> Path:
    """A draft model with the target's weights."""
    model = make_model("llama", vocab_size=len(tokenizer))
    return make_engine_dir(model, max_draft_len=0, speculative_decoding_mode="none", max_seq_len=160)


@pytest.fixture(scope="module")
def expected(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    return [hf_greedy(llama, tokenizer(prompt)["input_ids"], 24) for prompt in PROMPTS]


class Repeats:
    """A drafter as a user may write it."""

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [Draft(sequence.tokens[-3:][:max_draft_len]) for sequence in sequences]

    def forget(self, request_id: int) -> None: ...


def repeat_last(tokens: list[int], max_draft_len: int) -> list[int]:
    return tokens[-1:] * max_draft_len


@pytest.mark.parametrize(
    "drafter",
    [
        None,
        NgramDrafter(4, 3, min_matching_ngram_size=2, ranking="frequent", pool="public"),
        Repeats(),
        ChainDrafter([SuffixDrafter(2), repeat_last]),
    ],
    ids=lambda drafter: getattr(drafter, "__name__", type(drafter).__name__),
)
def test_greedy_outputs_are_hugging_faces(llm: LLM, expected: list[list[int]], drafter: Any) -> None:
    outputs = llm.generate(PROMPTS, GREEDY, drafter=drafter, draft_len_mode="fixed")
    assert [output.token_ids for output in outputs] == expected
    assert [output.prompt for output in outputs] == PROMPTS
    assert all(output.finish_reason == "length" and output.logprobs is None for output in outputs)
    drafted = sum(output.stats.num_draft_tokens for output in outputs)
    assert (drafted > 0) == (drafter is not None)


def test_sampling_with_a_seed_is_the_same_with_any_drafter(llm: LLM) -> None:
    params = SamplingParams(seed=7, max_tokens=20, n=2, top_p=0.9)
    plain = llm.generate(PROMPT, params)[0].outputs
    drafted = llm.generate(PROMPT, params, drafter=SuffixDrafter())[0].outputs
    assert [o.token_ids for o in plain] == [o.token_ids for o in drafted]
    assert [o.index for o in plain] == [0, 1]
    assert plain[0].token_ids != plain[1].token_ids
    check = llm.check_lossless(PROMPTS, params, drafter=NgramDrafter())
    assert isinstance(check, TokenCheck) and check.passed
    assert (check.num_samples, check.num_identical, check.differences) == (6, 6, ())


def test_logits_and_logprobs_are_the_models_own(llm: LLM, llama: PreTrainedModel) -> None:
    """Hugging Face's, from one forward over prompt and output, whatever is drafted and however tokens are chosen."""
    params = SamplingParams(seed=1, temperature=0.7, repetition_penalty=1.3, max_tokens=16, logprobs=3, ignore_eos=True)
    wants = dataclasses.replace(params, return_generation_logits=True)
    (output,) = llm.generate(PROMPTS[2], wants, drafter=SuffixDrafter())
    tokens = [*output.prompt_token_ids, *output.token_ids]
    logits = eager_logits(llama, tokens).float()[len(output.prompt_token_ids) - 1 : -1]
    assert output.generation_logits is not None
    torch.testing.assert_close(output.generation_logits, logits, atol=1e-4, rtol=0)
    assert llm.generate(PROMPTS[2], params)[0].generation_logits is None
    assert output.logprobs is not None and len(output.logprobs) == 16
    for row, token, one in zip(logits.log_softmax(-1), output.token_ids, output.logprobs, strict=True):
        values, ids = row.topk(3)
        assert one.token == token
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert [i for i, _ in one.top] == ids.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-5)


@pytest.mark.parametrize("prompt", [PROMPT, [5, 6, 7, 5, 6]], ids=["text", "ids"])
def test_pieces_of_a_stream_make_the_output(llm: LLM, prompt: Any) -> None:
    params = dataclasses.replace(GREEDY, logprobs=1)
    (output,) = llm.generate(prompt, params)
    pieces = list(llm.stream(prompt, params, drafter=NgramDrafter()))
    assert "".join(piece.text for piece in pieces) == output.text
    assert [token for piece in pieces for token in piece.token_ids] == output.token_ids
    assert [one.token for piece in pieces for one in piece.logprobs or ()] == output.token_ids
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert [piece.stats.num_steps for piece in pieces] == list(range(1, len(pieces) + 1)), "of the request so far"
    assert pieces[-1].stats.num_generated_tokens == 24 and pieces[-1].stats.tpot_s is not None
    assert output.prompt_token_ids == (prompt if isinstance(prompt, list) else llm.encode(prompt)[0])


def edited_tokenizer(source: Path, directory: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    state = json.loads((directory / "tokenizer.json").read_text())
    edit(state)
    (directory / "tokenizer.json").write_text(json.dumps(state))
    return directory


def with_words_past_the_vocabulary(state: dict[str, Any]) -> None:
    state["model"]["vocab"] |= {f"<w{i}>": i for i in range(300, 340)}


def with_special_tokens_past_the_vocabulary(state: dict[str, Any], special: bool = True) -> None:
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    state["added_tokens"].append({"id": 300, "content": "<image>", **added})


def with_two_words_exchanged(state: dict[str, Any]) -> None:
    vocab = state["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


OTHER_TOKENIZERS: dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[str, ...]]] = {
    "exchanged": (with_two_words_exchanged, ("2", "'a'", "'b'")),
    "merges": (lambda state: state["model"].update(merges=[]), ("1,234.50",)),
    "lower case": (lambda state: state.update(normalizer={"type": "Lowercase"}), ("It's",)),
}


@pytest.mark.parametrize("name", OTHER_TOKENIZERS)
def test_tokenizer_whose_texts_are_not_the_models_is_told(
    name: str, llama_engine_dir: Path, llama_dir: Path, tmp_path: Path, said: Said
) -> None:
    edit, values = OTHER_TOKENIZERS[name]
    other = edited_tokenizer(llama_dir, tmp_path / "other", edit)
    with pytest.warns(SpecDecWarning) as warned, LLM(llama_engine_dir, tokenizer=other):
        pass
    said(warned, *values, str(other))


@pytest.mark.parametrize("edit", [lambda state: None, with_special_tokens_past_the_vocabulary])
def test_tokenizer_with_the_models_words_is_not_told(
    edit: Callable[[dict[str, Any]], Any], llama_engine_dir: Path, tmp_path: Path
) -> None:
    """Special tokens past the vocabulary too, which the model's own tokenizer has, as Gemma's has for images."""
    shutil.copytree(llama_engine_dir, tmp_path / "engine")
    other = edited_tokenizer(tmp_path / "engine", tmp_path / "other", edit)
    shutil.copy(other / "tokenizer.json", tmp_path / "engine")
    record_anew(tmp_path / "engine")
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecDecWarning)
        with LLM(tmp_path / "engine", tokenizer=other) as llm:
            assert llm.generate(PROMPT, GREEDY)[0].token_ids


FOREIGN = {
    "words": (with_words_past_the_vocabulary, "339"),
    "special tokens": (with_special_tokens_past_the_vocabulary, "300"),
    "added words": (partial(with_special_tokens_past_the_vocabulary, special=False), "300"),
}


@pytest.mark.parametrize("has_own", [True, False])
@pytest.mark.parametrize("name", FOREIGN)
def test_tokenizer_with_ids_past_the_vocabulary_is_refused(
    name: str, has_own: bool, llama_engine_dir: Path, llama_dir: Path, tmp_path: Path, said: Said
) -> None:
    """Beside a model without a tokenizer special ones alone are told: they may be the model's."""
    edit, value = FOREIGN[name]
    engine = llama_engine_dir
    if not has_own:
        engine = tmp_path / "engine"
        shutil.copytree(llama_engine_dir, engine)
        for path in engine.glob("*tokenizer*"):
            path.unlink()
        record_anew(engine)
    other = edited_tokenizer(llama_dir, tmp_path / "other", edit)
    if name == "special tokens" and not has_own:
        with pytest.warns(SpecDecWarning) as warned, LLM(engine, tokenizer=other):
            pass
        said(warned, value, "'<image>'", str(other))
        return
    with pytest.raises(SpecDecError) as error:
        LLM(engine, tokenizer=other)
    said(error, value, str(other))


@pytest.mark.parametrize("unknown", ["[UNK]", None])
def test_tokenizer_that_loses_a_plain_text_is_refused(
    unknown: str | None, llama_engine_dir: Path, tmp_path: Path, said: Said
) -> None:
    """One of three words makes nothing of a text, or fails on it."""
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "[UNK]" if unknown else "c": 2}, unk_token=unknown))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token=unknown).save_pretrained(tmp_path / "other")
    with pytest.raises(SpecDecError) as error:
        LLM(llama_engine_dir, tokenizer=tmp_path / "other")
    said(error, "quick brown fox", str(tmp_path / "other"))


def test_tokenizer_that_cannot_be_read_is_named_where_the_user_has_it(
    llama_dir: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, said: Said
) -> None:
    """And not in the engine that was made of the model, in the cache or for this run alone."""
    shutil.copytree(llama_dir, tmp_path / "model")
    state = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    state["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "(a"}, "behavior": "Isolated", "invert": False}
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(state))
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.warns(SpecDecWarning) as warned:
        llm = LLM(tmp_path / "model", compiler="none", use_cache=False)
    said(warned, f"{tmp_path / 'model' / 'tokenizer.json'} ", "Oniguruma")
    with llm, pytest.raises(SpecDecError) as error:
        llm.chat([{"role": "user", "content": "a"}])
    said(error, str(tmp_path / "model" / "tokenizer.json"))


def test_without_a_number_of_tokens_there_are_as_many_as_fit(llm: LLM, said: Said) -> None:
    (output,) = llm.generate(PROMPT, dataclasses.replace(GREEDY, max_tokens=None))
    room = llm.bundle.config.build_config.max_request_len
    assert len(output.prompt_token_ids) + len(output.token_ids) == room
    with pytest.raises(SpecDecError) as raised:
        llm.generate([5] * room, dataclasses.replace(GREEDY, max_tokens=None))
    said(raised)


CONFIGS = {
    "vLLM": ({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2}, NgramDrafter(4, 2)),
    "TensorRT-LLM": ({"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 2}, NgramDrafter(4, 2)),
    "suffix": ({"method": "suffix", "num_speculative_tokens": 3}, SuffixDrafter(3)),
    "answers": ({"method": "answers"}, AnswerDrafter(10)),
    "AUTO": ({"decoding_type": "AUTO", "max_draft_len": 4}, SuffixDrafter(4)),
}
NO_CONFIGS = {
    "empty": {},
    "no method": {"num_speculative_tokens": 4},
    "no model": {"method": "eagle3"},
    "unknown method": {"method": "ngrma"},
    "unknown key": {"method": "ngram", "depth": 3},
    "a key for another": {"method": "suffix", "prompt_lookup_max": 3},
    "a number as text": {"method": "suffix", "num_speculative_tokens": "3"},
}


def test_a_length_with_auto_is_that_of_every_drafter() -> None:
    config = {"method": "auto", "model": "demo-head", "num_speculative_tokens": 2}
    assert [one.max_draft_len for one in speculation_of_config(config, "demo")] == [2, 2]


@pytest.mark.parametrize("case", CONFIGS)
def test_a_speculative_config_is_the_drafter_of_every_call(
    case: str, llama_engine_dir: Path, expected: list[list[int]]
) -> None:
    """And so is the drafter of a profile."""
    config, drafter = CONFIGS[case]
    with LLM(llama_engine_dir, speculative_config=config) as llm:
        assert llm.session() is llm.session(drafter) and llm.session() is not llm.session(NgramDrafter(2, 2))
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
        assert llm.check_lossless(PROMPTS, GREEDY).passed


def test_a_profile_is_the_drafter_of_every_call(llama_engine_dir: Path, tmp_path: Path, said: Said) -> None:
    with LLM(llama_engine_dir) as llm:
        engine = ProfileEngine(str(llama_engine_dir), engine_digest(llm.bundle.config))
    speculation = Speculation((NgramDrafter(4, 2),), "fixed")
    figures = Figures(1, 1, 1.0, None, None, None, 1.0, 1.0)
    write_profile(tmp_path / "profile.json", Profile(engine, speculation, figures))
    with LLM(llama_engine_dir, profile=tmp_path / "profile.json") as llm:
        assert llm.session().speculation == speculation
    with pytest.raises(UsageError) as caught:
        LLM(llama_engine_dir, profile="profile.json", speculative_config={"method": "ngram"})
    said(caught, "profile.json")


@pytest.mark.parametrize("case", NO_CONFIGS)
def test_what_a_speculative_config_cannot_be_is_said(case: str, llama_engine_dir: Path, said: Said) -> None:
    with pytest.raises(UsageError) as caught:
        LLM(llama_engine_dir, speculative_config=NO_CONFIGS[case])
    said(caught)


def test_a_draft_model_that_is_missing_is_said_before_the_target_is_opened(tmp_path: Path, said: Said) -> None:
    """The target is missing too, and nothing asks for it."""
    with pytest.raises(SpecDecError, match=r"\./no-draft") as caught:
        LLM(tmp_path / "no-target", speculative_config={"method": "draft_model", "model": "./no-draft"})
    said(caught, "./no-draft")


def test_parameters_for_each_prompt(llm: LLM, expected: list[list[int]], tokenizer: PreTrainedTokenizerFast) -> None:
    text = llm.generate(PROMPTS[1], GREEDY)[0].text or ""
    word = text[3:6]
    params = [
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=word),
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=[expected[2][2]]),
    ]
    five, stopped, ended = llm.generate(PROMPTS, params)
    assert five.token_ids == expected[0][:5]
    assert (stopped.text, stopped.finish_reason) == (text[: text.find(word)], "stop")
    assert ended.token_ids == expected[2][: expected[2].index(expected[2][2]) + 1] and ended.finish_reason == "end_id"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate([5, 6, 300_000]), "300; 300000"),
        (lambda llm: llm.generate(PROMPT, SamplingParams(max_tokens=200)), "160"),
        (lambda llm: llm.generate([PROMPT] * 2, [GREEDY] * 3), "2; 3"),
        (lambda llm: llm.generate(PROMPT, SamplingParams(stop_token_ids=[999])), "300; 999"),
        (lambda llm: llm.generate(PROMPT, drafter=NgramDrafter(max_draft_len=11)), "10"),
        (lambda llm: llm.generate(PROMPT, drafter=object()), ""),
        (lambda llm: llm.generate(PROMPT, drafter=DraftTargetDrafter(Path("nowhere"))), "nowhere"),
        (lambda llm: llm.stream([5, 300_000]), "300; 300000"),
        (lambda llm: profile_for("nowhere.json", llm.bundle), "nowhere.json"),
        (lambda llm: llm.chat([{"role": "user", "content": "a"}]), ""),
        (lambda llm: llm.generate(None), "None"),
        (lambda llm: llm.generate(5), "5"),
        (lambda llm: llm.generate({"prompt": "a", "image": 1}), "prompt"),
        (lambda llm: llm.generate(b"abc"), "abc"),
        (lambda llm: llm.generate([1.5]), "1.5"),
        (lambda llm: llm.generate([[True]]), "True"),
        (lambda llm: llm.generate([[5, "a"]]), "5, 'a'"),
        (lambda llm: llm.generate("a\ud800"), "'a\\ud800'"),
        (lambda llm: llm.generate([[1, 2]], draft_len_mode="ALWAYS"), "'ALWAYS'; 'fixed'; 'auto'"),
        (lambda llm: llm.generate([[1, 2]], {"temperature": 0}), "SamplingParams"),
        (lambda llm: llm.generate([[1, 2]], drafter=NgramDrafter), "NgramDrafter; class"),
        (lambda llm: llm.check_lossless([], drafter=NgramDrafter()), ""),
        (lambda llm: llm.check_lossless([[1, 2]], drafter=None), ""),
        (lambda llm: LLM("demo", max_model_len=99_999, compiler="none"), "max_model_len; 2048; 99999"),
        (lambda llm: LLM("./no-such-directory"), "./no-such-directory"),
    ],
)
def test_what_cannot_be_is_an_error_with_a_hint(llm: LLM, call: Any, message: str, said: Said) -> None:
    with pytest.raises(SpecDecError) as raised:
        call(llm)
    said(raised, *message.split("; "))
    assert raised.value.hint and "--" not in raised.value.hint


@pytest.mark.parametrize(
    "values",
    [
        *({"n": 0}, {"n": True}, {"n": None}, {"max_tokens": 0}, {"truncate_prompt_tokens": 0}, {"logprobs": -1}),
        *({"temperature": -1.0}, {"top_p": 1.5}, {"top_p": "0.9"}, {"top_p": None}, {"top_k": 2.5}, {"top_k": None}),
        *({"stop": [""]}, {"stop": 5}, {"bad_words": "dog"}, {"bad_words": [5]}, {"repetition_penalty": float("nan")}),
        *({"stop_token_ids": 5}, {"stop_token_ids": ["5"]}, {"logit_bias": {"5": 1.0}}, {"logit_bias": [5]}),
        *({"ignore_eos": "no"}, {"penalize_prompt": 1}, {"return_generation_logits": "x"}, {"min_tokens": -1}),
        *({"min_tokens": 17}, {"min_tokens": 2.5}, {"allowed_token_ids": []}, {"allowed_token_ids": ["a"]}),
    ],
)
def test_parameters_out_of_range_are_refused_when_they_are_made(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as raised:
        SamplingParams(**values)
    assert raised.value.hint


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dtype": "flaot32"}, "dtype 'auto' 'bfloat16' 'flaot32'"),
        ({"max_batch_size": 0}, "max_batch_size at least 1 0"),
        ({"max_batch_size": True}, "max_batch_size integer True"),
        ({"mode": "x"}, "mode 'orchestrator' 'leader' 'x'"),
        ({"kv_cache": 5}, "kv_cache KVCacheConfig 5"),
        ({"compiler": "NOEN"}, "compiler 'aot' 'none' 'NOEN'"),
        ({"self_draft": "int3"}, "self_draft 'int8' 'int4' 'none' 'int3'"),
        ({"use_cache": "no"}, "use_cache True False 'no'"),
        ({"model": None}, "model None"),
    ],
    ids=str,
)
def test_arguments_of_other_types_are_refused_before_an_engine_is_made(
    values: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path))
    with pytest.raises(UsageError) as raised:
        LLM(**({"model": "demo"} | values))
    said(raised, *words.split())
    assert list(tmp_path.iterdir()) == []


def test_public_names_are_loaded_when_asked_for() -> None:
    assert set(specdec_cli.__all__) <= set(dir(specdec_cli))
    assert all(getattr(specdec_cli, name) is not None for name in specdec_cli.__all__)
    code = "import specdec_cli, sys; specdec_cli.NgramDrafter; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
    with pytest.raises(AttributeError):
        specdec_cli.Nothing  # type: ignore[attr-defined]  # noqa: B018


def test_closed_it_says_so(llama_engine_dir: Path, draft_engine_dir: Path, said: Said) -> None:
    llm = LLM(llama_engine_dir)
    pieces = llm.stream(PROMPT, GREEDY)
    next(pieces)
    llm.close()
    llm.close()
    uses: list[Callable[[], object]] = [
        lambda: next(pieces),
        lambda: llm.generate(PROMPT),
        lambda: llm.generate(PROMPT, drafter=DraftTargetDrafter(draft_engine_dir)),
        lambda: llm.stream(PROMPT),
    ]
    for use in uses:
        with pytest.raises(SpecDecError) as raised:
            use()
        said(raised)


def test_end_id_outside_the_vocabulary_is_told_and_ends_nothing(
    llama_engine_dir: Path, tmp_path: Path, said: Said
) -> None:
    """Classes of transformers have one by default, GPT-2's 50256, whatever the vocabulary: they are no damage."""
    shutil.copytree(llama_engine_dir, tmp_path / "engine")
    (tmp_path / "engine" / "generation_config.json").write_text('{"eos_token_id": [2, 50256]}')
    with (
        pytest.warns(SpecDecWarning) as warned,
        LLM(tmp_path / "engine") as llm,
    ):
        assert llm.end_ids == {2}
    said(warned, "300", "50256")


def test_mtp_head_of_its_own_model(tmp_path: Path) -> None:
    """Needs no directory where the model has one; without weights of a head it has none."""
    make_model("llama").save_pretrained(tmp_path / "model")
    with_mtp = copy_with_mtp(tmp_path / "model", tmp_path / "mtp")
    greedy = SamplingParams(temperature=0, max_tokens=16)
    with warnings.catch_warnings(record=True) as said, LLM(with_mtp, compiler="none", use_cache=False) as llm:
        assert not any("no part of the engine" in str(one.message) for one in said)
        (drafted,) = llm.generate([[3, 4, 5, 6]], greedy, drafter=MtpDrafter(), draft_len_mode="fixed")
        (plain,) = llm.generate([[3, 4, 5, 6]], greedy)
        assert drafted.stats.num_draft_tokens > 0
        assert drafted.token_ids == plain.token_ids
        engine_dir = shutil.copytree(llm.bundle.directory, tmp_path / "engine")
    with LLM(engine_dir) as llm:
        with pytest.raises(UsageError, match="no directory of the MTP head is given"):
            llm.generate([[3, 4, 5, 6]], greedy, drafter=MtpDrafter())
        (drafted,) = llm.generate([[3, 4, 5, 6]], greedy, drafter=MtpDrafter(with_mtp), draft_len_mode="fixed")
        assert drafted.token_ids == plain.token_ids
    (with_mtp / "model.safetensors").write_bytes((tmp_path / "model" / "model.safetensors").read_bytes())
    for model, said in (
        (tmp_path / "model", "config.json does not describe a trained drafter"),
        (with_mtp, "no weights of its MTP"),
    ):
        with LLM(model, compiler="none", use_cache=False) as llm, pytest.raises(SpecDecError, match=said):
            llm.generate([[3, 4, 5, 6]], greedy, drafter=MtpDrafter())


@pytest.mark.parametrize("kind", ["head", "copy"])
def test_a_seed_gives_the_same_text_for_a_prompt_that_is_found_again(kind: str, tmp_path: Path) -> None:
    """It did not by probabilities: of a prompt whose keys are there the first token was drafted, for another text."""
    make_model("llama").save_pretrained(tmp_path / "model")
    model = copy_with_mtp(tmp_path / "model", tmp_path / "mtp")
    drafter = MtpDrafter(use_logits=True) if kind == "head" else SelfDrafter(3, use_logits=True)
    options: dict[str, Any] = {"compiler": "none", "use_cache": False, "self_draft": "int8" if kind == "copy" else None}
    prompts = [[3, 4, 5, 6], [*range(5, 30), *range(5, 20)]]
    with LLM(model, **options) as llm:
        for seed in range(2):
            params = SamplingParams(temperature=1.0, max_tokens=8, seed=seed)
            first, *others = [
                [one.token_ids for one in llm.generate(prompts, params, drafter=drafter, draft_len_mode="fixed")]
                for _ in range(3)
            ]
            assert others == [first, first]
        assert llm.generate(prompts, params, drafter=drafter)[0].stats.num_draft_tokens > 0


@pytest.mark.parametrize(("given", "most"), [(100, 100), (None, 4096)])
def test_a_model_that_states_no_positions(given: int | None, most: int, tmp_path: Path) -> None:
    """Mamba's has no such number in its config."""
    model = make_model("mamba", hidden_size=32, num_hidden_layers=1)
    del model.config.max_position_embeddings
    model.save_pretrained(tmp_path / "model")
    with LLM(tmp_path / "model", max_seq_len=given, compiler="none") as llm:
        assert llm.bundle.config.build_config.max_seq_len == most + 10
        output = llm.generate([[5, 6, 7, 5, 6]], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))[0]
    assert output.token_ids == hf_greedy(model, [5, 6, 7, 5, 6], 9)
