"""Models of the Hugging Face hub: `OWNER/NAME` is a repository, `OWNER/NAME:Q4_K_M` one of its GGUF models.

`huggingface_hub` downloads, resumes and keeps the files, in the cache that other programs use too. It keeps the list of
a repository's files as well, so that a model that was downloaded is found without a network.
"""

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from runtime.util.errors import SpecDecError

MODEL_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
_SITE = r"(?:hf://|(?:https?://)?(?:hf\.co|huggingface\.co)/)"
"""Beginnings of a model's address, which other programs and the hub's pages write before a repository's name."""
_NAME = re.compile(rf"(?:{_SITE})?" r"(?P<repo>[A-Za-z0-9][\w.-]*(/[\w.-]+)?)(:(?P<choice>\w[\w./-]*))?")
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_FORMAT = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q|TQ)\d\w*|MXFP4\w*|NVFP4|BF16|F?P?(?:16|32)|F16|F32)$", re.IGNORECASE)
_NO_MODELS = re.compile(r"(^|/)(mmproj|imatrix)|[.-]imatrix", re.IGNORECASE)
_MOST_NAMED = 12
_CHUNK_BYTES = 1 << 18
"""Most bytes that are lost if a download breaks off."""

ByteProgress = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
PROGRESS: ContextVar[ByteProgress | None] = ContextVar("progress", default=None)
"""Display of a download, called with a description; within its block, a function to call with (bytes done, all bytes).
"""


@dataclass(frozen=True)
class GGUFModel:
    """A GGUF model in a repository, in one file or several, of which the first is opened."""

    name: str
    """Path in the repository, without `-00001-of-00002` and `.gguf`."""
    files: tuple[str, ...]
    num_bytes: int

    @property
    def format(self) -> str:
        """Format in the file's name, such as `Q4_K_M`; the whole name if it has no format."""
        found = _FORMAT.search(self.name) or _FORMAT.search(str(PurePosixPath(self.name).parent))
        return found[1] if found else PurePosixPath(self.name).name

    def is_meant_by(self, choice: str) -> bool:
        """True if `choice` is the file's name, or a part of it between hyphens, dots or slashes, such as `Q4_K_M`."""
        if choice.lower().endswith(".gguf"):
            return choice in {part for file in self.files for part in (file, PurePosixPath(file).name)}
        return re.search(rf"(^|[-._/]){re.escape(choice)}($|[-./])", self.name, re.IGNORECASE) is not None


def parse_name(name: str) -> tuple[str, str | None] | None:
    """`owner/name:Q4_K_M` as (`owner/name`, `Q4_K_M`), `owner/name` as (`owner/name`, None); None for other names."""
    found = _NAME.fullmatch(name)
    if found is None or ".." in name or "--" in found["repo"] or (found["choice"] and "/" not in found["repo"]):
        return None
    return found["repo"], found["choice"]


@cache  # asked before torch is imported, and again for the engine
def download(name: str) -> Path:
    """The directory with the files of the model `name`, or its GGUF file; what is not here is downloaded. SpecDecError
    for a repository that does not exist or needs permission, for a GGUF model that the repository lacks or has several
    times, and if files are missing and the hub cannot be reached.
    """
    parsed = parse_name(name)
    assert parsed is not None
    repo, choice = parsed
    with _hub_errors(name, repo):
        directory, files = _listed(repo)
    models = gguf_models(files.items())
    has_weights = any(file.endswith(".safetensors") for file in files)
    if choice is None and (has_weights or not models):
        with _hub_errors(name, repo):
            return _fetched(repo, directory.name, MODEL_FILES, name)
    model = _chosen(repo, choice, models)
    with _hub_errors(name, repo):
        patterns = [re.sub(r"([*?[])", r"[\1]", file) for file in model.files]
        return _fetched(repo, directory.name, patterns, name) / model.files[0]


def gguf_models(files: Iterable[tuple[str, int]]) -> list[GGUFModel]:
    """The GGUF models among (file, number of bytes). Parts of a model count as one model."""
    found: dict[str, list[tuple[str, int]]] = {}
    for file, num_bytes in sorted(files):
        if file.lower().endswith(".gguf") and not _NO_MODELS.search(file):
            stem = file[: -len(".gguf")]
            part = _PART.fullmatch(stem)
            found.setdefault(part["stem"] if part else stem, []).append((file, num_bytes))
    return [
        GGUFModel(name, tuple(file for file, _ in parts), sum(num_bytes for _, num_bytes in parts))
        for name, parts in found.items()
    ]


