"""What `run` and `summarize` do alike: a session from their options, and the check of its outputs."""

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commands.options.drafting import Drafting
from commands.options.generation import GenerationOptions
from commands.output import Output

if TYPE_CHECKING:
    from runtime.engine import KVCacheConfig
    from runtime.request import Sequence
    from runtime.session import Session, SessionSettings


def session_settings(
    engine_dir: Path,
    tokenizer_dir: Path | None,
    drafting: Drafting,
    generation: GenerationOptions,
    random_seed: int,
    kv_cache: "KVCacheConfig",
) -> "SessionSettings":
    """Of orchestrator mode. UsageError for parameters of sampling that are out of range."""
    from runtime.session import SessionSettings

    return SessionSettings(
        engine_dir,
        tokenizer_dir,
        drafting.drafter,
        generation.sampling.params(random_seed),
        kv_cache,
        generation.end_id,
        generation.stop_words or [],
        generation.sampling.bad_words or [],
        draft_len_mode=drafting.draft_len_mode,
        profile=drafting.profile,
    )


def lossless_check(
    session: "Session", sequences: Seq["Sequence"], without_drafter: Seq["Sequence"], output: Output
) -> dict[str, Any]:
    """The outputs compared with those without a drafter, for the document's `checks`."""
    from runtime.evaluation.lossless import NUM_PREFIXES, check_outputs

    with output.progress("lossless check", NUM_PREFIXES) as advance:
        return check_outputs(session, sequences, without_drafter, advance)
