"""Requests to the loop from clients' bodies: prompts become tokens, and fields become sampling parameters and drafting
settings.
"""

import json
import secrets
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from commands.serve.errors import HTTPError, as_http_error
from commands.serve.protocol.conversations import chat_tokens, form_grammar, lacks_switch, tools_of
from commands.serve.protocol.schema import ChatRequest, CompletionRequest, Generation, Speculative, text_of
from commands.serve.served import ServedModel
from runtime.core.params import GrammarKind, SamplingParams
from runtime.core.request import Request
from runtime.core.scopes import Scope
from runtime.drafters.chain import FirstOf, LongestMatch
from runtime.drafters.ngram import LONGEST_MATCH, CorpusLookup
from runtime.drafters.opened import BoundedDrafter
from runtime.drafters.prediction import PredictionLookup
from runtime.drafters.protocol import Drafter
from runtime.drafters.specs import LookupDrafter, lookups
from runtime.drafters.speculation import Speculation
from runtime.drafters.under_grammar import UnderGrammar
from runtime.loop.serving import ServeRequest
from runtime.text.call_formats import HarmonyCall, JsonCall, NamedCall
from runtime.text.text import encode_text
from runtime.text.token_text import whole_text
from runtime.util.errors import SpecDecError

_DEFAULT_MAX_TOKENS = 16
"""Default of `max_tokens` for completions, as OpenAI has it. A chat's answer may have as many tokens as fit."""
_MOST_COPIED = 1 << 16
"""Number of characters of tool results, the last ones, that are looked up in the form that they would have in a call.
"""
_MOST_TOOLS = 128
"""Number of a request's tools that have pools of their own."""


def ask_completion(served: ServedModel, body: CompletionRequest) -> list[ServeRequest]:
    """`n` requests for each prompt, in order."""
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompts = _prompts(served, body.prompt, _max_prompt_len(served, body, max_tokens))
    return _ask(served, body, prompts, max_tokens, body.logprobs, echoes=bool(body.echo))


def ask_chat(served: ServedModel, body: ChatRequest) -> list[ServeRequest]:
    """`n` requests for the conversation. If `max_tokens` is not given, an answer may have as many tokens as there is
    room for.
    """
    if body.top_logprobs and not body.logprobs:
        raise HTTPError(400, "`top_logprobs` needs `logprobs`: true", param="top_logprobs", code="invalid_value")
    tools_of(body)  # errors in the tools are reported first
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if max_tokens == 0:
        name = body.field_names.get("max_tokens", "max_tokens")
        raise HTTPError(400, f"{name}: must be at least 1: 0", param=name, code="invalid_value")
    prompt = served.llm.encode(chat_tokens(served, body), _max_prompt_len(served, body, max_tokens))[0]
    num_free = max(served.max_model_len - len(prompt), 1)
    if max_tokens is None or (body._takes_what_fits and max_tokens > num_free):
        max_tokens = num_free
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    grammar = form_grammar(served, body, prompt)
    asked = _ask(served, body, [prompt], max_tokens, logprobs)
    if copied := _copied_tokens(served, body):
        asked = [replace(one, copied_tokens=copied) for one in asked]
    if grammar is not None:
        asked = [replace(one, request=replace(one.request, grammar=grammar)) for one in asked]
    return asked


def _max_prompt_len(served: ServedModel, body: Generation, max_tokens: int | None) -> int | None:
    """Number of a prompt's last tokens that are kept; None for all."""
    if body.truncate_prompt_tokens is None:
        return None
    params = SamplingParams(truncate_prompt_tokens=body.truncate_prompt_tokens, max_tokens=max_tokens or None)
    return served.llm.max_prompt_len(params)


