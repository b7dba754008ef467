"""Prompts that a server computes, or reads from disk, before it listens."""

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from commands.serve.errors import HTTPError
from commands.serve.http.clients import salt_scope, salted
from commands.serve.protocol.asking import ask_chat, ask_completion
from commands.serve.protocol.schema import ChatRequest, CompletionRequest, Generation, validate_body
from commands.serve.served import ServedModel
from runtime.core.request import Request
from runtime.loop import scheduler
from runtime.util.errors import SpecDecError
from runtime.util.reading import read_json_lines, read_utf8


def warm(served: ServedModel, path: Path, keys: Seq[bytes]) -> str:
    """Compute the prompts of a file, for each API key; returns a summary in words. A line is the body of a request, or
    a line of a batch file; with `messages` it is a chat request. `max_tokens`, `n` and `stream` are ignored.
    SpecDecError names a line that is no such body.
    """
    requests = list[Request]()
    owners: Seq[bytes | None] = keys or (None,)
    for number, line in read_json_lines(read_utf8(path), path):
        for key in owners:
            requests += _requests(served, line, f"line {number} of {path}", key)
    before = served.llm.engine.prompt_tokens
    for _ in scheduler.generate(served.llm.engine, requests, served.loop.default_drafter):
        pass
    now = served.llm.engine.prompt_tokens
    num_found = now.num_in_memory + now.num_on_disk - before.num_in_memory - before.num_on_disk
    num_computed = now.num_computed - before.num_computed
    return f"warm: {len(requests)} prompts; of their tokens {num_found:,} were found and {num_computed:,} computed"


def _requests(served: ServedModel, line: Any, where: str, key: bytes | None) -> list[Request]:
    """Requests for the prompts of a body, sent by a client with this key. They generate two tokens, so that a draft
    model reads the prompts too.
    """
    body = line.get("body", line) if isinstance(line, dict) else line
    try:
        asked: Generation
        if isinstance(body, dict) and "messages" in body:
            asked = chat = validate_body(_of_two_tokens(body), ChatRequest)
            made = ask_chat(served, chat)
        else:
            asked = completion = validate_body(_of_two_tokens(body), CompletionRequest)
            made = ask_completion(served, completion)
        for one in made:
            served.llm.engine.check_request(one.request)
    except (HTTPError, SpecDecError) as error:
        raise SpecDecError(
            f"{where} is a request that the server cannot answer: {error}", hint="correct the line"
        ) from None
    return [one.request for one in salted(made, salt_scope(key), asked.cache_salt)]


def _of_two_tokens(body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    kept = {name: value for name, value in body.items() if name not in ("max_completion_tokens", "stream", "n")}
    return kept | {"max_tokens": 2}
