"""Limits of an engine: each check raises SpecDecError for a request that the engine can never answer."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from runtime.checkpoint.config import BuildConfig
from runtime.util.errors import SpecDecError

if TYPE_CHECKING:  # commands check an output's length before torch is imported
    from runtime.core.request import Request


def check_output_len(num_output: int, max_request_len: int, num_positions: int | None = None) -> None:
    """SpecDecError for an output so long that no prompt fits beside it in the engine's `max_request_len` tokens, or in
    the model's positions, if their number is known.
    """
    if num_positions is not None and num_output >= num_positions:
        raise SpecDecError(
            f"max_tokens leaves no room for a prompt in the model's {num_positions} positions: {num_output}",
            hint=f"lower `max_tokens` below {min(max_request_len, num_positions)}",
            code="request_past_positions",
            field="max_tokens",
        )
    if num_output >= max_request_len:
        raise SpecDecError(
            f"max_tokens leaves no room for a prompt in the engine's {max_request_len} tokens: {num_output}",
            hint=f"lower `max_tokens` below {max_request_len}, or raise `max_seq_len`",
            code="request_too_long",
            field="max_tokens",
        )


def check_lengths(request: "Request", build: BuildConfig, num_positions: Callable[[], int | None]) -> None:
    """SpecDecError if the prompt is empty, if no token is to be generated, or if the prompt, or the prompt with its
    output, is longer than the engine was built for. `num_positions` gives the model's number of positions, for the
    hint: no engine can be built for more.
    """
    num_prompt, num_output = len(request.prompt_tokens), request.max_new_tokens
    if num_prompt == 0:
        raise SpecDecError(f"prompt is empty: {request.name}", hint="give it at least one token", field="prompt")
    if num_prompt > build.max_input_len:
        said = f"prompt of {request.name} is longer than "
        positions, room = num_positions() or math.inf, build.max_request_len - num_output
        fits = min(build.max_input_len, room) if room > 0 else build.max_input_len
        if num_prompt >= positions:
            raise SpecDecError(
                f"{said}the model's {positions} positions have room for, output included: {num_prompt} tokens",
                hint=f"give at most {fits} tokens",
                code="prompt_past_positions",
                field="prompt",
                fits=fits,
            )
        raise SpecDecError(
            f"{said}the engine's max_input_len {build.max_input_len}: {num_prompt} tokens",
            hint=f"give at most {fits} tokens, or build with a max_input_len of {num_prompt}",
            code="prompt_too_long",
            field="prompt",
            fits=fits,
            num_prompt=num_prompt,
            num_needed=max(min(num_prompt + num_output, positions), build.max_request_len),
        )
    if num_output < 1:
        raise SpecDecError(
            f"number of tokens to generate must be at least 1: {num_output}",
            hint="ask for one or more",
            field="max_tokens",
        )
    if num_prompt + num_output > build.max_request_len:
        room = build.max_request_len - num_prompt
        if num_prompt + num_output > (positions := num_positions() or math.inf):
            raise SpecDecError(
                f"prompt and output of {request.name} exceed the model's {positions} positions: "
                f"{num_prompt} + {num_output}",
                hint=f"lower `max_tokens` to {room}",
                code="request_past_positions",
                field="max_tokens",
            )
        raise SpecDecError(
            f"prompt and output of {request.name} exceed the engine's {build.max_request_len} tokens: "
            f"{num_prompt} + {num_output}",
            hint=f"lower `max_tokens` to {room}, or raise `max_seq_len` to {num_prompt + num_output}",
            code="request_too_long",
            field="max_tokens",
        )


def check_cache_size(request: "Request", num_tokens: int, num_cache_tokens: int) -> None:
    """SpecDecError if an empty K/V cache could not hold this many tokens of the request."""
    if num_tokens > num_cache_tokens:
        raise SpecDecError(
            f"K/V cache of {num_cache_tokens} tokens is too small for {request.name}: it needs {num_tokens}",
            hint="raise max_tokens or free_gpu_memory_fraction of the K/V cache",
            code="cache_too_small",
        )


def check_vocabulary(request: "Request", vocab_size: int) -> None:
    """SpecDecError if a token id of the request is outside the vocabulary, or if `top_k` or the number of
    log-probabilities exceeds the vocabulary's size.
    """
    ids, sampling = f"ids are 0 to {vocab_size - 1}", request.sampling
    for field, tokens, hint in (
        ("prompt", request.prompt_tokens, f"{ids}; text needs the tokenizer that the model was trained with"),
        ("bad_words", [token for word in sampling.bad_words for token in word], "leave it out"),
        ("allowed_token_ids", sampling.allowed_token_ids or (), ids),
        ("logit_bias", [token for token, _ in sampling.logit_bias], ids),
    ):
        foreign = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if foreign is not None:
            raise SpecDecError(
                f"{field} of {request.name} has a token id outside the vocabulary of {vocab_size}: {foreign}",
                hint=hint,
                field=field,
            )
    num_logprobs = max(request.num_logprobs or 0, request.num_prompt_logprobs or 0)
    if num_logprobs > vocab_size:
        raise SpecDecError(
            f"logprobs of more tokens than the vocabulary of {vocab_size} has: {num_logprobs}",
            hint="ask for fewer",
            field="logprobs",
        )
    if request.sampling.top_k > vocab_size:
        raise SpecDecError(
            f"top_k exceeds the vocabulary of {vocab_size}: {request.sampling.top_k}",
            hint="give at most the size of the vocabulary, or 0 for all tokens",
            field="top_k",
        )


def check_draft_len(max_draft_len: int, engine_max_draft_len: int) -> None:
    """SpecDecError if drafts are longer than the engine was built for."""
    if max_draft_len > engine_max_draft_len:
        raise SpecDecError(
            f"draft length exceeds the engine's max_draft_len {engine_max_draft_len}: {max_draft_len}",
            hint=f"lower the draft length, or build with a max_draft_len of {max_draft_len}",
            code="draft_len",
            max_draft_len=max_draft_len,
        )
