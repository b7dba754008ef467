"""An opened model that answers the requests of a batch file, many at a time, as the server answers its clients'
requests.

A result depends on its request and the model alone. It contains no time, no random id and no count of drafts or reused
tokens, so its bytes are the same whenever and wherever it is made. A `Job` holds everything that results depend on, and
how the model is opened, here or on another machine.
"""

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from commands.batch.dispatch import NotAnswered
from commands.batch.flags import BatchDefaults
from commands.batch.lines import BatchRequest
from commands.options.engine_choice import EngineChoice
from commands.options.sampling_flags import given_params
from commands.options.sessions import open_setup
from commands.serve.errors import FieldNames, HTTPError, fields_named
from commands.serve.http.clients import salted
from commands.serve.protocol.asking import ask_chat, ask_completion
from commands.serve.protocol.completions import ChatReply, CompletionReply
from commands.serve.protocol.replies import TokenTexts
from commands.serve.protocol.schema import ChatRequest, CompletionRequest, Generation, validate_body
from commands.serve.served import ServedModel, check_can_serve, prepare_chat
from runtime.checkpoint.bundle import read_bundle
from runtime.checkpoint.checksums import NOT_RECORDED
from runtime.checkpoint.gguf.reader import is_gguf
from runtime.checkpoint.resolve import resolve_tokenizer
from runtime.checkpoint.tokenizer import TOKENIZER_FILES, template_files
from runtime.core.params import SamplingParams
from runtime.core.stats import sum_stats
from runtime.drafters.spec import DraftLenMode
from runtime.drafters.specs import AnswerDrafter
from runtime.drafters.speculation import Speculation
from runtime.llm import LLM
from runtime.loop.serving import LoopLimits, RequestHandle, ServeRequest, ServingLoop, StepFailed
from runtime.loop.session import Session
from runtime.proof.records import Fingerprint
from runtime.util.digests import digest, read_digest
from runtime.util.errors import SpecDecError, UsageError

_MAX_QUEUE_LEN = 1 << 14
_USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")
_OF_STREAMS = ("stream", "return_token_kinds")
_ROUTES: dict[str, tuple[Any, Any, Any]] = {
    "/v1/completions": (CompletionRequest, ask_completion, CompletionReply),
    "/v1/chat/completions": (ChatRequest, ask_chat, ChatReply),
}
"""Routes: each with the class of its body, the function that makes requests from it, and the class of its answer."""


@dataclass(frozen=True)
class Counts:
    """Costs of answering; no result contains them."""

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        mine, others = vars(self), vars(other)
        return Counts(**{name: mine[name] + others[name] for name in mine})


@dataclass(frozen=True)
class Outcome:
    """A request's line in the file of results, without its line feed, and the costs of the answer. `worker` is empty
    for this process.
    """

    id: str
    line: bytes
    counts: Counts = field(default_factory=Counts)
    is_error: bool = False
    worker: str = ""


@dataclass(eq=False)
class Pending:
    """A request that is being answered; `num_left` of its answers have not ended."""

    request: BatchRequest
    body: Generation
    num_left: int
    on_done: Callable[["Pending"], None]
    answers: list[RequestHandle] = field(default_factory=list)