def _chosen(repo: str, choice: str | None, models: list[GGUFModel]) -> GGUFModel:
    """The model that `choice` names; SpecDecError if it names none, or several."""
    formats = ", ".join(f"`{repo}:{model.format}`" for model in models[:_MOST_NAMED])
    formats += f" and {len(models) - _MOST_NAMED} more" if len(models) > _MOST_NAMED else ""
    meant = models if choice is None else [model for model in models if model.is_meant_by(choice)]
    exact = [model for model in meant if choice is not None and model.format.lower() == choice.lower()]
    meant = exact if len(exact) == 1 else meant
    if not models:
        raise SpecDecError(f"the repository has no GGUF file: {repo}:{choice}", hint=f"name it without `:{choice}`")
    if not meant:
        raise SpecDecError(f"the repository has no GGUF file of this name: {repo}:{choice}", hint=f"it has {formats}")
    if len(meant) > 1 and choice is None:
        raise SpecDecError(f"the repository has several GGUF files: {repo}", hint=f"name one of {formats}")
    if len(meant) > 1:
        files = ", ".join(f"`{repo}:{PurePosixPath(model.files[0]).name}`" for model in meant[:_MOST_NAMED])
        raise SpecDecError(f"several GGUF files have this name: {repo}:{choice}", hint=f"name one of {files}")
    part = _PART.fullmatch(meant[0].files[0][: -len(".gguf")])
    if part is not None and len(meant[0].files) != int(part["count"]):
        raise SpecDecError(
            f"the repository has {len(meant[0].files)} of {int(part['count'])} parts: {repo}:{choice}",
            hint="another format may be whole",
        )
    return meant[0]


def _listed(repo: str) -> tuple[Path, dict[str, int]]:
    """The directory for the repository's newest files, which may be missing, and the size of each file by path."""
    import huggingface_hub as hub

    quiet_hub()
    bar = _counting_bar(lambda done, total: None)
    directory = Path(hub.snapshot_download(repo, allow_patterns=[], tqdm_class=bar))  # no file yet: the list is kept
    try:
        return directory, {file.path: file.size for file in hub.get_cached_repo_tree(repo)}
    except hub.errors.CachedRepoTreeNotFoundError:  # downloaded by an earlier version, and there is no network
        return directory, {file: (directory / file).stat().st_size for file in _files_in(directory)}


def _files_in(directory: Path) -> list[str]:
    return [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]


def _fetched(repo: str, commit: str, patterns: list[str], name: str) -> Path:
    """The directory with the files of a commit that match `patterns`; files that are not here are downloaded."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    silent, shown = _counting_bar(lambda done, total: None), PROGRESS.get()
    with suppress(LocalEntryNotFoundError):
        found = snapshot_download(
            repo, revision=commit, allow_patterns=patterns, tqdm_class=silent, local_files_only=True
        )
        return Path(found)
    HfApi().repo_info(repo)  # without a network this fails at once, and the download after many tries
    constants.DOWNLOAD_CHUNK_SIZE = min(constants.DOWNLOAD_CHUNK_SIZE, _CHUNK_BYTES)
    with nullcontext(None) if shown is None else shown(f"downloading {name}") as report:
        bar = None if report is None else _counting_bar(report)
        return Path(snapshot_download(repo, revision=commit, allow_patterns=patterns, tqdm_class=bar))


def _counting_bar(report: Callable[[int, int], None]) -> Any:
    """A class of progress bars that draw nothing, and report bytes instead."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # as long as there are bars

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            named.pop("name", None)
            super().__init__(*given, **(named | {"file": nowhere}))

        def update(self, n: float | None = 1) -> Any:
            shown = super().update(n)
            if self.unit == "B" and self.total:
                report(int(self.n), int(self.total))
            return shown

    return Bar


def quiet_hub() -> None:
    """Silence the hub client's messages about retries. Its final error is still raised."""
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]


