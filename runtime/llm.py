"""A model that answers: text in, text out. What Python users import, and what `run` and `summarize` stand on.

An `LLM` is an opened engine with its tokenizer. It answers prompts in sessions, one for each way to draft; a session is
opened when it is first asked for, and kept, so that a draft model is opened once and lookups remember what they
learned.
"""

import dataclasses
import secrets
import warnings
from collections.abc import Generator, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, closing
from functools import cached_property, partial
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, Unpack

import torch

from runtime.builder.engine_cache import EngineSettings, engine_of_model
from runtime.checkpoint.bundle import Bundle, is_engine_dir, read_bundle
from runtime.checkpoint.checkpoint_dir import check_has_no_head
from runtime.checkpoint.config import Activations, Compiler, Count, Dtype, IntFormat, Size, check_arguments
from runtime.checkpoint.costs import CostModel
from runtime.checkpoint.generation_config import ModelDefaults, read_model_defaults
from runtime.checkpoint.gguf.reader import is_gguf
from runtime.checkpoint.resolve import resolve_tokenizer
from runtime.core.generation import Output, Piece
from runtime.core.grammar import CompiledGrammar, Grammars
from runtime.core.params import GREEDY, MODEL_DEFAULTS, Mode, SamplingParams
from runtime.core.request import Request, Sequence
from runtime.drafters.heads.head_config import DraftOutputSettings, has_mtp_head, hidden_states_for, read_head
from runtime.drafters.plugins import tell_problems
from runtime.drafters.protocol import Drafter, DraftFunction
from runtime.drafters.spec import DraftLenMode
from runtime.drafters.specs import AnySpec
from runtime.drafters.speculation import Speculation
from runtime.engine.devices import check_device_ids
from runtime.engine.engine import DEFAULT_MAX_NUM_TOKENS, Engine, KVCacheConfig
from runtime.loop.compatibility import TargetIdentity, check_corpora
from runtime.loop.opening import Opening, open_drafter
from runtime.loop.session import Session
from runtime.proof.fingerprint import fingerprint_of
from runtime.proof.receipts import read_row, receipt_of
from runtime.proof.records import Fingerprint
from runtime.text.chat import ChatTemplate, Message, TemplateInputs
from runtime.text.text import (
    StopWords,
    TextStream,
    bad_word_tokens,
    check_tokenizer_fits,
    encode,
    find_end_ids,
    find_own_tokenizer,
    load_tokenizer,
    sequence_text,
    stop_words_of,
    tokenizer_of_engine,
    word_tokens,
)
from runtime.util.at_exit import call_at_exit, closed_at_exit
from runtime.util.errors import SpecDecError, SpecDecWarning, UsageError
from runtime.util.locks import MODEL_INIT_LOCK

if TYPE_CHECKING:
    from runtime.loop.lossless.results import LosslessCheck
    from runtime.proof.check import Checker
    from runtime.proof.records import Finding, Rule

Prompt = str | Seq[int]
"""A text, or the ids of its tokens."""
AnyDrafter = AnySpec | Drafter | DraftFunction
"""Drafter in the Python API: settings such as `NgramDrafter()`, or an object or function of the user's own."""


class EngineOptions(TypedDict, total=False):
    """Build options of a model's engine (`runtime.builder.engine_cache.EngineSettings`)."""

    dtype: Literal["auto"] | Dtype
    max_batch_size: Size
    max_seq_len: Size | None
    max_draft_len: Count
    self_draft: IntFormat | None
    head: str | Path | None
    draft_vocab: str | Path | None
    draft_vocab_size: Size | None
    draft_output_layer: IntFormat | None
    draft_layers: IntFormat | None
    activations: Activations | None
    compiler: Compiler | None
    tensor_parallel_size: Size
    use_cache: bool


class _Asked(NamedTuple):
    """Prompt of a request, its index, and whether its outputs have receipts."""

    prompt_index: int
    prompt: Prompt
    with_receipt: bool


