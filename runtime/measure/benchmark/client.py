"""A client of OpenAI's HTTP interface: it sends one request, reads the stream, and takes the time of every piece.

Times are `time.perf_counter`'s. Of the server's answer only what is checked here is believed: anything else is a
ServerError, which says what came. Of its speculation it tells in each response, or by counters for Prometheus with
vLLM's names.
"""

import json
import re
import ssl
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx2

from runtime.util.errors import SpecDecError
from runtime.util.reading import shown


@dataclass(frozen=True)
class SpeculationCounts:
    """Counts of one response or of many. `num_steps` is None if it is unknown."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: tuple[int, ...] = ()
    num_steps: float | None = None
    drafted_per_position: tuple[int, ...] | None = None
    """Drafts that reach each position; None where the server does not tell."""

    def since(self, before: "SpeculationCounts") -> "SpeculationCounts":
        """Increase of monotonic counters."""
        longest = max(len(self.accepted_per_position), len(before.accepted_per_position))
        now, then = (_padded(counts.accepted_per_position, longest) for counts in (self, before))
        return SpeculationCounts(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
            tuple(after - earlier for after, earlier in zip(now, then, strict=True)),
        )


def total_counts(counts: Seq[SpeculationCounts]) -> SpeculationCounts:
    """The sum; its steps, and its drafts by position, are known where all are."""
    steps, drafted = [one.num_steps for one in counts], [one.drafted_per_position for one in counts]
    return SpeculationCounts(
        sum(one.num_drafts for one in counts),
        sum(one.num_draft_tokens for one in counts),
        sum(one.num_accepted_tokens for one in counts),
        _sum_by_position([one.accepted_per_position for one in counts]),
        None if any(num is None for num in steps) else sum(num for num in steps if num is not None),
        None if None in drafted else _sum_by_position([one for one in drafted if one is not None]),
    )


def _sum_by_position(counts: Seq[Seq[int]]) -> tuple[int, ...]:
    longest = max(map(len, counts), default=0)
    return tuple(map(sum, zip(*(_padded(one, longest) for one in counts), strict=True)))


def counts_of_response(chunk: dict[str, Any]) -> SpeculationCounts | None:
    """`metrics.speculative_decoding` of a response or of a stream's last chunk, as AIPerf reads it; None without."""
    metrics, usage = chunk.get("metrics"), chunk.get("usage")
    record = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if not isinstance(record, dict):
        return None
    drafts, drafted, accepted = (
        record.get(f"num_{name}", "") for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    positions, per_step = record.get("accepted_per_position") or [], record.get("tokens_per_step")
    reached = record.get("drafted_per_position")
    if not isinstance(positions, list) or not all(
        type(number) is int for number in (drafts, drafted, accepted, *positions)
    ):
        return None
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    num_steps = None
    if isinstance(tokens, int) and isinstance(per_step, int | float) and per_step > 0:
        num_steps = tokens / per_step
    tells = isinstance(reached, list) and [type(number) for number in reached] == [int] * len(positions)
    return SpeculationCounts(
        drafts, drafted, accepted, tuple(positions), num_steps, tuple(reached or ()) if tells else None
    )


_LINE = re.compile(r"vllm:spec_decode_num_(\w+)_total(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'(?:^|,)position="(\d+)"')


def counts_of_prometheus(text: str) -> SpeculationCounts | None:
    """vLLM's counters, summed over engines and models; None for a server that has none of them."""
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        position = _POSITION.search(found[2] or "")
        if found[1] == "accepted_tokens_per_pos" and position is not None:
            positions[int(position[1])] = positions.get(int(position[1]), 0.0) + float(found[3])
        else:
            sums[found[1]] = sums.get(found[1], 0.0) + float(found[3])
    if "drafts" not in sums:
        return None
    return SpeculationCounts(
        int(sums["drafts"]),
        int(sums.get("draft_tokens", 0)),
        int(sums.get("accepted_tokens", 0)),
        tuple(int(positions.get(i, 0)) for i in range(max(positions, default=-1) + 1)),
    )


def _padded(counts: Seq[int], length: int) -> list[int]:
    return [*counts, *[0] * (length - len(counts))]


Endpoint = Literal["completions", "chat"]
FACTS = ("bits", "dtype", "machine", "drafter")
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_MAX_BYTES, _MAX_TOKEN_BYTES = 4_000_000, 20_000
"""Size limits of any answer, and of a stream per requested token: its chunk may have log-probabilities."""
Content = str | list[int] | list[dict[str, str]]
"""A prompt's text, its token ids, or the messages of a conversation."""


class ServerError(Exception):
    """Failure of one request at the server; `status` if it is an HTTP error."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Answer:
    """Response to one request. `piece_times` are those of the chunks that carried text, and `end_s` is the last."""

    arrival_s: float
    start_s: float = 0.0
    end_s: float = 0.0
    piece_times: list[float] = field(default_factory=list)
    text: str = ""
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    speculation: SpeculationCounts | None = None
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.piece_times[0] - self.start_s

    @property
    def latency_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """(end − first token) ÷ (tokens − 1); None for one token."""
        tokens = self.num_tokens
        return (self.end_s - self.piece_times[0]) / (tokens - 1) if tokens > 1 else None

    @property
    def itls_s(self) -> list[float]:
        """The gaps between chunks with text, of which each holds all tokens of a step."""
        return [after - before for before, after in zip(self.piece_times, self.piece_times[1:], strict=False)]

    @property
    def num_tokens(self) -> int:
        """Token count by the server; number of chunks if it has none."""
        return len(self.piece_times) if self.num_output_tokens is None else self.num_output_tokens


def certificates_for(base_url: str) -> ssl.SSLContext:
    """Certificates of the machine, which take a while to read, unless an address of plain HTTP needs none."""
    return httpx2.create_ssl_context(not base_url.lower().startswith("http:"))


class Client:
    """A server's address, and what every request to it has in common."""

    def __init__(
        self, base_url: str, api_key: str | None, timeout_s: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self.facts: dict[str, str] | None = None
        """Facts that `specdec serve` tells in its list of models; None for another server, or before `models`."""
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx2.Timeout(timeout_s, connect=min(timeout_s, 30.0), pool=None)
        certificates = certificates_for(base_url)
        self._http, self._http_anew = (
            httpx2.AsyncClient(
                headers=headers,
                verify=certificates,
                timeout=timeout,
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=num_kept),
            )
            for num_kept in (None, 0)
        )

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()
        await self._http_anew.aclose()

    async def models(self) -> list[str]:
        """The names of the server's models; SpecDecError for a server that does not tell."""
        where = f"{self.base_url}/v1/models"
        try:
            status, text = await self._get(where)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise unreachable(self.base_url, error) from None
        if status != 200:
            raise refused(ServerError(_error_text(status, text), status), where)
        names, self.facts = _model_names(text, where), _facts(text)
        if not names:
            raise SpecDecError(
                f"the server names no model: {where}", hint="give its name", code="server_names_no_model"
            )
        return names

    async def metrics_text(self) -> str | None:
        """Server's Prometheus metrics; None if it has none."""
        try:
            status, text = await self._get(f"{self.base_url}/metrics")
        except httpx2.HTTPError:
            return None
        return text if status == 200 else None

    async def _get(self, url: str) -> tuple[int, str]:
        async with aclosing(await self._send("GET", url)) as response:
            return response.status_code, await _beginning(response)

    async def ask(self, endpoint: Endpoint, body: Mapping[str, Any], answer: Answer) -> None:
        """Send a request and fill in `answer`, or record the error."""
        answer.start_s = answer.end_s = self._clock()
        try:
            async with aclosing(await self._send("POST", self.base_url + PATHS[endpoint], body)) as response:
                if (status := response.status_code) != 200:
                    raise ServerError(_error_text(status, await _beginning(response)), status)
                max_bytes = _MAX_BYTES + _num_tokens_asked(body) * _MAX_TOKEN_BYTES
                await _read_stream(response, answer, max_bytes, self._clock)
        except httpx2.HTTPError as error:
            raise ServerError(_reason(error)) from None

    async def _send(self, method: str, url: str, body: Mapping[str, Any] | None = None) -> httpx2.Response:
        """A kept connection may be one that the server closes at that moment: then it is asked on a new one."""
        request = self._http.build_request(method, url, json=body)
        try:
            return await self._http.send(request, stream=True)
        except (httpx2.RemoteProtocolError, httpx2.ReadError):
            return await self._http_anew.send(request, stream=True)


def request_body(endpoint: Endpoint, model: str, content: Content, max_tokens: int) -> dict[str, Any]:
    """Body of a streaming request with usage at the end."""
    common = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if endpoint == "completions":
        return common | {"prompt": content, "max_tokens": max_tokens}
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    return common | {"messages": messages, "max_completion_tokens": max_tokens}


async def _beginning(response: httpx2.Response) -> str:
    """The text of a response, up to a limit."""
    data = b""
    async for piece in response.aiter_bytes():
        data += piece
        if len(data) > _MAX_BYTES:
            break
    return data[:_MAX_BYTES].decode(errors="replace")


def _num_tokens_asked(body: Mapping[str, Any]) -> int:
    """All outputs' together; 0 for what is no number, which the server will refuse."""
    asked = [body.get(name) for name in ("max_tokens", "max_completion_tokens")]
    most = max((num for num in asked if type(num) is int), default=0)
    n = body.get("n")
    return max(most, 0) * (n if type(n) is int and n > 0 else 1)


async def _read_stream(response: httpx2.Response, answer: Answer, max_bytes: int, clock: Callable[[], float]) -> None:
    is_done = False
    async for event in httpx2.EventSource(response):
        now = clock()
        if response.num_bytes_downloaded > max_bytes:
            raise ServerError(f"the stream is longer than {max_bytes} bytes")
        if event.data == "[DONE]":
            is_done = True
        elif not is_done and event.data:
            _take_chunk(_parse(event.data), answer, now)
    if not is_done:
        raise ServerError("the stream ended before `data: [DONE]`")
    if not answer.piece_times:
        raise ServerError("the stream held no token")


def _parse(data: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError):
        raise ServerError(f"the stream holds an event that is not JSON: {shown(data)}") from None
    if not isinstance(chunk, dict):
        raise ServerError(f"the stream holds an event that is no object: {shown(data)}")
    if chunk.get("error"):
        raise ServerError(f"the server broke off: {_message(chunk['error'])}")
    return chunk


def _take_chunk(chunk: dict[str, Any], answer: Answer, now: float) -> None:
    """A chat's first chunk names the role and carries no text: it is no token, and sets no time.

    Nor does a last one that only says why the answer ended: servers send it when they have cleaned up.
    """
    choices = chunk.get("choices")
    if choices is not None and not (isinstance(choices, list) and all(isinstance(c, dict) for c in choices)):
        raise ServerError(f"the stream holds choices that are no list of objects: {shown(choices)}")
    for choice in choices or []:
        text, reason = _text_of(choice), choice.get("finish_reason")  # text-generation-inference has "" for none
        # An end id is a token without text: where nothing else was generated it is the first one.
        if text or (reason and not answer.piece_times):
            answer.piece_times.append(now)
            answer.end_s = now
            answer.text += text
        if reason:
            answer.finish_reason = str(reason)
    _take_counts(chunk, answer)
    answer.speculation = counts_of_response(chunk) or answer.speculation


def _take_counts(chunk: dict[str, Any], answer: Answer) -> None:
    """Take the numbers of tokens so far; the last report counts for the whole answer.

    OpenAI sends `usage` in its own chunk without choices, and null in all others. vLLM and SGLang send it in every
    chunk under `continuous_usage_stats`, other servers in the chunk with the reason for the end. llama.cpp's `timings`
    tell it if there is no usage; its `prompt_n` leaves out tokens that were in its cache.
    """
    usage, timings = chunk.get("usage"), chunk.get("timings")
    num_output = num_prompt = None
    if isinstance(usage, dict):
        num_output, num_prompt = _count(usage, "completion_tokens"), _count(usage, "prompt_tokens")
    elif isinstance(timings, dict):
        num_output, num_computed = _count(timings, "predicted_n"), _count(timings, "prompt_n")
        num_prompt = None if num_computed is None else num_computed + (_count(timings, "cache_n") or 0)
    answer.num_output_tokens = answer.num_output_tokens if num_output is None else num_output
    answer.num_prompt_tokens = answer.num_prompt_tokens if num_prompt is None else num_prompt


def _text_of(choice: dict[str, Any]) -> str:
    """A completion's text, or a chat's content; a model's visible reasoning counts as generated too."""
    delta = choice.get("delta")
    parts = [choice.get("text")] if not isinstance(delta, dict) else [
        delta.get(name) for name in ("reasoning_content", "reasoning", "content")
    ]  # fmt: skip
    if any(part is not None and not isinstance(part, str) for part in parts):
        raise ServerError(f"the stream holds text that is none: {shown(parts)}")
    return "".join(part for part in parts if part)


def _count(counts: dict[str, Any], name: str) -> int | None:
    """The number; None if it is null or absent, ServerError if it is not a count."""
    value = counts.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise ServerError(f"the server's usage has no count `{name}`: {shown(counts)}")
    return value


def _model_names(text: str, where: str) -> list[str]:
    try:
        return [str(model["id"]) for model in json.loads(text)["data"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SpecDecError(
            f"not an OpenAI-compatible server, its list of models is {shown(text)}: {where}",
            hint="check the address",
            code="not_an_openai_server",
        ) from None


def _facts(text: str) -> dict[str, str] | None:
    """Bits, dtype, machine and drafter of the first model of a list; None where the server does not tell them all."""
    models = json.loads(text)["data"]
    told = models[0].get("specdec") if isinstance(models, list) and models else None
    given = told if isinstance(told, dict) else {}
    found = {name: value for name in FACTS if isinstance(value := given.get(name), str)}
    return found if len(found) == len(FACTS) else None


def unreachable(base_url: str, error: Exception) -> SpecDecError:
    return SpecDecError(
        f"the server cannot be reached ({_reason(error)}): {base_url}",
        hint="check that it runs, and its address",
        code="server_unreachable",
    )


def refused(error: ServerError, where: str) -> SpecDecError:
    """Why a server that was reached answers nothing, as one error."""
    if error.status in (401, 403):
        return SpecDecError(
            f"the server refuses the API key ({error}): {where}", hint="give it one that it knows", code="api_key"
        )
    return SpecDecError(f"{error}: {where}", hint="see what the server prints")


def _error_text(status: int, text: str) -> str:
    """Error message of the server, in OpenAI's form or any other."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    found = data.get("error", data.get("message", data.get("detail"))) if isinstance(data, dict) else None
    said = _message(found) if found else shown(text.strip()) if text.strip() else "nothing more"
    return f"the server answers {status}: {said}"


def _message(error: object) -> str:
    said = error.get("message", error) if isinstance(error, dict) else error
    text = " ".join(str(said).split())
    return text if len(text) <= 300 else f"{text[:297]}..."


def _reason(error: Exception) -> str:
    """Short reason for a connection failure."""
    if isinstance(error, httpx2.TimeoutException):
        return "no answer in time"
    return " ".join(str(error).split()) or type(error).__name__
