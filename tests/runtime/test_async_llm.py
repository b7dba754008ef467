"""vLLM's shapes of the Python API: results with `n` outputs, an `AsyncLLM`, vLLM's names, and what a text shows."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gate import Gate
from waiting import HANG_S

from runtime.builder.engine_options import OPTIONS
from runtime.drafters.specs import CustomDrafter
from runtime.llm.options import own_names
from specdec_cli import (
    LLM,
    AsyncLLM,
    RequestOutput,
    SamplingParams,
    SpecDecError,
    SuffixDrafter,
    UsageError,
)

PROMPTS = ["The little dog had a red ball. The", "the ball the ball the ball"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=12, logprobs=1, ignore_eos=True, receipt=True)


@pytest.fixture(scope="module")
def llm(llama_engine_dir: Path) -> Iterator[LLM]:
    with LLM(llama_engine_dir) as opened:
        yield opened


def run(engine_dir: Path, work: Any, **options: Any) -> Any:
    """The result of `work` with an `AsyncLLM`."""

    async def with_llm() -> Any:
        async with AsyncLLM(engine_dir, **options) as llm:
            return await asyncio.wait_for(work(llm), HANG_S)

    return asyncio.run(with_llm())


async def results_of(llm: AsyncLLM, prompt: Any, params: SamplingParams, **how: Any) -> list[RequestOutput]:
    return [result async for result in llm.generate(prompt, params, **how)]


def test_a_result_for_each_prompt_has_its_n_outputs(llm: LLM) -> None:
    alone = [output for prompt in PROMPTS for output in llm.generate(prompt, SAMPLED)[0].outputs]
    results = llm.generate([{"prompt": PROMPTS[0]}, {"prompt_token_ids": llm.encode(PROMPTS[1])[0]}], SAMPLED)
    assert [(r.request_id, r.prompt, r.finished) for r in results] == [("0", PROMPTS[0], True), ("1", None, True)]
    outputs = [output for result in results for output in result.outputs]
    assert [o.token_ids for o in outputs] == [o.token_ids for o in alone] and [o.index for o in outputs] == [
        0,
        1,
        2,
    ] * 2
    assert (results[0].text, results[0].token_ids) == (outputs[0].text, outputs[0].token_ids)
    assert outputs[0].cumulative_logprob == pytest.approx(sum(one.logprob for one in outputs[0].logprobs or []))


@pytest.mark.parametrize("drafter", [None, SuffixDrafter()], ids=["none", "suffix"])
def test_async_results_grow_to_what_the_llm_generates(llm: LLM, llama_engine_dir: Path, drafter: Any) -> None:
    asked = [(prompt, params) for prompt in PROMPTS for params in (GREEDY, SAMPLED)]

    async def work(asynchronous: AsyncLLM) -> list[list[RequestOutput]]:
        return await asyncio.gather(*(results_of(asynchronous, *one) for one in asked))

    for (prompt, params), results in zip(asked, run(llama_engine_dir, work, drafter=drafter), strict=True):
        (expected,) = llm.generate(prompt, params)
        *earlier, last = results
        assert last.finished and not any(result.finished for result in earlier)
        for found, output in zip(last.outputs, expected.outputs, strict=True):
            assert (found.token_ids, found.text, found.finish_reason, found.receipt) == (
                output.token_ids, output.text, output.finish_reason, output.receipt,
            )  # fmt: skip
            assert bool(found.receipt) == params.receipt
            ours, theirs = ([one.logprob for one in each.logprobs or []] for each in (found, output))
            assert ours == pytest.approx(theirs, abs=1e-4) and len(ours) == (12 if params.logprobs else 0)
        for before, after in pairwise(results):
            for old, new in zip(before.outputs, after.outputs, strict=True):
                assert new.token_ids[: len(old.token_ids)] == old.token_ids and str(new.text).startswith(str(old.text))


def test_request_that_is_aborted_or_left_ends_and_others_go_on(llm: LLM, llama_engine_dir: Path, gate: Gate) -> None:
    """The engine stands still in its fourth step until the first results were read, on the fastest machine too."""
    long = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)

    async def work(asynchronous: AsyncLLM) -> tuple[list[RequestOutput], list[RequestOutput]]:
        other = asyncio.create_task(results_of(asynchronous, PROMPTS[0], long))
        aborted = []
        async for result in asynchronous.generate(PROMPTS[1], long, "mine"):
            aborted.append(result)
            with pytest.raises(UsageError, match="'mine'"):
                await results_of(asynchronous, PROMPTS[0], long, request_id="mine")
            await asynchronous.abort("mine")
            gate.open()
        left = asynchronous.generate(PROMPTS[1], long)
        await anext(left)
        await left.aclose()
        await asynchronous.abort("nobody's")
        finished = await other
        loop = asynchronous._loop
        assert loop is not None
        while loop.num_running or loop.num_waiting:  # they leave the batch before its next step
            await asyncio.sleep(0.01)
        return aborted, finished

    waits = CustomDrafter("gate", "Waits")
    aborted, finished = run(llama_engine_dir, work, drafter=waits, draft_len_mode="fixed")
    assert len(aborted) == 1 and not aborted[0].finished
    assert finished[-1].token_ids == llm.generate(PROMPTS[0], long)[0].token_ids


def test_async_errors_are_raised_where_they_are_asked(llama_engine_dir: Path) -> None:
    async def work(asynchronous: AsyncLLM) -> None:
        with pytest.raises(SpecDecError, match="500"):
            await results_of(asynchronous, [1] * 500, GREEDY)
        waiting = asyncio.create_task(results_of(asynchronous, PROMPTS[0], GREEDY))
        await asyncio.sleep(0)
        asynchronous.close()
        with pytest.raises(SpecDecError, match="closed|shutting down"):
            await waiting

    run(llama_engine_dir, work)


def test_vllms_arguments_are_ours_or_are_answered(llama_engine_dir: Path) -> None:
    asked: list[tuple[dict[str, Any], str]] = [
        ({"enforce_eager": True}, 'compiler="none"'),
        ({"gpu_memory_utilization": 0.5}, "free_gpu_memory_fraction=0.5"),
        ({"max_modellen": 8}, "`max_model_len`"),
        ({"head": ""}, "leave it out"),
        ({"max_num_seqs": 0}, "correct its value"),
        ({"tokenizer": ""}, "leave it out"),
    ]
    for options, answer in asked:
        with pytest.raises(UsageError, match=next(iter(options))) as raised:
            LLM(llama_engine_dir, **options)
        assert answer in str(raised.value.hint)
    LLM(llama_engine_dir, mode="LEADER").close()  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="max_batch_size and max_num_seqs"):
        LLM(llama_engine_dir, max_batch_size=2, max_num_seqs=3)
    words = {"quantization": "none", "kv_cache_dtype": "FP8_E4M3", "dtype": "BFloat16", "draft_vocab": "Auto"}
    meant = {"quantization": None, "kv_cache_dtype": "fp8", "dtype": "bfloat16", "draft_vocab": "Auto"}
    assert own_names(words) == meant  # vLLM's words, and those of flags
    with pytest.raises(UsageError, match="kv_cache_dtype must be .*: 'fp9'") as refused:
        LLM(llama_engine_dir, kv_cache_dtype="fp9")  # type: ignore[arg-type]
    of_flag = OPTIONS["kv_cache_dtype"][1].hint
    assert refused.value.hint == of_flag
    with pytest.raises(UsageError, match="max_model_len and max_seq_len.*: 64, 96"):
        LLM(llama_engine_dir, max_model_len=64, max_seq_len=96)
    with pytest.raises(UsageError, match="`prompt` or `prompt_token_ids`"), LLM(llama_engine_dir) as llm:
        llm.generate({"prompt": "a", "multi_modal_data": {}})  # type: ignore[typeddict-unknown-key]
    drawn = []
    for seed in (1, 1, 2):
        with LLM(llama_engine_dir, seed=seed, max_num_seqs=2, max_model_len=64) as llm:
            assert llm.get_tokenizer()(PROMPTS[0])["input_ids"] == llm.encode(PROMPTS[0])[0]
            drawn.append([llm.generate(PROMPTS[0], SamplingParams(temperature=2.0))[0].token_ids for _ in range(2)])
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0][0] != drawn[0][1]


def test_text_keeps_its_stop_word_if_asked_to(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY)[0].text
    assert whole
    for start in (2, len(whole) // 2, len(whole) - 4):
        word = whole[start : start + 3]
        end = whole.index(word) + len(word)
        for shows, expected in ((False, whole[: end - len(word)]), (True, whole[:end])):
            params = SamplingParams(
                temperature=0, max_tokens=24, ignore_eos=True, stop=word, include_stop_str_in_output=shows
            )
            assert llm.generate(PROMPTS[0], params)[0].text == expected
            assert "".join(str(piece) for piece in llm.stream(PROMPTS[0], params)) == expected


def test_special_tokens_show_if_asked_to(llm: LLM) -> None:
    """The text is as transformers decodes it, without the end id that ended it. A special stop word ends by its id."""
    tokenizer = llm.get_tokenizer()
    end, token = tokenizer.eos_token_id, tokenizer.eos_token
    only_end: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "allowed_token_ids": [end]}

    def text(**params: Any) -> str | None:
        return llm.generate(PROMPTS[0], SamplingParams(**only_end, **params))[0].text

    assert text() == text(ignore_eos=True) == text(skip_special_tokens=False) == ""
    assert text(skip_special_tokens=False, ignore_eos=True) == tokenizer.decode([end] * 4, skip_special_tokens=False)
    assert text(skip_special_tokens=False, include_stop_str_in_output=True) == token
    stopped = llm.generate(PROMPTS[0], SamplingParams(**only_end, ignore_eos=True, stop=token))[0]
    assert stopped.token_ids == [end] and stopped.finish_reason == "end_id"
