"""Programs that others wrote against a server of ours, unmodified: OpenAI's client, and LangChain's.

pip install openai langchain-openai; specdec serve --model-dir demo --spec-decode-algo NGRAM
python -m scripts.tools.serve_clients http://localhost:8000

Every request must be answered, and a stream must say what the whole answer says. Exit 1 if one does not.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import openai
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, OpenAI

URL = f"{sys.argv[1].rstrip('/')}/v1"
CODE = "def area(width, height):\n    return width * height\n"
NUM_TOKENS = 20


def messages(text: str) -> Any:
    return [{"role": "user", "content": text}]


class OpenAIClient:
    """The synchronous client."""

    def __init__(self) -> None:
        self.client = OpenAI(base_url=URL, api_key="none", max_retries=0)
        self.model = self.client.models.list().data[0].id

    def chat(self, i: int) -> None:
        said = self.client.chat.completions.create(
            model=self.model, messages=messages(f"Tell me {i}"), max_tokens=NUM_TOKENS, temperature=i % 2, seed=i
        )
        assert said.choices[0].message.content is not None and said.usage is not None
        assert said.usage.completion_tokens_details is not None
        assert said.usage.completion_tokens_details.accepted_prediction_tokens is not None

    def stream(self, i: int) -> None:
        asked: dict[str, Any] = {"model": self.model, "messages": messages(f"Tell me {i}"), "max_tokens": NUM_TOKENS}
        whole = self.client.chat.completions.create(**asked, temperature=0).choices[0].message.content
        options = {"include_usage": True}
        chunks = list(self.client.chat.completions.create(**asked, temperature=0, stream=True, stream_options=options))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole
        assert chunks[-1].usage.completion_tokens <= NUM_TOKENS

    def complete(self, i: int) -> None:
        prompts = ["def f(x):", "class A"]
        found = self.client.completions.create(
            model=self.model, prompt=prompts, max_tokens=10, logprobs=2, n=2, temperature=0.5, echo=bool(i % 2)
        )
        assert len(found.choices) == 4 and all(choice.logprobs for choice in found.choices)

    def predict(self, i: int) -> None:
        said = self.client.chat.completions.create(
            model=self.model,
            messages=messages(CODE),
            prediction={"type": "content", "content": CODE},
            max_tokens=2 * NUM_TOKENS,
        )
        assert said.usage is not None and said.usage.completion_tokens > 0

    def refused(self, i: int) -> None:
        try:
            self.client.chat.completions.create(model=f"no-{i}", messages=messages("x"))
        except openai.NotFoundError as error:
            assert error.code == "model_not_found"
        else:
            raise AssertionError("another model answered")


async def many(num: int) -> list[Any]:
    """The asynchronous client: all at once, streamed and not."""
    client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    model = (await client.models.list()).data[0].id

    async def one(i: int) -> None:
        if i % 2:
            stream = await client.chat.completions.create(
                model=model, messages=messages(str(i)), max_tokens=NUM_TOKENS, stream=True
            )
            async for _ in stream:
                pass
        else:
            await client.completions.create(model=model, prompt=str(i), max_tokens=NUM_TOKENS)

    return await asyncio.gather(*(one(i) for i in range(num)), return_exceptions=True)


def main() -> None:
    client = OpenAIClient()
    chat: Any = ChatOpenAI(base_url=URL, api_key="none", model=client.model, max_tokens=NUM_TOKENS, temperature=0)
    errors: list[str] = []

    def lang_stream(i: int) -> None:
        assert "".join(chunk.content for chunk in chat.stream(f"Hello {i}")) == chat.invoke(f"Hello {i}").content

    def attempt(name: str, ask: Callable[[int], Any], num: int) -> None:
        started, before = time.perf_counter(), len(errors)
        for i in range(num):
            try:
                ask(i)
            except Exception as error:  # whatever a client raises is what is looked for
                errors.append(f"{name} {i}: {error!r}")
        print(f"{name}: {num} asked, {len(errors) - before} errors, {time.perf_counter() - started:.1f} s")

    for name, ask, num in (
        ("chat", client.chat, 30),
        ("stream", client.stream, 25),
        ("completions", client.complete, 25),
        ("prediction", client.predict, 10),
        ("refused", client.refused, 10),
        ("LangChain invoke", lambda i: chat.invoke(f"Hello {i}"), 50),
        ("LangChain stream", lang_stream, 25),
        ("LangChain batch", lambda i: chat.batch(["a", "b", "c", "d"]), 10),
    ):
        attempt(name, ask, num)
    failed = [repr(one) for one in asyncio.run(many(100)) if isinstance(one, Exception)]
    print(f"asynchronous: 100 asked, {len(failed)} errors")
    print(f"openai {version('openai')}, langchain-openai {version('langchain-openai')}")
    print("\n".join([*errors, *failed][:10]))
    sys.exit(bool(errors or failed))


if __name__ == "__main__":
    main()
