"""A model that answers: text in, text out. Python users import it, and the commands use it.

An `LLM` is an opened engine with its tokenizer. It answers prompts in sessions, one for each drafter and draft length
mode; a session is opened when it is first asked for, and kept, so that a draft model is opened once and lookups
remember what they learned.
"""

import dataclasses
import random
import warnings
from collections.abc import Generator, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, closing
from functools import cached_property, partial
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Unpack

import torch

from runtime.builder.engine_cache import ModelEngines
from runtime.builder.engine_options import EngineOptions, draft_output_of
from runtime.builder.profile import profile_for
from runtime.checkpoint.bundle import Bundle, is_engine_dir, read_bundle
from runtime.checkpoint.checkpoint_dir import check_has_no_head
from runtime.checkpoint.config import check_arguments
from runtime.checkpoint.costs import CostModel
from runtime.checkpoint.generation_config import ModelDefaults, read_model_defaults
from runtime.checkpoint.gguf.reader import is_gguf
from runtime.checkpoint.resolve import resolve_tokenizer
from runtime.core.generation import Output, Piece, RequestOutput
from runtime.core.grammar import CompiledGrammar, Grammars
from runtime.core.limits import check_output_len
from runtime.core.params import GREEDY, MODEL_DEFAULTS, ConversationParams, Grammar, Mode, SamplingParams
from runtime.core.request import Request, Sequence
from runtime.core.thinking_budget import Thinking
from runtime.drafters.heads.head_config import has_mtp_head, hidden_states_for, read_head
from runtime.drafters.plugins import tell_problems
from runtime.drafters.protocol import Drafter, DraftFunction
from runtime.drafters.spec import DraftLenMode
from runtime.drafters.specs import AnySpec
from runtime.drafters.speculation import Speculation
from runtime.engine.devices import check_device_ids
from runtime.engine.engine import DEFAULT_MAX_NUM_TOKENS, Engine, KVCacheConfig
from runtime.llm.options import by_given_names, check_not_empty, engine_options_for, own_names, usual_speculation
from runtime.llm.prompts import Prompt, prompts_of
from runtime.loop.compatibility import TargetIdentity, check_corpora
from runtime.loop.opening import Opening, open_drafter
from runtime.loop.session import OnTokens, Session
from runtime.proof.fingerprint import fingerprint_of
from runtime.proof.receipts import read_row, receipt_of
from runtime.proof.records import Fingerprint
from runtime.text.call_formats import ReasoningFormat, find_reasoning_format, named_reasoning_format
from runtime.text.call_grammar import SpecialIds, schema_grammar
from runtime.text.chat import ChatTemplate, Message, TemplateInputs
from runtime.text.chat_templates import chat_templates
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
    tokenizer_of_engine,
    word_tokens,
)
from runtime.text.thinking_tags import thinking_of
from runtime.text.token_text import special_token_ids
from runtime.util.at_exit import call_at_exit, closed_at_exit
from runtime.util.errors import SpecDecError, SpecDecWarning, UsageError, errors_about
from runtime.util.locks import MODEL_INIT_LOCK
from runtime.util.words import chosen

if TYPE_CHECKING:
    from runtime.loop.lossless.results import LosslessCheck
    from runtime.proof.checker import Checker
    from runtime.proof.records import Finding, Rule

AnyDrafter = AnySpec | Drafter | DraftFunction
"""Drafter in the Python API: settings such as `NgramDrafter()`, or an object or function of the user's own."""


