"""A served tiny model: what fixtures make, and how tests ask it."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from commands.serve.flags import ServerOptions
from commands.serve.http.bodies import Clock
from commands.serve.served import ServedModel
from commands.serve.work import guarded_app, open_served
from runtime.drafters.specs import AnySpec, CustomDrafter
from runtime.engine.engine import KVCacheConfig
from runtime.llm import LLM

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{% endif %}"
    "{% for message in messages %}<{{ message.role }}>"
    "{% if think and message.role == 'assistant' %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% if think %}<think>\n{% endif %}{% endif %}"
    "{# </think> #}"
)
WAITS = CustomDrafter("gate", "Waits")
"""Drafter for a server with the fixture `gate`."""
PROMPT = "The little dog had a red ball. The"


@dataclass
class Served:
    """A running server and what is behind it."""

    client: TestClient
    model: ServedModel

    @property
    def llm(self) -> LLM:
        return self.model.llm

    def post(self, path: str, **body: Any) -> Any:
        return self.client.post(path, json=body)

    def complete(self, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", **({"prompt": PROMPT, "temperature": 0} | body))
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        """The events' documents; that the stream ends as it should is checked."""
        response = self.post(path, **({"stream": True} | body))
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events = response.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    @property
    def num_free_blocks(self) -> int:
        return self.llm.engine._blocks.num_free_blocks


MakeServed = Callable[..., Served]


@contextmanager
def opened(
    engine_dir: Path,
    tokenizer_dir: Path | None,
    drafter: AnySpec | None = None,
    *,
    is_of_this_machine: bool = False,
    kv_cache: KVCacheConfig | None = None,
    **options: Any,
) -> Iterator[tuple[ServedModel, Any]]:
    """The served model, and the application with its guard."""
    options = {"served_model_name": ["tiny", "tiny-alias"]} | options
    with LLM(engine_dir, tokenizer=tokenizer_dir, kv_cache=kv_cache) as llm:
        settings, clock = ServerOptions(**options), Clock()
        names = tuple(settings.served_model_name or ())
        served = open_served(llm, llm.session(drafter, "fixed"), clock, names, settings)
        yield served, guarded_app(served, clock, settings, is_of_this_machine=is_of_this_machine)
        llm.engine._blocks.check_integrity()


@dataclass
class Listening:
    """A server behind a socket of this machine."""

    url: str
    port: int
    model: ServedModel
    connections: set[Any]