class LLM:
    """An engine that answers prompts, opened from its directory, or made of a model (a directory, hub id or `demo`).

    `mode` "leader" keeps sequences in a running batch; "orchestrator" calls the engine once for each step, as
    TensorRT-LLM's examples do. Prompts are computed `max_num_tokens` tokens at a time. `engine` says what a model's
    engine is built for; a directory of an engine is as it was built. SpecDecError if any of it cannot be.
    """

    def __init__(
        self,
        model: str | Path | Bundle,
        *,
        tokenizer: str | Path | None = None,
        mode: Mode = "leader",
        kv_cache: KVCacheConfig | None = None,
        max_num_tokens: int = DEFAULT_MAX_NUM_TOKENS,
        device_ids: Seq[int] | None = None,
        **engine: Unpack[EngineOptions],
    ) -> None:
        if unknown := sorted(engine.keys() - EngineOptions.__annotations__.keys()):
            raise TypeError(f"LLM.__init__() got an unexpected keyword argument '{unknown[0]}'")
        tell_problems()
        check_arguments(EngineOptions, engine)
        check_arguments(LLM.__init__, {"mode": mode, "max_num_tokens": max_num_tokens})
        if not isinstance(model, str | Path | Bundle) or not str(model):
            raise UsageError(f"no model is given: {model!r}", hint="give a directory, a GGUF file, a hub id or `demo`")
        if not isinstance(kv_cache, KVCacheConfig | None):
            raise UsageError(
                f"kv_cache must be a KVCacheConfig: {kv_cache!r:.100}", hint="KVCacheConfig(max_tokens=4096)"
            )
        self.mode = mode
        self.kv_cache = kv_cache or KVCacheConfig()
        self._engine_options = engine
        is_made = not isinstance(model, Bundle) and not is_engine_dir(Path(model).expanduser())
        self._model = str(model) if is_made else None
        self._has_told_penalties = self._has_measured = False
        self._sessions: dict[Speculation, Session] = {}
        self._opening = RLock()
        with MODEL_INIT_LOCK, ExitStack() as stack:
            self._stack = stack
            self.bundle = model if isinstance(model, Bundle) else read_bundle(self._find_engine(model))
            config = self.bundle.config
            _check_tp_size(engine.get("tensor_parallel_size"), config.mapping.tp_size)
            self.device_ids = check_device_ids(device_ids, config.mapping.tp_size)
            self.tokenizer_dir = self.bundle.directory if tokenizer is None else resolve_tokenizer(Path(tokenizer))
            if tokenizer is None:
                self.tokenizer = tokenizer_of_engine(self.bundle)
            else:
                self.tokenizer = load_tokenizer(self.tokenizer_dir, config.pretrained_config)
                own = find_own_tokenizer(self.bundle)
                check_tokenizer_fits(self.tokenizer, self.tokenizer_dir, own, config.vocab_size)
            end_ids = find_end_ids(self.bundle.directory, config.pretrained_config, self.tokenizer)
            self.end_ids = _within_vocabulary(end_ids, config.vocab_size)
            _tell_what_is_not_done(self.model_defaults)
            engine_of_bundle = Engine.of_bundle(self.bundle, self.device_ids, self.kv_cache, max_num_tokens)
            self.engine = stack.enter_context(engine_of_bundle)
            self._stack = stack.pop_all()
        call_at_exit(self._end)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back the memory of the engine, and of draft models.

        Calls of other threads end in an error before their next step.
        """
        with self._opening:
            self.engine.turns.take(self._close)

    def _end(self) -> None:
        """Close it at the end of the process, if no other thread is in the middle of a step."""
        if self.engine.turns.end():
            self._close()

    def _close(self) -> None:
        self._sessions.clear()
        self._stack.close()

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        drafter: AnyDrafter | None = None,
        draft_len_mode: DraftLenMode | None = None,
    ) -> list[Output]:
        """The outputs of the prompts in order, `n` of each. One prompt or several; parameters for all, or for each."""
        session = self.session(drafter, draft_len_mode)
        asked, requests = self._requests(prompts, sampling_params)
        generation = session.run(requests)
        return [
            self.output(s, asked[s.request.id].prompt, with_receipt=asked[s.request.id].with_receipt)
            for s in generation.sequences
        ]

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        drafter: AnyDrafter | None = None,
        draft_len_mode: DraftLenMode | None = None,
    ) -> Generator[Piece]:
        """The outputs step by step, as they come: a piece for each step of each output.

        To leave early, close it, or let go of it.
        """
        session = self.session(drafter, draft_len_mode)
        asked, requests = self._requests(prompts, sampling_params)
        session.check_requests(requests)
        return closed_at_exit(self._pieces(session, requests, asked))

    def chat(
        self,
        messages: Seq[Message],
        sampling_params: SamplingParams | None = None,
        *,
        drafter: AnyDrafter | None = None,
        draft_len_mode: DraftLenMode | None = None,
        continue_final_message: bool = False,
    ) -> list[Output]:
        """Generate the assistant's next message, by the tokenizer's chat template; SpecDecError if it has none.
        `continue_final_message`: the output goes on from the last message, as `The answer is` of the assistant.

        Without parameters it is sampled as the model's generation_config.json says (`chat_params`).
        """
        inputs = TemplateInputs(continues_last=continue_final_message)
        prompt, params = self.chat_template.encode(messages, inputs), sampling_params or self.chat_params()
        return self.generate(prompt, params, drafter=drafter, draft_len_mode=draft_len_mode)

    def stream_chat(
        self,
        messages: Seq[Message],
        sampling_params: SamplingParams | None = None,
        *,
        drafter: AnyDrafter | None = None,
        draft_len_mode: DraftLenMode | None = None,
        continue_final_message: bool = False,
    ) -> Generator[Piece]:
        """`chat`, step by step."""
        inputs = TemplateInputs(continues_last=continue_final_message)
        prompt, params = self.chat_template.encode(messages, inputs), sampling_params or self.chat_params()
        return self.stream(prompt, params, drafter=drafter, draft_len_mode=draft_len_mode)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """SpecDecError if the tokenizer has none."""
        return ChatTemplate(self.tokenizer_dir, self.bundle.config.pretrained_config)

    def check_lossless(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        drafter: AnyDrafter,
        draft_len_mode: DraftLenMode | None = None,
    ) -> "LosslessCheck":
        """Generate with the drafter and without, and compare: `passed`, and what differs or how much was looked at.

        A `TokenCheck`, or a `DistributionCheck` for a drafter whose samples follow the target's distribution without
        being the tokens it draws by itself.
        """
        from runtime.loop.lossless.check import check_outputs

        if drafter is None:
            raise UsageError("a lossless check needs a drafter, and there is none: None", hint="name a drafter")
        session = self.session(drafter, draft_len_mode)
        _, requests = self._requests(prompts, sampling_params)
        if not requests:
            raise UsageError("there is nothing to compare: no prompts are given", hint="give at least one")
        generation = session.run(requests)
        without = session.run_without_drafter(requests)
        return check_outputs(session, generation.sequences, without.sequences, lambda: None)

    def session(self, drafter: AnyDrafter | None = None, draft_len_mode: DraftLenMode | None = None) -> Session:
        """The session that drafts in this way; SpecDecError if such a drafter does not fit the engine.

        `draft_len_mode` None: `Speculation.default_mode`.
        """
        check_arguments(LLM.session, {"draft_len_mode": draft_len_mode})
        return self.session_of(Speculation.of(drafter, draft_len_mode).of_target(self._model))

    def session_of(self, speculation: Speculation) -> Session:
        """`session`, by one value."""
        self.engine.check_is_open()
        if (session := self._sessions.get(speculation)) is None:
            with self._opening:
                self.engine.check_is_open()  # before a draft model is opened for it
                session = self._sessions.get(speculation) or self._open_kept(speculation)
                self._sessions[speculation] = session
        return session

    def _open_kept(self, speculation: Speculation) -> Session:
        """Open a session for as long as the `LLM` is open."""
        if speculation.draft_len_mode is None:
            return self._open_by_default(speculation)
        return self.open_session(speculation, self._stack)

    def _open_by_default(self, speculation: Speculation) -> Session:
        """Open with automatic draft lengths, if they are the default and step costs are known; else with fixed ones."""
        mode = speculation.default_mode(is_leader=self.mode == "leader")
        try:
            return self.open_session(speculation.in_mode(mode), self._stack)
        except SpecDecError as error:
            if error.code != "no_step_costs":
                raise
            warnings.warn(f"drafts are sent whole, as if they paid: {error.message}", SpecDecWarning, stacklevel=3)
            return self.open_session(speculation.in_mode("fixed"), self._stack)

    def open_session(self, speculation: Speculation, stack: ExitStack) -> Session:
        """A session that has learned nothing yet; its drafter is closed by `stack`."""
        if not speculation:
            return Session(self.engine, self.mode, speculation.in_mode("fixed"))
        if speculation.draft_len_mode == "auto":
            self.measure_costs()
        config = self.bundle.config
        if speculation.read_heads():
            check_has_no_head(config.mapping.tp_size)
        speculation.check_fits(config.build_config)
        check_corpora(speculation, self.tokenizer, config.vocab_size)
        opening = Opening(
            self.engine,
            CostModel(config.step_costs, config.host_s) if speculation.draft_len_mode == "auto" else None,
            self.kv_cache,
            partial(self._find_engine, to_draft=True),
            self.identity,
            self.end_ids,
        )
        opened = stack.enter_context(open_drafter(speculation, opening))
        return Session(self.engine, self.mode, speculation, opened)

    @property
    def identity(self) -> TargetIdentity:
        """Properties that drafters must match."""
        return TargetIdentity(self.bundle, self.tokenizer_dir, self.tokenizer)

    def measure_costs(self) -> None:
        """Have step costs measured, if that was left until they are wanted. The first time it takes a second."""
        if not self._has_measured:
            from runtime.loop.step_costs import costs_when_asked_for  # not for a first answer

            self.engine.config = self.engine.turns.take(partial(costs_when_asked_for, self.bundle, self.engine))
            self.bundle = dataclasses.replace(self.bundle, config=self.engine.config)
            self._has_measured = bool(self.engine.config.step_costs)

    @cached_property
    def model_defaults(self) -> ModelDefaults:
        """Sampling defaults in the model's generation_config.json, whose `top_k` may be more than the vocabulary."""
        defaults = read_model_defaults(self.bundle.directory, MODEL_DEFAULTS)
        bounds = {"top_k": self.bundle.config.vocab_size}
        sampling = {name: min(value, bounds.get(name, value)) for name, value in defaults.sampling.items()}
        return dataclasses.replace(defaults, sampling=sampling)

    def chat_params(self) -> SamplingParams:
        """The model's own sampling, greedy where it names none, and as many tokens as there is room for."""
        values: dict[str, Any] = self.model_defaults.sampling or {"temperature": 0.0}
        return SamplingParams(max_tokens=None, **values)

    def request_of(self, params: SamplingParams) -> Request:
        """A request without a prompt, which others are made of: words are looked up once.

        Penalties that are left to the model are its own.
        """
        room = self.bundle.config.build_config.max_request_len - 1
        return Request(
            0,
            (),
            room if params.max_tokens is None else params.max_tokens,
            self._end_ids_of(params),
            self.stop_words(params),
            sampling=self._with_own_penalties(params).config(self._bad_words(params)),
            keep_logits=params.return_generation_logits,
            num_logprobs=params.logprobs,
            grammar=self.grammar(params),
        )

    def grammar(self, params: SamplingParams) -> CompiledGrammar | None:
        """Compile the grammar of an output, if it has one; SpecDecError if it cannot be used."""
        grammar = params.output_grammar
        return None if grammar is None else self.grammars.compiled(grammar)

    @cached_property
    def grammars(self) -> Grammars:
        """Compiler of grammars for this model."""
        grammars = Grammars(self.tokenizer, self.bundle.config.vocab_size, self.end_ids, proves=True)
        self._stack.callback(grammars.close)
        return grammars

    def _with_own_penalties(self, params: SamplingParams) -> SamplingParams:
        """Apply the model's penalties if none are given; the first change of an output is reported."""
        own = {name: value for name, value in self.model_defaults.penalties.items() if getattr(params, name) is None}
        told = {name: value for name, value in own.items() if value != getattr(GREEDY, name)}
        if told and not self._has_told_penalties:
            self._has_told_penalties = True
            values = ", ".join(f"{name} {value:g}" for name, value in told.items())
            warnings.warn(
                f"applied, from the model's generation_config.json: {values}; "
                f"{' and '.join(f'{name} {getattr(GREEDY, name):g}' for name in told)} would be off",
                SpecDecWarning,
                stacklevel=4,
            )
        own_values: dict[str, Any] = own
        return dataclasses.replace(params, **own_values)

    def stop_words(self, params: SamplingParams) -> StopWords | None:
        """Compile stop words; SpecDecError without a tokenizer, or for a word that has no tokens."""
        if not params.stop_words:
            return None
        tokenizer = self._tokenizer_for_words()
        for word in params.stop_words:
            word_tokens(tokenizer, "stop", word)
        return StopWords(params.stop_words, tokenizer, params.min_tokens)

    def encode(self, prompt: Prompt, max_length: int | None = None) -> tuple[list[int], bool]:
        """The prompt's tokens, and whether only its last `max_length` were kept."""
        return encode(prompt, self.tokenizer, max_length)

    def max_prompt_len(self, params: SamplingParams) -> int | None:
        """Most tokens that are kept of a prompt, the last; None: all. For -1 as many as leave room for the output, or
        for one token of an output without a limit.
        """
        if params.truncate_prompt_tokens != -1:
            return params.truncate_prompt_tokens
        build = self.bundle.config.build_config
        return max(min(build.max_input_len, build.max_request_len - (params.max_tokens or 1)), 1)

    def text(self, sequence: Sequence) -> str | None:
        """The text of an output without end ids and what follows a stop word; None without a tokenizer."""
        return sequence_text(self.tokenizer, sequence)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The engine's fingerprint. The first time it takes two steps."""
        return fingerprint_of(self.engine, self.tokenizer)

    def check_receipts(self, receipts: Iterable[Mapping[str, Any]], rule: "Rule | None" = None) -> "list[Finding]":
        """Check answers by the JSON objects of their receipts: would this engine have given these tokens?"""
        reads = (read_row(dict(row), f"receipt {number}", {}) for number, row in enumerate(receipts, 1))
        return list(self.checker(rule).check(reads))

    def checker(self, rule: "Rule | None" = None) -> "Checker":
        """A checker of receipts (`runtime.proof.check`); `rule` None: the one that fits each."""
        from runtime.proof.check import Checker  # not for a first answer

        return Checker(self.engine, self.tokenizer, self.fingerprint, lambda form: self.grammars.compiled(form), rule)

    def output(self, sequence: Sequence, prompt: Prompt, *, with_receipt: bool = False) -> Output:
        request = sequence.request
        return Output(
            request.return_index,
            prompt if isinstance(prompt, str) else None,
            list(request.prompt_tokens),
            self.text(sequence),
            sequence.output_tokens,
            sequence.finish_reason,
            sequence.stats,
            None if request.num_logprobs is None else sequence.logprobs,
            torch.stack(sequence.logits) if request.keep_logits else None,
            receipt_of(sequence, self.fingerprint).as_json() if with_receipt else None,
        )

    def _requests(
        self, prompts: Prompt | Seq[Prompt], sampling_params: SamplingParams | Seq[SamplingParams] | None
    ) -> tuple[list[_Asked], list[Request]]:
        """The requests, `n` of each prompt, and what each is of."""
        given = _as_list(prompts)
        params = _one_for_each(sampling_params, len(given))
        asked: list[_Asked] = []
        requests: list[Request] = []
        for prompt_index, (prompt, one) in enumerate(zip(given, params, strict=True)):
            if one.seed is None:
                one = dataclasses.replace(one, seed=secrets.randbits(63))
            template, tokens = self.request_of(one), self.encode(prompt, self.max_prompt_len(one))[0]
            if one.max_tokens is None:
                room = self.bundle.config.build_config.max_request_len - len(tokens)
                template = dataclasses.replace(template, max_new_tokens=max(room, 1))
            if one.receipt:
                self.fingerprint  # noqa: B018  # it is kept, and known before requests fill the cache
            for index in range(one.n):
                requests.append(template.with_prompt(len(requests), tokens, index))
                asked.append(_Asked(prompt_index, prompt, one.receipt))
        return asked, requests

    def _pieces(self, session: Session, requests: list[Request], asked: list[_Asked]) -> Generator[Piece]:
        with session.unique(requests) as unique:
            prompt_indices = {r.id: one.prompt_index for r, one in zip(unique, asked, strict=True)}
            proven = {r.id for r, one in zip(unique, asked, strict=True) if one.with_receipt}
            texts: dict[int, TextStream] = {}
            if self.tokenizer is not None:
                for r in unique:
                    texts[r.id] = TextStream(self.tokenizer, stop_words_of(r), r.prompt_tokens)
            with closing(session.loop(unique)) as steps:
                for sequence, new_tokens in steps:
                    request, finished = sequence.request, sequence.finish_reason is not None
                    text = texts[request.id].next_piece(sequence.output_tokens, finished=finished) if texts else ""
                    yield Piece(
                        text,
                        new_tokens,
                        sequence.finish_reason,
                        sequence.stats.copy(),
                        sequence.logprobs[-len(new_tokens) :] if request.num_logprobs is not None else None,
                        prompt_indices[request.id],
                        request.return_index,
                        receipt_of(sequence, self.fingerprint).as_json() if finished and request.id in proven else None,
                    )

    def _end_ids_of(self, params: SamplingParams) -> frozenset[int]:
        own = frozenset(params.stop_token_ids or ())
        foreign = next((i for i in own if not 0 <= i < self.bundle.config.vocab_size), None)
        if foreign is not None:
            raise SpecDecError(
                f"an end id is outside the vocabulary of {self.bundle.config.vocab_size}: {foreign}",
                hint="give an id of the engine's tokenizer",
                code="end_id",
                size=self.bundle.config.vocab_size,
                end_id=foreign,
            )
        return own if params.ignore_eos else own | self.end_ids

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        return bad_word_tokens(self._tokenizer_for_words(), params.bad_words) if params.bad_words else ()

    def _tokenizer_for_words(self) -> Any:
        if self.tokenizer is None:
            raise SpecDecError(
                "stop words and bad words need a tokenizer, and the engine has none",
                hint="name a tokenizer",
                code="no_tokenizer",
            )
        return self.tokenizer

    def _find_engine(self, model: str | Path, *, to_draft: bool = False) -> Path:
        """The engine's directory of a model, or the directory itself where it is one. A `Path` is no hub id."""
        path = Path(model).expanduser()
        is_model = path.is_dir() or path.suffix.lower() == ".gguf" or is_gguf(path)
        if is_engine_dir(path) or (isinstance(model, Path) and not is_model):
            return path
        options: dict[str, Any] = dict(self._engine_options)
        use_cache = options.pop("use_cache", True)
        if options.get("dtype") == "auto":
            options["dtype"] = None
        head, drafts = options.pop("head", None), _draft_output(options)
        if not to_draft:
            is_split = options.get("tensor_parallel_size", 1) > 1  # of which no head drafts
            head = model if head is None and not is_split and has_mtp_head(model) else head
            heads = [] if head is None else [read_head(head)]
            drafts.check(heads, has_copy=options.get("self_draft") is not None)
            options |= {"draft_output": drafts, "heads": tuple(heads)}
            options["hidden_states"] = hidden_states_for(heads, str(model))
        options["tp_size"] = options.pop("tensor_parallel_size", 1)
        if to_draft:  # a draft model is not split
            options |= {"max_draft_len": 0, "self_draft": None, "tp_size": 1}
        return self._stack.enter_context(engine_of_model(str(model), EngineSettings(**options), use_cache=use_cache))