def _prompts(served: ServedModel, prompt: str | Seq[Any], max_length: int | None) -> list[list[int]]:
    """The tokens of each prompt of a body, which has one prompt or several, as texts or token ids."""
    is_one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
    prompts = [prompt] if is_one else prompt
    if len(prompts) > served.loop.capacity:
        raise HTTPError(400, f"more prompts than this server takes at once: {len(prompts)}", param="prompt")
    for one in prompts:
        if isinstance(one, str):
            served.check_text_len(len(one), "prompt")
    return [served.llm.encode(one, max_length)[0] for one in prompts]


def _ask(
    served: ServedModel,
    body: Generation,
    prompts: list[list[int]],
    max_tokens: int,
    logprobs: int | None,
    *,
    echoes: bool = False,
) -> list[ServeRequest]:
    n = body.n or 1
    if len(prompts) * n > served.loop.capacity:
        what = f"more outputs than this server takes at once, prompts x `n`: {len(prompts)} x {n}"
        raise HTTPError(400, what, param="n")
    if max_tokens == 0 and not echoes:
        raise HTTPError(400, "max_tokens is 0 without `echo`: nothing was asked", param="max_tokens")
    params = _params(served, body, max(max_tokens, 1), logprobs)
    by_default, drafter = _drafting(served, body)
    template = replace(served.llm.request_of(params), label="the request", scopes=_scopes(body))
    if any(scope.kind == "tool" for scope in template.scopes):
        template = replace(template, decode=partial(whole_text, served.tokenizer, with_special=True))
    if echoes:
        template = replace(template, num_prompt_logprobs=logprobs)
    asked = []
    for prompt in prompts:
        for_prompt = template if body.seed is not None else _with_any_seed(template)
        for index in range(n):
            request = for_prompt.with_prompt(served.loop.next_request_id(), prompt, index)
            request = served.llm.after_thinking(request)
            priority = body.priority or 0
            asked.append(ServeRequest(request, by_default, drafter, counts_output=max_tokens > 0, priority=priority))
    return asked


def _scopes(body: Generation) -> tuple[Scope, ...]:
    """Names of pools for a request's outputs in addition to its owner's, the most specific first."""
    scopes = [Scope.of("schema", [kind, value]) for _, kind, value in body.forms]
    if isinstance(body, ChatRequest):
        tools = [one.function for one in body.callable_tools[:_MOST_TOOLS]]
        scopes = [Scope.of("tool", one.model_dump(), one.name) for one in tools] + scopes
        system = [one.text for one in body.messages if one.role in ("system", "developer")]
        scopes += [Scope.of("system", system)] if system else []
    return tuple(scopes)


def _with_any_seed(request: Request) -> Request:
    sampling = replace(request.sampling, random_seed=secrets.randbits(63))
    return replace(request, sampling=sampling)


