"""An `LLM` for asyncio, which has the loop of `specdec serve`."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Unpack

import torch

from runtime.checkpoint.bundle import Bundle
from runtime.checkpoint.config import check_arguments
from runtime.core.generation import Output, RequestOutput
from runtime.core.params import SamplingParams
from runtime.core.request import Sequence
from runtime.drafters.spec import DraftLenMode
from runtime.llm.llm import LLM, AnyDrafter
from runtime.llm.options import LLMOptions
from runtime.llm.prompts import Prompt
from runtime.loop.serving import LoopLimits, RequestHandle, ServeRequest, ServingLoop
from runtime.text.text import TextStream
from runtime.util.at_exit import call_at_exit
from runtime.util.errors import UsageError
from runtime.util.words import chosen


class AsyncLLM:
    """An `LLM` for asyncio: requests come at any time and share steps, in the loop of `specdec serve`.

    `async for result in llm.generate("def area(", params): print(result.text)` gets a result whenever its output has
    grown. All requests have the same drafter. Close it, or use it in an `async with` block.
    """

    def __init__(
        self,
        model: str | Path | Bundle,
        *,
        drafter: AnyDrafter | None = None,
        draft_len_mode: DraftLenMode | None = None,
        max_queue_len: int = 4096,
        **options: Unpack[LLMOptions],
    ) -> None:
        draft_len_mode = chosen(DraftLenMode, draft_len_mode)
        check_arguments(AsyncLLM.__init__, {"max_queue_len": max_queue_len, "draft_len_mode": draft_len_mode})
        self._readers: dict[str, _Reader] = {}
        self._request_ids = count()
        self._loop: ServingLoop | None = None
        call_at_exit(self.close)  # before the `LLM` registers itself
        self.llm = LLM(model, **options)
        try:
            session = self.llm.session(drafter, draft_len_mode)
            self._loop = ServingLoop(session, LoopLimits(max_queue_len), _wake)
            self._loop.start()
        except BaseException:
            self.llm.close()
            raise

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back the engine's memory. Requests that have not ended fail with an error."""
        if self._loop is not None:
            self._loop.stop(0)
            self.llm.close()
            for reader in list(self._readers.values()):
                reader.wake()

    shutdown = close

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer of the model; None for an engine without one."""
        return self.llm.get_tokenizer()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput]:
        """Results for one prompt, each with everything generated so far; the last is `finished`.

        Leaving the iteration early aborts the request, as `abort` with its id does. Requests with the lowest `priority`
        are computed first. SpecDecError if the request cannot be served.
        """
        assert self._loop is not None
        name = f"async-{next(self._request_ids)}" if request_id is None else request_id
        if name in self._readers:
            raise UsageError(
                f"a request that has not ended has this id: {name!r}", hint="give each request an id of its own"
            )
        given, requests = self.llm._requests([prompt], sampling_params)
        named = [dataclasses.replace(request, id=self._loop.next_request_id()) for request in requests]
        asked = [ServeRequest(request, priority=priority) for request in named]
        reader = self._readers[name] = _Reader(asyncio.get_running_loop())
        try:
            reader.handles = self._loop.submit(asked, reader)
            texts = [self._text_of(handle) for handle in reader.handles]
            while not reader.is_aborted:
                await reader.event.wait()
                reader.event.clear()
                self.llm.engine.check_is_open()
                outputs = [text.read() for text in texts]
                if reader.is_aborted or not any(output.token_ids for output in outputs):
                    continue
                finished = all(output.finish_reason is not None for output in outputs)
                text = given[0][0] if isinstance(given[0][0], str) else None
                yield RequestOutput(name, text, list(requests[0].prompt_tokens), outputs, finished)
                if finished:
                    break
        finally:
            self._loop.cancel(reader.handles)
            del self._readers[name]

    async def abort(self, request_id: str) -> None:
        """End a request: its iteration stops without a finished result. An unknown id is ignored, as in vLLM."""
        if (reader := self._readers.get(request_id)) is not None:
            reader.is_aborted = True
            reader.event.set()

    def _text_of(self, handle: RequestHandle) -> "_AnswerSoFar":
        tokenizer = self.llm.tokenizer
        stream = None if tokenizer is None else TextStream.of_request(tokenizer, handle.request)
        return _AnswerSoFar(handle, stream, self.llm._receipt)


@dataclasses.dataclass(eq=False)
class _Reader:
    """An iteration over one prompt's results: the event that wakes it, and the handles of its requests."""

    loop: asyncio.AbstractEventLoop
    event: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    handles: list[RequestHandle] = dataclasses.field(default_factory=list)
    is_aborted: bool = False

    def wake(self) -> None:
        """Wake the iteration, from any thread."""
        with suppress(RuntimeError):  # its event loop was closed in the middle of the iteration
            self.loop.call_soon_threadsafe(self.event.set)


def _wake(handles: list[RequestHandle]) -> None:
    for reader in {handle.owner for handle in handles}:
        assert isinstance(reader, _Reader)
        reader.wake()


@dataclasses.dataclass
class _AnswerSoFar:
    """An answer that the loop's thread is still writing, read as far as its `Progress` says."""

    handle: RequestHandle
    stream: TextStream | None
    receipt_of: Callable[[Sequence], dict[str, Any] | None]
    text: str = ""

    def read(self) -> Output:
        """The result so far; SpecDecError if the request failed."""
        progress, sequence = self.handle.progress, self.handle.sequence
        if progress.error is not None:
            raise progress.error
        request, tokens = self.handle.request, self.handle.output_tokens[: progress.num_tokens]
        if self.stream is not None:
            self.text += self.stream.next_piece(tokens, finished=progress.finish_reason is not None)
        return Output(
            request.return_index,
            None if self.stream is None else self.text,
            tokens,
            progress.finish_reason,
            sequence.stats.copy(),
            None if request.num_logprobs is None else sequence.logprobs[: len(tokens)],
            torch.stack(sequence.logits[: len(tokens)]) if request.keep_logits and tokens else None,
            None if progress.finish_reason is None else self.receipt_of(sequence),
        )