@contextmanager
def _hub_errors(name: str, repo: str) -> Iterator[None]:
    """Turn the hub client's errors into SpecDecErrors. A disk that is full or may not be written stays an OSError."""
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except errors.HfHubHTTPError as error:
        raise _of_answer(name, repo, error) from None
    except (
        errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, httpx2.ConnectError, httpx2.ConnectTimeout
    ) as error:  # fmt: skip
        if isinstance(error.__cause__, errors.HfHubHTTPError):
            raise _of_answer(name, repo, error.__cause__) from None
        raise SpecDecError(
            f"there is no file or directory of this name here, and the hub cannot be reached for: {name}",
            hint=_what_is_here() or "give the path of a local model, or a shipped name (demo, demo-draft, demo-hybrid)",
            code="no_such_model",
            name=name,
        ) from None
    except (OSError, httpx2.HTTPError) as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS):
            raise
        raise SpecDecError(
            f"the download broke off, {str(error).splitlines()[0] if str(error) else type(error).__name__}: {name}",
            hint="the same command goes on from there",
        ) from None


def _of_answer(name: str, repo: str, error: Any) -> SpecDecError:
    """The error for a request that the hub refused: an unknown or gated model, or another status."""
    from huggingface_hub import constants, errors

    status = error.response.status_code
    if isinstance(error, errors.RepositoryNotFoundError) and not isinstance(error, errors.GatedRepoError):
        return SpecDecError(
            f"neither a file or directory here nor a model on the hub: {name}",
            hint="shipped names are `demo`, `demo-draft`, `demo-hybrid`; a private model needs `hf auth login`",
            code="no_such_model",
            name=name,
        )
    if isinstance(error, errors.GatedRepoError) or status in (401, 403):
        return SpecDecError(
            f"the hub gives this model only to those who accepted its terms: {name}",
            hint=f"accept the terms at {constants.ENDPOINT}/{repo}, then log in with `hf auth login`",
        )
    return SpecDecError(
        f"the hub cannot give this model now, status {status}: {name}", hint=_what_is_here() or "try again later"
    )


def _what_is_here() -> str | None:
    """A hint with the models that were downloaded; None if there are none."""
    names = [model.name for model in local_models()]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"downloaded are {', '.join(f'`{name}`' for name in names[:_MOST_NAMED])}{more}" if names else None


@dataclass(frozen=True)
class LocalModel:
    """A downloaded model."""

    name: str
    """Name by which the model is run: `OWNER/NAME`, or `OWNER/NAME:Q4_K_M`."""
    num_bytes: int
    used_s: float
    """Time of last use, in seconds since 1970."""
    files: tuple[Path, ...]


def local_models() -> list[LocalModel]:
    """The models in the hub client's cache, the most recently used first."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = [repo for repo in scan_cache_dir().repos if repo.repo_type == "model" and repo.revisions]
    except CacheNotFound:
        return []
    found = [model for repo in repos for model in _models_of(repo)]
    return sorted(found, key=lambda model: (model.used_s, model.name), reverse=True)


def _models_of(repo: Any) -> Iterator[LocalModel]:
    """The models of a repository, in the revision that was downloaded last."""
    revision = max(repo.revisions, key=lambda one: one.last_modified)
    files = {str(file.file_path.relative_to(revision.snapshot_path)): file for file in revision.files}
    for model in gguf_models((name, file.size_on_disk) for name, file in files.items()):
        parts = [files[name] for name in model.files]
        used_s = max(file.blob_last_accessed for file in parts)
        paths = tuple(file.file_path for file in parts)
        yield LocalModel(f"{repo.repo_id}:{model.format}", model.num_bytes, used_s, paths)
    others = [file for name, file in files.items() if not name.lower().endswith(".gguf")]
    if any(file.file_name.endswith(".safetensors") for file in others):
        num_bytes = sum(file.size_on_disk for file in others)
        yield LocalModel(repo.repo_id, num_bytes, repo.last_accessed, tuple(file.file_path for file in others))


def remove(model: LocalModel) -> None:
    """Remove a model's files from the hub client's cache, and the repository's directory with its last model."""
    for path in model.files:
        blob = path.resolve()
        path.unlink()
        if blob != path:
            blob.unlink(missing_ok=True)
    snapshot = next(parent for parent in model.files[0].parents if parent.parent.name == "snapshots")
    if not any(name.endswith((".gguf", ".safetensors")) for name in _files_in(snapshot)):
        import shutil

        shutil.rmtree(snapshot.parents[1])