def _params(served: ServedModel, body: Generation, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """Sampling parameters of a request: the fields that it gives, then the model's own defaults, then OpenAI's."""
    values: dict[str, Any] = _with_form(served, body, served.defaults | body.given_params)
    if isinstance(body, ChatRequest) and lacks_switch(served, body):
        values["thinking_token_budget"] = 0
    own = {"max_tokens": max_tokens, "logprobs": logprobs}
    return SamplingParams(**values | own | {"penalize_prompt": False})


def _with_form(served: ServedModel, body: Generation, values: dict[str, Any]) -> dict[str, Any]:
    """Parameters with the grammar that the request asks for, in place of the server's own."""
    if not body.forms:
        return values
    (field, kind, value), *others = body.forms
    if others:
        names = " and ".join(dict.fromkeys(f"`{name}`" for name, *_ in body.forms))
        what = f"an output can have only one form, and the request gives several: {names}"
        raise HTTPError(400, what, param=others[0][0])
    form: dict[str, Any] = {kind: value}
    try:
        served.llm.grammar(SamplingParams(**form))
    except SpecDecError as error:
        raise as_http_error(error, field) from None
    return {name: value for name, value in values.items() if name not in get_args(GrammarKind)} | form


def _drafting(served: ServedModel, body: Generation) -> tuple[bool, Drafter | None]:
    """True if the server's drafter drafts for a request; otherwise False and the request's own drafter, if it has one:
    the drafter that `speculative` names, and before it the prediction, if there is one.
    """
    if body.speculative is False:
        return False, None
    default = served.loop.default_drafter
    if body.speculative is True and default is None:
        raise HTTPError(400, "this server was started without a drafter", param="speculative")
    drafter = default
    if isinstance(body.speculative, Speculative):
        try:
            drafter = _own_drafter(served, body.speculative, body._corpus_owners)
        except SpecDecError as error:
            raise as_http_error(error, "speculative") from None
    if body.prediction is not None:
        served.check_drafts_fit(1, "prediction")
        text = text_of(body.prediction.content)[: served.max_text_len]  # no answer is longer
        tokens = encode_text(served.tokenizer, text)[: served.max_model_len]
        predicted = UnderGrammar(PredictionLookup(tokens))
        drafter = predicted if drafter is None else FirstOf([predicted, drafter])
    return (True, None) if drafter is default else (False, drafter)


def _copied_tokens(served: ServedModel, body: ChatRequest) -> list[int]:
    """Tokens of tool results, written as the arguments of a call would have them: a file's text has other tokens in a
    JSON string. Results whose text is the same in a JSON string are left out. Empty if the model's calls are not in
    JSON, if the model may call no tool, or if the server's drafter does not draft.
    """
    form = served.tool_format
    is_json = form is not None and isinstance(form.call, JsonCall | NamedCall | HarmonyCall)
    if not is_json or not body.callable_tools or body.speculative is False or served.loop.default_drafter is None:
        return []
    texts = [message.text for message in body.messages if message.role == "tool"]
    written = "\n".join(json.dumps(text, ensure_ascii=False) for text in texts if set(text) & set('\n"\\'))
    return encode_text(served.tokenizer, written[-_MOST_COPIED:])


def _own_drafter(served: ServedModel, asked: Speculative, owners: Seq[str | None]) -> Drafter | None:
    """The lookup that a request names, or else the server's own drafter, together with the owners' corpora that the
    request names. Drafts are at most as long as the request says.
    """
    own = _own_lookup(asked)
    if asked.draft_len is not None:
        served.check_drafts_fit(asked.draft_len, "speculative")
    longest = served.llm.engine.max_draft_len
    if own is None:
        drafter = served.loop.default_drafter
        if drafter is None and not asked.corpora:
            raise HTTPError(400, "this server has no drafter, and the request names none", param="speculative")
    else:
        speculation, pools = Speculation((own,)), served.loop.owner_pools
        speculation.check_fits(served.llm.bundle.config.build_config)
        own = own if pools is None else speculation.with_owner_pools().lookup
        assert own is not None
        opened = own.open_lookup(None, owner_pools=pools)
        longest = opened.max_draft_len or longest
        drafter = BoundedDrafter(UnderGrammar(opened.drafter), longest)
    if asked.corpora:
        served.check_drafts_fit(1, "speculative")
        with served.turn.left():  # an index of several corpora is made when it is first asked for
            index = served.corpora.find(owners, asked.corpora)
        of_corpus = BoundedDrafter(UnderGrammar(CorpusLookup(index, LONGEST_MATCH)), longest)
        drafter = of_corpus if drafter is None else LongestMatch([drafter, of_corpus])
    if drafter is None or asked.draft_len is None:
        return drafter
    return BoundedDrafter(drafter, asked.draft_len)


def _own_lookup(asked: Speculative) -> LookupDrafter | None:
    """The lookup that a request names, with its settings."""
    configs = {spec: getattr(asked, spec.description.flag) for spec in lookups()}
    named = {spec: config for spec, config in configs.items() if config is not None}
    if len(named) > 1:
        flags = " and ".join(f"`{spec.description.flag}`" for spec in named)
        raise HTTPError(400, f"{flags} cannot be given together", param="speculative")
    for spec, config in named.items():
        return spec(**spec.description.form.parse(str(config), spec.description.flag).values)
    return None
