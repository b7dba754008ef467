"""What `run` and `summarize` do alike: a model and a session from their options, and the check of its outputs."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from commands.documents.settings import Setup
from commands.engines import Models, engines_of_models
from commands.options.speculation import Chosen
from commands.output import Output
from runtime.bundle import read_bundle
from runtime.engine import DEFAULT_MAX_NUM_TOKENS, KVCacheConfig
from runtime.evaluation.checks import LosslessCheck
from runtime.evaluation.lossless import NUM_PREFIXES, check_outputs
from runtime.llm import LLM
from runtime.params import SamplingParams
from runtime.request import Request, Sequence
from runtime.session import Mode, OnTokens, Session


@dataclass(frozen=True)
class SessionOptions:
    """What the command line says of a session."""

    engine_dir: Path
    tokenizer_dir: Path | None
    chosen: Chosen
    params: SamplingParams
    kv_cache: KVCacheConfig
    mode: Mode = "orchestrator"
    max_num_tokens: int = DEFAULT_MAX_NUM_TOKENS


@contextmanager
def open_setup(options: SessionOptions) -> Iterator[Setup]:
    """Open the engine and the drafter; SpecDecError if they cannot serve the options."""
    chosen = options.chosen
    llm = LLM(
        chosen.bundle or read_bundle(options.engine_dir),
        tokenizer=options.tokenizer_dir,
        mode=options.mode,
        kv_cache=options.kv_cache,
        max_num_tokens=options.max_num_tokens,
        device_ids=chosen.device_ids,
    )
    with llm:
        llm.request_of(options.params)  # its words and ids are checked before a draft model is opened
        session = llm.session_of(chosen.speculation)
        yield Setup(llm, session, options.params, chosen.profile)


@contextmanager
def open_setup_of_models(models: Models, options: SessionOptions, output: Output) -> Iterator[Setup]:
    """`open_setup`, with engines made of the models that are given in the place of engines."""
    with engines_of_models(models, options.engine_dir, options.chosen.speculation, output) as engines:
        chosen = options.chosen.with_speculation(engines.speculation)
        with open_setup(replace(options, engine_dir=engines.engine_dir, chosen=chosen)) as setup:
            yield setup


@contextmanager
def token_progress(description: str, requests: Seq[Request], output: Output) -> Iterator[OnTokens]:
    """Progress of requests that are answered: by tokens, up to the most that they may have."""
    with output.progress(description, sum(request.max_new_tokens for request in requests)) as advance:

        def on_tokens(sequence: Sequence, new_tokens: list[int]) -> None:
            is_finished = sequence.finish_reason is not None
            num_left = sequence.request.max_new_tokens - len(sequence.output_tokens)
            advance(len(new_tokens) + (num_left if is_finished else 0))

        yield on_tokens


def lossless_check(
    session: Session, sequences: Seq[Sequence], without_drafter: Seq[Sequence], output: Output
) -> LosslessCheck:
    """The outputs compared with those without a drafter, for the document's `checks`."""
    with output.progress("lossless check", NUM_PREFIXES) as advance:
        return check_outputs(session, sequences, without_drafter, advance)