class LLM:
    """An engine that answers prompts, opened from its directory or made from a model: a directory, GGUF file, hub id or
    `demo`.

    `mode` "leader" keeps sequences in a running batch; "orchestrator" calls the engine once for each step, as
    TensorRT-LLM's examples do. Prompts are computed `max_num_tokens` tokens at a time. With a `seed`, requests without
    their own seed give the same samples each time a program runs. `engine` are the build options for a model's engine;
    an engine's directory is used as it was built. Calls that name no drafter draft by `speculative_config`, which has
    vLLM's and TensorRT-LLM's form, or by the file of a `profile`. SpecDecError if an argument cannot be met.
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
        seed: int | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        profile: str | Path | None = None,
        **engine: Unpack[EngineOptions],
    ) -> None:
        given = engine
        engine, mode = own_names(given), chosen(Mode, mode)
        check_not_empty({"tokenizer": tokenizer, "profile": profile})
        tell_problems()
        check_arguments(LLM.__init__, {"mode": mode, "max_num_tokens": max_num_tokens, "seed": seed})
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)
        if not isinstance(model, str | Path | Bundle) or not str(model):
            raise UsageError(f"no model is given: {model!r}", hint="give a directory, a GGUF file, a hub id or `demo`")
        if not isinstance(kv_cache, KVCacheConfig | None):
            raise UsageError(
                f"kv_cache must be a KVCacheConfig: {kv_cache!r:.100}", hint="write KVCacheConfig(max_tokens=4096)"
            )
        self.mode = mode
        self.reasoning_parser: str | None = None
        """Name of the format of reasoning; None for the chat template's."""
        self.kv_cache = kv_cache or KVCacheConfig()
        is_made = not isinstance(model, Bundle) and not is_engine_dir(Path(model).expanduser())
        self._model = str(model) if is_made else None
        self._usual = usual_speculation(speculative_config, profile, self._model)
        if self._usual is not None:
            self._usual.check_files()
        if self._usual is not None and is_made:
            engine = engine_options_for(self._usual, engine)
        self._has_told_penalties = self._has_measured = False
        self._sessions: dict[Speculation, Session] = {}
        self._opening = RLock()
        self._stack = ExitStack()
        self._engines = ModelEngines(self._stack, engine)
        with MODEL_INIT_LOCK, by_given_names(given), ExitStack() as stack:
            stack.enter_context(self._stack)  # closed if the `LLM` cannot be opened
            self.bundle = model if isinstance(model, Bundle) else self._open_bundle(model)
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
            if profile is not None and self._usual is None:
                self._usual = profile_for(profile, self.bundle).speculation
            _tell_what_is_not_done(self.model_defaults)
            engine_of_bundle = Engine.of_bundle(self.bundle, self.device_ids, self.kv_cache, max_num_tokens)
            self.engine = self._stack.enter_context(engine_of_bundle)
            stack.pop_all()
        call_at_exit(self._end)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory of the engine and of draft models. Calls in other threads fail before their next step."""
        with self._opening:
            self.engine.turns.take(self._close)

    def _end(self) -> None:
        """Close the engine at the end of the process, unless another thread is in the middle of a step."""
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
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """A result for each prompt, in order, with its `n` outputs. `prompts` is one prompt or several;
        `sampling_params` are for all prompts, or a list with one for each. With `use_tqdm` a bar on standard error
        shows how many outputs are finished.
        """
        session = self.session(drafter, draft_len_mode)
        given, requests = self._requests(prompts, sampling_params)
        with ExitStack() as stack:
            on_tokens = _show_progress(len(requests), stack) if use_tqdm else None
            sequences = iter(session.run(requests, on_tokens=on_tokens).sequences)
        results = []
        for i, (prompt, num_outputs) in enumerate(given):
            outputs = [next(sequences) for _ in range(num_outputs)]
            results.append(self._result(str(i), prompt, outputs))
        return results

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        drafter: AnyDrafter | None = None,
        draft_len_mode: DraftLenMode | None = None,
    ) -> Generator[Piece]:
        """Yield a piece for each step of each output. To stop early, close the generator or drop it."""
        session = self.session(drafter, draft_len_mode)
        given, requests = self._requests(prompts, sampling_params)
        session.check_requests(requests)
        indices = [i for i, (_, num_outputs) in enumerate(given) for _ in range(num_outputs)]
        return closed_at_exit(self._pieces(session, requests, indices))

    def chat(
        self,
        messages: Seq[Message],
        sampling_params: SamplingParams | None = None,
        *,
        drafter: AnyDrafter | None = None,
        draft_len_mode: DraftLenMode | None = None,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Generate the assistant's next message, by the tokenizer's chat template; SpecDecError if it has none. With
        `continue_final_message` the output continues the last message, such as `The answer is` of the assistant.

        Without parameters it is sampled as the model's generation_config.json says (`chat_params`).
        """
        prompt, params = self._chat_prompt(messages, sampling_params, continue_final_message)
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
        """Answer like `chat`, and yield pieces like `stream`."""
        prompt, params = self._chat_prompt(messages, sampling_params, continue_final_message)
        return self.stream(prompt, params, drafter=drafter, draft_len_mode=draft_len_mode)

    def _chat_prompt(
        self, messages: Seq[Message], params: SamplingParams | None, continue_final_message: bool
    ) -> tuple[list[int], SamplingParams]:
        """A conversation's tokens, and the parameters of its answer, which are the model's own if none are given."""
        inputs = TemplateInputs(params=ConversationParams(continue_final_message=continue_final_message))
        return self.chat_template.encode(messages, inputs), params or self.chat_params()

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The tokenizer's chat template; SpecDecError if it has none."""
        with errors_about(self.bundle.given, str(self.bundle.directory)):
            return ChatTemplate(self.tokenizer_dir, self.bundle.config.pretrained_config)

    def check_lossless(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        drafter: AnyDrafter | None = None,
        draft_len_mode: DraftLenMode | None = None,
    ) -> "LosslessCheck":
        """Generate with the drafter and without it, and compare. The result says whether the check `passed`, which
        outputs differ, and how much was compared.

        It is a `TokenCheck`, or a `DistributionCheck` for a drafter whose sampled tokens follow the target's
        distribution without being the tokens that the target draws alone.
        """
        from runtime.loop.lossless.check import check_outputs

        if drafter is None and not self._usual:
            raise UsageError("a lossless check needs a drafter, and there is none: None", hint="name a drafter")
        session = self.session(drafter, draft_len_mode)
        _, requests = self._requests(prompts, sampling_params)
        if not requests:
            raise UsageError("there is nothing to compare: no prompts are given", hint="give at least one")
        generation = session.run(requests)
        without = session.run_without_drafter(requests)
        return check_outputs(session, generation.sequences, without.sequences, lambda: None)

    def session(self, drafter: AnyDrafter | None = None, draft_len_mode: DraftLenMode | None = None) -> Session:
        """The session that drafts with this drafter; SpecDecError if the drafter does not fit the engine.

        `drafter` None stands for the drafter of the `LLM`'s speculative_config or profile, if it has one.
        `draft_len_mode` None stands for `Speculation.default_mode`.
        """
        draft_len_mode = chosen(DraftLenMode, draft_len_mode)
        check_arguments(LLM.session, {"draft_len_mode": draft_len_mode})
        if drafter is None and self._usual is not None:
            usual = self._usual if draft_len_mode is None else self._usual.in_mode(draft_len_mode)
            return self.session_of(usual.of_target(self._model))
        return self.session_of(Speculation.of(drafter, draft_len_mode).of_target(self._model))

    def session_of(self, speculation: Speculation) -> Session:
        """The session for a `Speculation`."""
        self.engine.check_is_open()
        if (session := self._sessions.get(speculation)) is None:
            with self._opening:
                self.engine.check_is_open()  # before a draft model is opened for it
                session = self._sessions.get(speculation) or self._open_kept(speculation)
                self._sessions[speculation] = session
        return session

    def _open_kept(self, speculation: Speculation) -> Session:
        """Open a session that stays open as long as the `LLM`. Without a mode, draft lengths are automatic if that is
        the default and step costs are known; otherwise fixed.
        """
        if speculation.draft_len_mode is not None:
            return self.open_session(speculation, self._stack)
        mode = speculation.default_mode(is_leader=self.mode == "leader")
        try:
            return self.open_session(speculation.in_mode(mode), self._stack)
        except SpecDecError as error:
            if error.code != "no_step_costs":
                raise
            warnings.warn(f"drafts are sent whole, as if they paid: {error.message}", SpecDecWarning, stacklevel=3)
            return self.open_session(speculation.in_mode("fixed"), self._stack)

    def open_session(self, speculation: Speculation, stack: ExitStack) -> Session:
        """A new session without history; `stack` closes its drafter."""
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
            lambda model, num_masks: _engine_path(model) or self._engines.of_draft_model(str(model), num_masks),
            self.identity,
            self.end_ids,
        )
        opened = stack.enter_context(open_drafter(speculation, opening))
        return Session(self.engine, self.mode, speculation, opened)

    @property
    def identity(self) -> TargetIdentity:
        """The target's properties that drafters must match."""
        return TargetIdentity(self.bundle, self.tokenizer_dir, self.tokenizer)

    def measure_costs(self) -> None:
        """Measure step costs, if that was put off until they are needed. It takes about a second, once."""
        if not self._has_measured:
            from runtime.loop.step_costs import costs_when_asked_for  # not for a first answer

            self.engine.config = self.engine.turns.take(partial(costs_when_asked_for, self.bundle, self.engine))
            self.bundle = dataclasses.replace(self.bundle, config=self.engine.config)
            self._has_measured = bool(self.engine.config.step_costs)

    @cached_property
    def model_defaults(self) -> ModelDefaults:
        """Sampling defaults in the model's generation_config.json, with a `top_k` of at most the vocabulary's size."""
        defaults = read_model_defaults(self.bundle.directory, MODEL_DEFAULTS)
        bounds = {"top_k": self.bundle.config.vocab_size}
        sampling = {name: min(value, bounds.get(name, value)) for name, value in defaults.sampling.items()}
        return dataclasses.replace(defaults, sampling=sampling)

    def chat_params(self) -> SamplingParams:
        """The model's own sampling parameters, greedy if it has none, with as many output tokens as fit."""
        values: dict[str, Any] = self.model_defaults.sampling or {"temperature": 0.0}
        return SamplingParams(max_tokens=None, **values)

    def request_of(self, params: SamplingParams) -> Request:
        """A request without a prompt, as a template for others, so that its stop words and bad words are looked up
        once. Penalties that are not given are the model's own.
        """
        if params.receipt:
            self.fingerprint  # noqa: B018  # it is kept, and known before requests fill the cache
        room = self.bundle.config.build_config.max_request_len - 1
        return Request(
            0,
            (),
            room if params.max_tokens is None else params.max_tokens,
            self._end_ids_of(params),
            self._stop_check(params),
            sampling=self._with_own_penalties(params).config(self._bad_words(params)),
            keep_logits=params.return_generation_logits,
            num_logprobs=params.logprobs,
            grammar=self.grammar(params),
            thinking=None if params.thinking_token_budget is None else self.thinking,
            shows_special_tokens=not params.skip_special_tokens,
            shows_stop=params.include_stop_str_in_output,
            wants_receipt=params.receipt,
        )

    @cached_property
    def reasoning_format(self) -> ReasoningFormat | None:
        """Format of the model's reasoning, if it is known."""
        if self.reasoning_parser is not None:
            return named_reasoning_format(self.reasoning_parser)
        texts = filter(lambda one: isinstance(one, str), chat_templates(self.tokenizer_dir).values())
        return next(filter(None, map(find_reasoning_format, texts)), None)

    @cached_property
    def thinking(self) -> Thinking:
        """The tags of the model's thinking, for a budget; UsageError for a model that does not think."""
        if self.tokenizer is None or self.reasoning_format is None:
            raise UsageError(
                f"there is no thinking to limit, the chat template has no tags for it: {self.bundle.given}",
                hint="leave the budget out, or take a model that thinks before it answers",
                field="thinking_token_budget",
            )
        return thinking_of(self.reasoning_format, self.tokenizer)

    def after_thinking(self, request: Request) -> Request:
        """The same request, with its JSON schema applied after the thinking that its prompt has opened, if there is a
        budget. Other grammars hold for the whole output, and leave no room for thinking.
        """
        form = None if request.grammar is None else request.grammar.form
        is_open = request.thinking is not None and request.thinking.is_open_after(request.prompt_tokens)
        if form is None or form.kind != "json_schema" or not is_open or self.reasoning_format is None:
            return request
        special = SpecialIds(self.grammars.special_tokens(), request.end_ids)
        text = schema_grammar(form.text, self.reasoning_format, special)
        return dataclasses.replace(request, grammar=self.grammars.compiled(Grammar("lark", text)))

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
        """Apply the model's penalties if none are given; the first time this changes an output, a message says so."""
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

    def _stop_check(self, params: SamplingParams) -> StopWords | None:
        """Prepare stop words; SpecDecError without a tokenizer, or for a word without tokens."""
        if not params.stop_words:
            return None
        tokenizer = self._tokenizer_for_words()
        words = tuple(word for word in params.stop_words if word not in self.special_token_ids)
        for word in words:
            word_tokens(tokenizer, "stop", word)
        return StopWords(words, tokenizer, params.config()) if words else None

    @cached_property
    def special_token_ids(self) -> dict[str, int]:
        """Ids of special tokens by name. A stop word that is such a name, as `</s>`, ends an output by its id."""
        return {} if self.tokenizer is None else special_token_ids(self.tokenizer)

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer of the model; None for an engine without one. vLLM has a method of this name."""
        if self.tokenizer is None:
            return None
        if not hasattr(self.tokenizer, "apply_chat_template"):  # our lighter class, which gives the same tokens
            self.tokenizer = load_tokenizer(self.tokenizer_dir, self.bundle.config.pretrained_config)
        return self.tokenizer

    def encode(self, prompt: str | Seq[int], max_length: int | None = None) -> tuple[list[int], bool]:
        """The prompt's tokens, and whether only its last `max_length` were kept."""
        return encode(prompt, self.tokenizer, max_length)

    def max_prompt_len(self, params: SamplingParams) -> int | None:
        """Number of a prompt's last tokens that are kept; None for all. A limit of -1 keeps as many as leave room for
        the output, or for one token if the output has no limit.
        """
        if params.truncate_prompt_tokens != -1:
            return params.truncate_prompt_tokens
        build = self.bundle.config.build_config
        num_output = params.max_tokens or 1
        check_output_len(num_output, build.max_request_len)
        return min(build.max_input_len, build.max_request_len - num_output)

    def text(self, sequence: Sequence) -> str | None:
        """The text of an output, cut at its end id or stop word as its request wants; None without a tokenizer."""
        return sequence_text(self.tokenizer, sequence)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The engine's fingerprint, computed at the first call in two steps of the engine."""
        return fingerprint_of(self.engine, self.tokenizer)

    def check_receipts(self, receipts: Iterable[Mapping[str, Any]], rule: "Rule | None" = None) -> "list[Finding]":
        """Check answers by the JSON objects of their receipts: would this engine have given these tokens?"""
        reads = (read_row(row, f"receipt {number}", {}) for number, row in enumerate(receipts, 1))
        return list(self.checker(rule).check(reads))

    def checker(self, rule: "Rule | None" = None) -> "Checker":
        """A checker of receipts (`runtime.proof.checker`); `rule` None for the rule that fits each receipt."""
        from runtime.proof.checker import Checker  # not for a first answer

        return Checker(self.engine, self.tokenizer, self.fingerprint, lambda form: self.grammars.compiled(form), rule)

    def _result(self, request_id: str, prompt: str | Seq[int], sequences: Seq[Sequence]) -> RequestOutput:
        text, tokens = prompt if isinstance(prompt, str) else None, list(sequences[0].request.prompt_tokens)
        return RequestOutput(request_id, text, tokens, [self._output(sequence) for sequence in sequences])

    def _output(self, sequence: Sequence) -> Output:
        request = sequence.request
        return Output(
            request.return_index,
            self.text(sequence),
            sequence.output_tokens,
            sequence.finish_reason,
            sequence.stats,
            None if request.num_logprobs is None else sequence.logprobs,
            torch.stack(sequence.logits) if request.keep_logits else None,
            self._receipt(sequence),
        )

    def _receipt(self, sequence: Sequence) -> dict[str, Any] | None:
        """The receipt of a finished sequence whose request asks for one; else None."""
        if not sequence.request.wants_receipt or sequence.finish_reason is None:
            return None
        return receipt_of(sequence, self.fingerprint).as_json()

    def _requests(
        self, prompts: Prompt | Seq[Prompt], sampling_params: SamplingParams | Seq[SamplingParams] | None
    ) -> tuple[list[tuple[str | Seq[int], int]], list[Request]]:
        """Each prompt with its number of outputs, and the requests of all outputs."""
        given = prompts_of(prompts)
        params = _one_for_each(sampling_params, len(given))
        requests: list[Request] = []
        for (prompt, salt), one in zip(given, params, strict=True):
            if one.seed is None:
                one = dataclasses.replace(one, seed=self._seeds.getrandbits(63))
            template, tokens = self.request_of(one), self.encode(prompt, self.max_prompt_len(one))[0]
            if one.max_tokens is None:
                room = self.bundle.config.build_config.max_request_len - len(tokens)
                template = dataclasses.replace(template, max_new_tokens=max(room, 1))
            template = dataclasses.replace(template, cache_salt=salt)
            asked = [template.with_prompt(len(requests) + i, tokens, i) for i in range(one.n)]
            requests += map(self.after_thinking, asked)
        return [(prompt, one.n) for (prompt, _), one in zip(given, params, strict=True)], requests

    def _pieces(self, session: Session, requests: list[Request], indices: list[int]) -> Generator[Piece]:
        """Pieces of the outputs, step by step. `indices` has the index of its prompt for each request."""
        with session.unique(requests) as unique:
            prompt_indices = {r.id: i for r, i in zip(unique, indices, strict=True)}
            texts: dict[int, TextStream] = {}
            if self.tokenizer is not None:
                for r in unique:
                    texts[r.id] = TextStream.of_request(self.tokenizer, r)
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
                        self._receipt(sequence),
                    )

    def _end_ids_of(self, params: SamplingParams) -> frozenset[int]:
        named = (self.special_token_ids[word] for word in params.stop_words if word in self.special_token_ids)
        own = frozenset((*(params.stop_token_ids or ()), *named))
        foreign = next((i for i in own if not 0 <= i < self.bundle.config.vocab_size), None)
        if foreign is not None:
            raise SpecDecError(
                f"stop_token_ids has an id outside the vocabulary of {self.bundle.config.vocab_size}: {foreign}",
                hint="give an id of the engine's tokenizer",
                field="stop_token_ids",
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

    def _open_bundle(self, model: str | Path) -> Bundle:
        """An engine's bundle, or a model's, whose own MTP head drafts if no head is given."""
        if (path := _engine_path(model)) is not None:
            return read_bundle(path)
        options = self._engines.options
        head, is_split = options.get("head"), options.get("tensor_parallel_size", 1) > 1  # no head drafts if split
        head = model if head is None and not is_split and has_mtp_head(model) else head
        heads = [] if head is None else [read_head(head)]
        draft_output_of(options).check(heads, has_copy=options.get("self_draft") is not None)
        return read_bundle(self._engines.of_target(str(model), heads, hidden_states_for(heads, str(model))), str(model))


def _engine_path(model: str | Path) -> Path | None:
    """The path of an engine, or of nothing that a model could be: a `Path` is never a hub id. None for a model."""
    path = Path(model).expanduser()
    is_model = path.is_dir() or path.suffix.lower() == ".gguf" or is_gguf(path)
    return path if is_engine_dir(path) or (isinstance(model, Path) and not is_model) else None


def _show_progress(num_outputs: int, stack: ExitStack) -> OnTokens:
    """Count finished outputs in a bar until the stack is closed."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # imported only where a bar is shown

    bar = stack.enter_context(tqdm(total=num_outputs, desc="generating", unit=" outputs"))

    def count_finished(sequence: Sequence, new_tokens: list[int]) -> None:
        bar.update(sequence.finish_reason is not None)

    return count_finished


def _within_vocabulary(end_ids: frozenset[int], vocab_size: int) -> frozenset[int]:
    """The end ids within the vocabulary, with a warning for the first other one: some of transformers' config classes
    have a default end id, whatever the vocabulary.
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
    """UsageError if the engine is not split as asked; None asks for nothing."""
    if wanted not in (None, found):
        raise UsageError(
            f"the engine has tp_size {found}, and not: tensor_parallel_size {wanted}",
            hint=f"convert and build the model with tp_size {wanted}",
        )


def _one_for_each(params: SamplingParams | Seq[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    found: list[Any] = list(params) if isinstance(params, Iterable) and not isinstance(params, Mapping) else [params]
    if (other := next((one for one in found if not isinstance(one, SamplingParams)), None)) is not None:
        raise UsageError(
            f"sampling_params must be SamplingParams, or a list of them: {other!r:.100}",
            hint="write SamplingParams(temperature=0.7)",
        )
    if len(found) != num_prompts:
        raise UsageError(
            f"there are {num_prompts} prompts, and sampling parameters for: {len(found)}",
            hint="give one for all, or one for each",
        )
    return found