class BatchModel:
    """Answers requests in the running batch of a loop; `close` it."""

    def __init__(
        self,
        llm: LLM,
        session: Session,
        names: tuple[str, ...],
        defaults: BatchDefaults,
        *,
        with_receipts: bool = False,
    ) -> None:
        check_can_serve(llm)
        llm.fingerprint  # noqa: B018  # kept: every result has it
        sampling = given_params(defaults)
        llm.request_of(SamplingParams(**sampling))  # an error for defaults that the model cannot have
        self._with_receipts = with_receipts
        loop = ServingLoop(session, LoopLimits(_MAX_QUEUE_LEN, max_gap_s=math.inf), _notify)  # nobody waits for a token
        values = llm.model_defaults.sampling | sampling | defaults.form.params
        self._served = ServedModel(llm, loop, names, 0, prepare_chat(llm), values)
        self._texts, self._defaults = TokenTexts(self._served), defaults
        loop.start()

    @property
    def fingerprint(self) -> Fingerprint:
        return self._served.fingerprint

    @property
    def window(self) -> int:
        """Number of requests on their way that keep the batch full: twice the batch size."""
        return 2 * self._served.llm.engine.max_batch_size

    @property
    def failure(self) -> SpecDecError | None:
        """Why the engine no longer answers; None while it does."""
        return self._served.loop.failure

    def close(self) -> None:
        self._served.loop.stop(0)

    def submit(self, request: BatchRequest, on_done: Callable[[Pending], None]) -> Outcome | None:
        """Begin to answer a request; `on_done` is called in the loop's thread at the end. Returns an outcome if the
        request is refused, so that there is nothing to wait for. SpecDecError if the engine has ended: that is no
        result of this request.
        """
        names = FieldNames()
        try:
            body, asked = self._ask(request)
            names = FieldNames(body.field_names)
            pending = Pending(request, body, len(asked), on_done)
            pending.answers = self._served.loop.submit(salted(asked, {}, body.cache_salt), pending)
        except SpecDecError as error:
            if self.failure is not None:
                raise
            return _failed(request, names.told(error))
        except HTTPError as error:
            return _failed(request, error)
        except Exception as error:  # one line among many thousands ends none of the others
            return _failed(request, HTTPError(500, f"the request failed: {type(error).__name__}: {error}"))
        return None

    async def answer(self, request: BatchRequest) -> Outcome | NotAnswered:
        """Answer a request, in an event loop that awaits many answers."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Pending] = loop.create_future()

        def on_done(pending: Pending) -> None:
            loop.call_soon_threadsafe(done.set_result, pending)

        return self.submit(request, on_done) or self.outcome(await done)

    def outcome(self, pending: Pending) -> Outcome | NotAnswered:
        """Outcome of a finished request; to be called by its submitter. SpecDecError when the engine has ended."""
        error = next((answer.progress.error for answer in pending.answers if answer.progress.error), None)
        if isinstance(error, StepFailed):
            if self.failure is not None:
                raise self.failure
            return NotAnswered(pending.request.id, error.message)
        if error is not None:
            return _failed(pending.request, FieldNames(pending.body.field_names).told(error))
        request = pending.request
        write = _ROUTES[request.url][2](self._served, pending.body, pending.answers, self._texts, request.custom_id)
        reply = write.document()
        reply |= {"id": f"{reply['id'].partition('-')[0]}-{request.id.rpartition('_')[2]}", "created": 0}
        reply["usage"] = {name: reply["usage"][name] for name in _USAGE}
        del reply["metrics"], reply["system_fingerprint"]  # they differ from machine to machine; receipts may name it
        return Outcome(request.id, result_line(request, 200, reply, None), _counts(pending.answers))

    def _ask(self, request: BatchRequest) -> tuple[Generation, list[ServeRequest]]:
        if request.method != "POST":
            raise HTTPError(405, f"{request.method} {request.url}: Method Not Allowed")
        if request.url not in _ROUTES:
            raise HTTPError(404, f"POST {request.url[:200]}: Not Found; a batch has {' and '.join(_ROUTES)}")
        model, ask, _ = _ROUTES[request.url]
        body = self._completed(validate_body(request.body, model), request)
        with fields_named(FieldNames(body.field_names)):
            return body, ask(self._served, body)

    def _completed(self, body: Any, request: BatchRequest) -> Any:
        """The body, with the number of tokens and the seed filled in if the client left them out."""
        for name in _OF_STREAMS:
            if getattr(body, name):
                raise HTTPError(400, f"a batch cannot stream its answers: `{name}`", param=name, code="unsupported")
        self._served.check_name(body.model)
        changes: dict[str, Any] = {}
        if body.seed is None:
            changes["seed"] = seed_of(request.custom_id, self._defaults.random_seed)
        if body.max_tokens is None and getattr(body, "max_completion_tokens", None) is None:
            changes["max_tokens"] = self._defaults.max_output_len
        if self._with_receipts:
            changes["receipt"] = True
        return body.model_copy(update=changes)


class OwnCrew:
    """A crew of a single worker: the model in this process."""

    def __init__(self, model: BatchModel) -> None:
        self._model = model
        self._done: SimpleQueue[Pending | Outcome] = SimpleQueue()
        self._num_sent = 0

    @property
    def num_free(self) -> int:
        return self._model.window - self._num_sent

    def send(self, request: BatchRequest) -> None:
        outcome = self._model.submit(request, self._done.put)
        self._num_sent += 1
        if outcome is not None:
            self._done.put(outcome)

    def receive(self) -> list[Outcome | NotAnswered]:
        done = [self._done.get()]
        while not self._done.empty():
            done.append(self._done.get())
        self._num_sent -= len(done)
        return [one if isinstance(one, Outcome) else self._model.outcome(one) for one in done]


def seed_of(custom_id: str, random_seed: int) -> int:
    """A seed for a request that names no seed: it depends on `custom_id` and `random_seed` alone, so it is always the
    same.
    """
    return int(digest([str(random_seed), custom_id])[:15], 16)


def failed_outcome(request: BatchRequest, failure: str) -> Outcome:
    """The outcome of a request that failed alone."""
    return _failed(request, HTTPError(500, failure, code="internal_error"))


def result_line(request: BatchRequest, status: int, body: dict[str, Any], error: dict[str, Any] | None) -> bytes:
    """A result in OpenAI's form. An error stands in the body too, as a server would have sent it."""
    response = {"status_code": status, "request_id": request.id.removeprefix("batch_"), "body": body}
    line = {"id": request.id, "custom_id": request.custom_id, "response": response, "error": error}
    return json.dumps(line, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _failed(request: BatchRequest, error: HTTPError) -> Outcome:
    line = result_line(request, error.status, error.body, error.body["error"])
    return Outcome(request.id, line, is_error=True)


def _counts(answers: list[RequestHandle]) -> Counts:
    stats = sum_stats(answer.sequence.stats for answer in answers)
    return Counts(
        sum(len(answer.request.prompt_tokens) for answer in answers),
        stats.num_generated_tokens,
        stats.num_steps,
        stats.num_spec_steps,
        stats.num_draft_tokens,
        stats.num_accepted_draft_tokens,
    )


def _notify(answers: list[RequestHandle]) -> None:
    """Notify, in the loop's thread after a step, all callers that wait for requests whose last answer is complete."""
    for answer in answers:
        pending = answer.owner
        if answer.progress.is_over and isinstance(pending, Pending):
            pending.num_left -= 1
            if not pending.num_left:
                pending.on_done(pending)


@dataclass(frozen=True)
class Job:
    """A model, its settings, and the name by which requests call the model."""

    choice: EngineChoice
    names: tuple[str, ...]
    defaults: BatchDefaults
    with_receipts: bool = False
    """True if every result has receipts."""

    def with_choice(self, choice: EngineChoice) -> "Job":
        return replace(self, choice=choice)

    @contextmanager
    def opened(self) -> Iterator[BatchModel]:
        """The model with its loop; SpecDecError if it cannot be opened."""
        with open_setup(self.choice) as setup:
            model = BatchModel(setup.llm, setup.session, self.names, self.defaults, with_receipts=self.with_receipts)
            try:
                yield model
            finally:
                model.close()

    @property
    def draft_len_mode(self) -> DraftLenMode:
        """The draft length mode that was asked for. If none was, the default of leader mode for an engine that has step
        costs, else `fixed`.
        """
        speculation = self.choice.speculation
        if speculation.draft_len_mode is None and read_bundle(self.choice.engine_dir).has_costs:
            return speculation.default_mode(is_leader=True)
        return speculation.draft_len_mode or "fixed"

    def digest(self) -> str:
        """Digest of everything that results depend on. Settings of drafts are included only if drafts affect which
        tokens are sampled.
        """
        speculation = self.choice.speculation
        parts = [model_digest(self.choice.engine_dir, self.choice.tokenizer_dir), *self.names, repr(self.defaults)]
        if self.defaults.thinking_token_budget is not None:
            parts.append(f"thinking_token_budget={self.defaults.thinking_token_budget}")
        if self.defaults.form.params:
            parts.append(repr(self.defaults.form))
        if self.with_receipts:
            parts.append("receipts")
        if speculation.may_draw_by_probs:
            parts += [repr(speculation.drafters), self.draft_len_mode]
        return digest(parts)


def model_digest(engine_dir: Path, tokenizer_dir: Path | None) -> str:
    """Digest of the model, its build settings and its tokenizer; engines for different processors have the same."""
    config = read_bundle(engine_dir).config
    tokenizer = engine_dir if tokenizer_dir is None else resolve_tokenizer(tokenizer_dir)
    files = [tokenizer] if is_gguf(tokenizer) else [tokenizer / name for name in TOKENIZER_FILES]
    files += [directory / name for name in sorted(NOT_RECORDED) for directory in {engine_dir, tokenizer}]
    files += [file for directory in {engine_dir, tokenizer} for file in template_files(directory)]
    parts = [config.weights_digest, repr(sorted(config.pretrained_config.items())), config.dtype]
    parts += [repr(config.build_config), repr(config.quantization)]
    return digest([*parts, *(f"{path.name} {read_digest(path)}" for path in files if _is_part(path))])


def check_same_everywhere(speculation: Speculation) -> None:
    """UsageError for drafts that decide which tokens are sampled and would differ from run to run."""
    if not speculation.draws_by_probs:
        return
    shares, is_auto = speculation.shares_pool, speculation.draft_len_mode == "auto"
    has_answers = any(isinstance(drafter, AnswerDrafter) for drafter in speculation)
    for is_so, what in ((shares, "a public pool"), (has_answers, "old answers"), (is_auto, "`--draft-len-mode auto`")):
        if is_so:
            raise UsageError(
                f"with use_logits the drafts decide which tokens are sampled, so two runs would differ with {what}",
                hint=f"leave `use_logits` or {what} out",
            )


def _is_part(path: Path) -> bool:
    return path.is_file() and path.name != "config.json"  # an engine's has the time and place of its build
