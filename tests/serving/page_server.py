"""Stands in for `specdec serve` to the page: its files, its policy, and streams of tokens with their kinds.

What it streams is fixed, so that a test knows every number that the page is to show.
"""

import base64
import hashlib
import re
from collections.abc import Callable
from importlib.resources import files

from openai_server import DONE, Asked, Piece, Reply, as_json, event, failure

PAGE = files("commands").joinpath("serve/page.html").read_text(encoding="utf-8")
Step = list[tuple[str, str]]

DRAFTED: list[Step] = [
    [("Specu", "plain")],
    [("la", "accepted"), ("tive ", "accepted"), ("dec", "recovered")],
    [("od", "accepted"), ("ing ", "accepted"), ("drafts ", "accepted"), ("cheap ", "bonus")],
    [("tokens.\n", "recovered")],
]
"""Three drafts of 3 tokens: 2, 3 and 0 of them accepted."""
COUNTS = {
    "num_drafts": 3, "num_draft_tokens": 9, "num_accepted_tokens": 5, "acceptance_rate": 5 / 9,
    "accepted_per_position": [2, 2, 1],
    "drafted_per_position": [3, 3, 2],
    "tokens_per_step": 2.25,
}  # fmt: skip
FACTS = {
    "bits": "4 and 8", "dtype": "bfloat16", "machine": "A <b>processor</b>, 2 cores",
    "drafter": "suffix matching, drafts of up to 6 tokens", "max_draft_len": 6,
}  # fmt: skip
TEXT = "Speculative decoding drafts cheap tokens.\n"


def without_drafts(steps: list[Step]) -> list[Step]:
    return [[(text, "plain")] for step in steps for text, _ in step]


def policy() -> str:
    """Policy that the server sets for the page: its own script and style, and requests to itself."""

    def digest(tag: str) -> str:
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
        return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()

    return (
        f"default-src 'none'; script-src 'sha256-{digest('script')}'; style-src 'sha256-{digest('style')}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def streamed(steps: list[Step], wait_s: float, *, chat: bool, counts: dict[str, object] | None) -> list[Piece]:
    pieces = []
    for i, step in enumerate(steps):
        text = "".join(text for text, _ in step)
        choice = {
            "index": 0,
            "finish_reason": "stop" if i == len(steps) - 1 else None,
            "tokens": [{"text": text, "kind": kind} for text, kind in step],
            **({"delta": {"content": text}} if chat else {"text": text}),
        }
        pieces.append((wait_s, event({"choices": [choice], "usage": None})))
    num_tokens = sum(map(len, steps))
    usage = {"prompt_tokens": 9, "completion_tokens": num_tokens, "total_tokens": num_tokens + 9}
    last = {"choices": [], "usage": usage, "metrics": {"speculative_decoding": counts} if counts else None}
    return [*pieces, (0.0, event(last)), (0.0, DONE)]


def serve_page(
    steps: list[Step] = DRAFTED,
    *,
    wait_s: float = 0.02,
    api_key: str | None = None,
    requests: Callable[[], list[dict[str, object]]] = lambda: [],
    generate: Callable[[Asked], Reply] | None = None,
) -> Callable[[Asked], Reply]:
    """The script of a server that answers every prompt with `steps`, slower without speculation."""

    def answer(asked: Asked) -> Reply:
        chat = asked.path == "/v1/chat/completions"
        if "stream" not in asked.body:
            return as_json({"choices": [{"text": "Specu"}], "usage": {}})
        if asked.body.get("speculative") is False:
            return Reply(streamed(without_drafts(steps), wait_s, chat=chat, counts=None))
        return Reply(streamed(steps, wait_s, chat=chat, counts=COUNTS if steps is DRAFTED else None))

    def reply(asked: Asked) -> Reply:
        if asked.path == "/":
            page = [(0.0, PAGE.encode())]
            return Reply(page, 200, "text/html; charset=utf-8", headers=(("content-security-policy", policy()),))
        if api_key is not None and asked.headers.get("authorization") != f"Bearer {api_key}":
            return failure(401, "this server wants an API key")
        if asked.path == "/v1/models":
            names = ("demo", "<i>other</i>")
            return as_json(
                {"object": "list", "data": [{"id": name, "object": "model", "specdec": FACTS} for name in names]}
            )
        if asked.path == "/requests":
            return as_json({"data": requests()})
        return (generate or answer)(asked) if asked.method == "POST" else failure(404, "nothing here")

    return reply