def _draft_output(options: dict[str, Any]) -> DraftOutputSettings:
    """Take the options of layers that draft."""
    vocab, *others = (options.pop(f"draft_{name}", None) for name in ("vocab", "vocab_size", "output_layer", "layers"))
    return DraftOutputSettings(None if vocab is None else str(vocab), *others)


def _within_vocabulary(end_ids: frozenset[int], vocab_size: int) -> frozenset[int]:
    """End ids within the vocabulary, with a warning for the others: a class of transformers has one by default,
    whatever the vocabulary.
    """
    foreign = sorted(i for i in end_ids if i >= vocab_size)
    if foreign:
        message = f"the model's end id is outside its vocabulary of {vocab_size}, and ends nothing: {foreign[0]}"
        warnings.warn(message, SpecDecWarning, stacklevel=3)
    return end_ids - set(foreign)


def _tell_what_is_not_done(defaults: ModelDefaults) -> None:
    if defaults.not_done:
        names = ", ".join(defaults.not_done)
        message = f"the model's generation_config.json has unsupported settings, which are ignored: {names}"
        warnings.warn(message, SpecDecWarning, stacklevel=3)


def _check_tp_size(wanted: int | None, found: int) -> None:
    """UsageError where an engine is not split as it is asked to be; None asks for nothing."""
    if wanted not in (None, found):
        raise UsageError(
            f"the engine has tp_size {found}, and not: tensor_parallel_size {wanted}",
            hint=f"convert and build the model with tp_size {wanted}",
        )


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt is a list of one; a list of ids is one prompt. UsageError for what is neither one nor several."""
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        raise UsageError(
            f"prompts are texts, token ids, or a list of those: {str(prompts)[:100]}", hint="give a text, or a list"
        )
    if isinstance(prompts, str):
        return [prompts]
    found: list[Any] = list(prompts)  # once: a generator's first is gone when it is looked at
    return [found] if found and all(isinstance(one, int) for one in found) else found


def _one_for_each(params: SamplingParams | Seq[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    found: list[Any] = list(params) if isinstance(params, Iterable) and not isinstance(params, Mapping) else [params]
    if (other := next((one for one in found if not isinstance(one, SamplingParams)), None)) is not None:
        raise UsageError(
            f"sampling_params must be SamplingParams, or a list of them: {other!r:.100}",
            hint="SamplingParams(temperature=0.7) is one",
        )
    if len(found) != num_prompts:
        raise UsageError(
            f"there are {num_prompts} prompts, and sampling parameters for: {len(found)}",
            hint="give one for all, or one for each",
        )
    return found
