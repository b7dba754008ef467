"""Opening of the engines and sessions that the command line chose, and the lossless check of their outputs."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from commands.options.engine_choice import EngineChoice
from commands.output.documents.settings import Setup
from commands.output.output import Output, note
from runtime.builder.engine_cache import ModelEngines
from runtime.checkpoint.bundle import read_bundle
from runtime.checkpoint.config import EngineConfig, positions_in
from runtime.core.request import Request, Sequence
from runtime.drafters.spec import DrafterSpec
from runtime.engine.engine import DEFAULT_MAX_NUM_TOKENS
from runtime.llm import LLM
from runtime.loop.lossless.check import NUM_PREFIXES, check_outputs
from runtime.loop.lossless.results import LosslessCheck
from runtime.loop.session import OnTokens, Session


def open_engine(choice: EngineChoice) -> LLM:
    """Open the engine; SpecDecError if it cannot serve the choice."""
    return LLM(
        choice.bundle or read_bundle(choice.engine_dir),
        tokenizer=choice.tokenizer_dir,
        mode=choice.mode,
        kv_cache=choice.kv_cache.config(choice.disk),
        max_num_tokens=choice.max_num_tokens or DEFAULT_MAX_NUM_TOKENS,
        device_ids=choice.device_ids,
    )


@contextmanager
def open_setup(choice: EngineChoice) -> Iterator[Setup]:
    """Open the engine and the drafter; SpecDecError if they cannot serve the choice."""
    with open_engine(choice) as llm:
        llm.request_of(choice.params)  # its words and ids are checked before a draft model is opened
        yield Setup(llm, llm.session_of(choice.speculation), choice.params, choice.profile)


@contextmanager
def open_setup_of_models(choice: EngineChoice, output: Output) -> Iterator[Setup]:
    """`open_setup`, after engines are made from the models that are given in place of engines."""
    with engines_made(choice, output) as made, open_setup(made) as setup:
        yield setup


@contextmanager
def engines_made(choice: EngineChoice, output: Output) -> Iterator[EngineChoice]:
    """The choice with an engine in place of each model that it names. Engines that are missing are built, with a
    display of progress.
    """
    built_for, speculation = choice.built_for, choice.speculation
    options = built_for.options | choice.models.draft_output.options
    options |= {"max_draft_len": choice.max_draft_len, "self_draft": choice.self_draft}
    options["use_cache"] = not built_for.no_cache
    first = choice.answers_first and not speculation  # only with the kernels drafts change no bit
    with ExitStack() as stack:
        engines = ModelEngines(stack, options, output.phases, first)

        def with_engine(one: DrafterSpec) -> DrafterSpec:
            if not isinstance(one.draft_model, str):
                return one
            return one.with_draft_model(engines.of_draft_model(one.draft_model, one.num_masks or 0))

        if choice.model_dir is not None:
            has_layers = choice.hidden_states or choice.self_draft is not None
            heads = speculation.read_heads() if has_layers else ()
            engine_dir = engines.of_target(choice.model_dir, heads, choice.hidden_states)
            bundle = read_bundle(engine_dir, choice.model_dir)
            choice = replace(choice, engine_dir=engine_dir, bundle=bundle)
            if built_for.max_seq_len is None and output.human:
                _say_where_the_model_has_more_room(bundle.config)
        yield replace(choice, speculation=speculation.with_drafters(map(with_engine, speculation)))


def _say_where_the_model_has_more_room(config: EngineConfig) -> None:
    """Note that an engine takes fewer tokens than its model, if the user did not ask for that limit."""
    positions, room = positions_in(config.pretrained_config), config.build_config.max_request_len
    if positions is not None and positions > room:
        note(f"room for {room:,} tokens of prompt and output; the model has {positions:,}: `--max-seq-len` sets it")


@contextmanager
def token_progress(description: str, requests: Seq[Request], output: Output) -> Iterator[OnTokens]:
    """Progress of requests that are answered, counted in tokens up to the most tokens that they may have."""
    with output.progress(description, sum(request.max_new_tokens for request in requests)) as advance:

        def on_tokens(sequence: Sequence, new_tokens: list[int]) -> None:
            is_finished = sequence.finish_reason is not None
            num_left = sequence.request.max_new_tokens - len(sequence.output_tokens)
            advance(len(new_tokens) + (num_left if is_finished else 0))

        yield on_tokens


def lossless_check(
    session: Session, sequences: Seq[Sequence], without_drafter: Seq[Sequence], output: Output
) -> LosslessCheck:
    """Compare the outputs with outputs without a drafter; returns the check for the document's `checks`."""
    with output.progress("lossless check", NUM_PREFIXES) as advance:
        return check_outputs(session, sequences, without_drafter, advance)
