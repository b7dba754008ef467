"""What a command line names is looked at before torch is imported, which takes seconds: is it there, and is it that?"""

import os
from pathlib import Path

from runtime.bundle import Bundle, is_engine_dir, read_bundle
from runtime.chat import has_chat_template, raise_no_chat_template
from runtime.config import MAX_DRAFT_LEN
from runtime.drafters.specs import Speculation
from runtime.errors import SpecDecError, UsageError, draft_engine_errors
from runtime.models import read_model_config, resolve_model, resolve_tokenizer


def check_models(
    engine_dir: Path, model_dir: str | None, tokenizer_dir: Path | None, speculation: Speculation
) -> Bundle | None:
    """The engine, None where it is to be made of a model; SpecDecError for one of them that cannot be opened."""
    if tokenizer_dir is not None:
        resolve_tokenizer(tokenizer_dir)
    bundle = None
    if model_dir is None:
        bundle = read_bundle(engine_dir)
    else:
        read_model_config(resolve_model(model_dir))
    check_drafter(speculation, bundle)
    return bundle


def check_drafter(speculation: Speculation, bundle: Bundle | None) -> None:
    """SpecDecError for a draft model or a corpus that cannot be read, or drafts that the engine does not take."""
    if bundle is not None:
        build = bundle.config.build_config
        speculation.check_fits(build.max_draft_len, has_copy=build.self_draft is not None)
    elif (speculation.max_draft_len or 0) > MAX_DRAFT_LEN:
        raise UsageError(
            f"engines take drafts of at most {MAX_DRAFT_LEN} tokens: {speculation.max_draft_len}", hint="lower it"
        )
    for one in speculation:
        if one.draft_model is not None:
            _check_draft_model(one.draft_model)
    if corpora := speculation.corpora:
        from runtime.corpus import Corpus

        for path in corpora:
            Corpus.open(path)


def _check_draft_model(model: str | Path) -> None:
    """A path is an engine's directory, a name a model."""
    with draft_engine_errors():
        if isinstance(model, Path):
            read_bundle(model)
        elif not is_engine_dir(Path(model)):
            read_model_config(resolve_model(model))


def check_chat_template(model_dir: str | None, tokenizer_dir: Path | None) -> None:
    """SpecDecError for a model whose tokenizer has no chat template: before an engine is built of it."""
    if model_dir is None and tokenizer_dir is None:
        return
    found = resolve_model(str(model_dir)) if tokenizer_dir is None else resolve_tokenizer(tokenizer_dir)
    if not has_chat_template(found):
        raise_no_chat_template(str(tokenizer_dir or model_dir))


def check_readable(paths: list[Path]) -> None:
    """SpecDecError for one that is no file or cannot be read. Nothing is read: a pipe gives what it holds once."""
    for path in paths:
        reason = None
        if not path.exists():
            reason = "No such file or directory"
        elif path.is_dir():
            reason = "Is a directory"
        elif not os.access(path, os.R_OK):
            reason = "Permission denied"
        if reason is not None:
            raise SpecDecError(f"cannot read the file ({reason}): {path}", hint="check the path")
