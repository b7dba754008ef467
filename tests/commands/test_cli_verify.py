"""`verify`: a sound artefact passes, and whatever is done to one of its files is found and named."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Result, Specdec, assert_valid
from sentences import Said
from shared import record_anew
from test_cli_errors import assert_one_clear_error

from runtime.builder.profile import Figures, Profile, ProfileEngine, write_profile
from runtime.drafters.specs import NgramDrafter
from runtime.drafters.speculation import Speculation
from runtime.text.corpus import write_corpus
from runtime.text.trace_lines import check_trace_lines, line_digest
from runtime.util.digests import file_digest
from runtime.util.errors import SpecDecError

Change = Callable[[Path], Any]


@pytest.fixture
def artefacts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama_dir: Path, llama_checkpoint_dir: Path,
    llama_uncompiled_dir: Path,
) -> Path:  # fmt: skip
    """The current directory: one of each, which a test may change."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(llama_uncompiled_dir, "engine")
    shutil.copytree(llama_checkpoint_dir, "checkpoint")
    shutil.copytree(llama_dir, "model")
    write_corpus(Path("corpus"), [[1, 2, 3, 4] * 99], vocab_size=300, tokenizer_digest="0" * 64, replace=False)
    figures = Figures(8, 1, 1.5, 0.25, 0.9, 1.4, 1.0, 1.25)
    write_profile(
        Path("profile"), Profile(ProfileEngine("e", "0" * 64), Speculation((NgramDrafter(4, 3),), "fixed"), figures)
    )
    Path("traces").write_text('{"prompt_ids": [5], "output_ids": [7], "digest": "bde66aadd41fb875"}\n' * 2)
    shutil.copytree("engine", "cache/engines/model-0123456789abcdef")
    Path("cache/engines/model-0123456789abcdef.lock").touch()
    Path("cache/kernels-0123456789abcdef.so").write_bytes(b"a library" + hashlib.sha256(b"a library").digest())
    os.utime("model/config.json", ns=(0, 0))
    with monkeypatch.context() as patch:
        patch.setenv("SPECDEC_CACHE_DIR", "cache")
        keep_digest_of(Path("model/model.safetensors"))
        keep_digest_of(Path("model/tokenizer.json"))
    return tmp_path


def keep_digest_of(path: Path) -> None:
    """Have the cache know a file, as if it had been there for longer than a moment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.util.digests._TIME_STEP_NS", -1)
        file_digest(path)


def verified(specdec: Specdec, path: str) -> tuple[Result, dict[str, Any]]:
    result = specdec("verify", path, "--json")
    document = json.loads(result.stdout)
    assert_valid("verify", document)
    assert document["is_sound"] == (result.exit_code == 0)
    return result, document


KINDS = ("engine", "checkpoint", "model", "corpus", "profile", "traces", "cache")


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_is_sound(kind: str, artefacts: Path, specdec: Specdec) -> None:
    result, document = verified(specdec, kind)
    assert (result.exit_code, result.stderr, document["kind"]) == (0, "", kind)
    assert {file["status"] for file in document["files"]} <= {"ok", "no_checksum"}
    assert kind == "model" or any(file["status"] == "ok" for file in document["files"])
    shown = specdec("verify", kind)
    assert shown.exit_code == 0 and f"{kind} of " in shown.stdout and document["files"][0]["name"] in shown.stdout
    assert specdec("verify", kind, "--quiet").stdout == ""


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit(**change: Any) -> Change:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | change))


ENGINE_WEIGHTS = "engines/model-0123456789abcdef/rank0.safetensors"
FOUND: list[tuple[str, str, Change, str]] = [
    ("engine", "rank0.safetensors", flip, "changed"),
    ("engine", "rank0.safetensors", Path.unlink, "missing"),
    ("engine", "tokenizer.json", flip, "changed"),
    ("engine", "notes.txt", Path.touch, "unknown"),
    ("engine", "link", lambda path: path.symlink_to("nowhere"), "unknown"),
    ("engine", "config.json", edit(vocab_size=5), "damaged"),
    ("engine", "generation_config.json", lambda path: path.write_text("{"), "damaged"),
    ("checkpoint", "rank0.safetensors", flip, "changed"),
    ("checkpoint", "tokenizer_config.json", Path.unlink, "missing"),
    ("checkpoint", "config.json", edit(dtype="float16"), "damaged"),
    ("model", "model.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-1]), "damaged"),
    ("model", "tokenizer.json", lambda path: path.write_text("{"), "damaged"),
    ("corpus", "corpus", flip, "damaged"),
    ("profile", "profile", edit(draft_len_mode="auto"), "damaged"),
    ("traces", "traces", lambda path: path.write_text(path.read_text().replace("7", "8", 1)), "damaged"),
    ("cache", ENGINE_WEIGHTS, flip, "changed"),
    ("cache", "kernels-0123456789abcdef.so", flip, "damaged"),
    ("cache", "kernels-0123456789abcdef.so", lambda path: path.write_bytes(b""), "damaged"),
    ("cache", "digests", lambda path: flip(next(path.iterdir())), "damaged"),
    ("cache", "digests", lambda path: shutil.copy(*path.iterdir()), "damaged"),
]


@pytest.mark.parametrize(
    ("kind", "name", "change", "status"), FOUND, ids=[f"{kind}: {name} {status}" for kind, name, _, status in FOUND]
)
def test_what_is_not_what_was_written_is_named(
    kind: str, name: str, change: Change, status: str, artefacts: Path, specdec: Specdec
) -> None:
    place = artefacts / kind
    change(place / name if place.is_dir() else place)
    result, document = verified(specdec, kind)
    (wrong,) = [file for file in document["files"] if file["status"] not in ("ok", "no_checksum")]
    assert wrong["status"] == status and wrong["name"].startswith(name)
    assert_one_clear_error(
        Result(result.exit_code, "", result.stderr), 1, (f"1 file is not what was written, such as `{wrong['name']}`",)
    )


def test_unknown_kept_digests_are_not_believed(artefacts: Path, specdec: Specdec) -> None:
    """A file that has lost a bit although its size and times are the same, as a disk would have it."""
    path = artefacts / "engine" / "rank0.safetensors"
    keep_digest_of(path)
    (record,) = [
        one for one in json.loads((artefacts / "engine/config.json").read_text())["files"] if one["name"] == path.name
    ]
    flip(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.util.digests.read_kept_digest", lambda kept: record["sha256"])
        assert file_digest(path) == record["sha256"]
        assert verified(specdec, "engine")[1]["files"][1]["status"] == "changed"


def test_checksums_that_are_right_of_tensors_that_are_not(artefacts: Path, specdec: Specdec) -> None:
    (artefacts / "engine" / "rank0.safetensors").write_bytes(b"\xff" * 500)
    record_anew(artefacts / "engine")
    _, document = verified(specdec, "engine")
    assert [file["status"] for file in document["files"] if file["name"] == "rank0.safetensors"] == ["damaged"]


def test_lines_of_ones_own_have_no_checksum(artefacts: Path, specdec: Specdec, said: Said) -> None:
    Path("traces").write_text('{"prompt": "a", "output": "b"}\n')
    _, document = verified(specdec, "traces")
    (file,) = document["files"]
    assert file["status"] == "no_checksum"
    said(file["note"], "1")


def test_every_flipped_bit_of_traces_is_found_or_changes_nothing_that_they_say(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"prompt_ids": [5, 12], "output_ids": [7]},
        {"prompt": "caf\u00e9 \u2028/x\n", "output_ids": [7, 1], "category": "1e5"},
    ]
    rows = [row | {"digest": line_digest(row)} for row in rows]
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert check_trace_lines(path) == (2, 2)
    written = path.read_bytes()
    for bit in range(8 * len(written)):
        flipped = bytearray(written)
        flipped[bit // 8] ^= 1 << bit % 8
        path.unlink()  # ext4 writes a file to the disk that is cut to nothing and written again
        path.write_bytes(flipped)
        try:
            check_trace_lines(path)
        except SpecDecError:
            continue
        assert [json.loads(line) for line in flipped.splitlines()] == rows, bytes(flipped)


@pytest.mark.parametrize("is_large", [True, False], ids=["SHA-256", "git"])
@pytest.mark.parametrize("in_cache", [True, False], ids=["cache", "directory"])
def test_downloaded_models_have_the_hubs_digests(
    is_large: bool, in_cache: bool, artefacts: Path, specdec: Specdec
) -> None:
    """The hub's client keeps a file under its digest, and for a directory of one's own beside it."""
    path = artefacts / "model" / "model.safetensors"
    data = path.read_bytes()
    digest = hashlib.sha256(data) if is_large else hashlib.sha1(f"blob {len(data)}\0".encode() + data)
    kept = artefacts / "model" / ".cache/huggingface/download/model.safetensors.metadata"
    target = path
    if in_cache:
        target = artefacts / "blobs" / digest.hexdigest()
        target.parent.mkdir()
        path.rename(target)
        path.symlink_to(target)
    else:
        kept.parent.mkdir(parents=True)
        kept.write_text(f"{'0' * 40}\n{digest.hexdigest()}\n1700000000.0\n")

    def status() -> str:
        files = verified(specdec, "model")[1]["files"]
        (found,) = [file["status"] for file in files if file["name"] == "model.safetensors"]
        return str(found)

    assert status() == "ok"
    flip(target)
    assert status() == "changed"


def test_index_of_shards_must_be_true(artefacts: Path, specdec: Specdec, said: Said) -> None:
    index = artefacts / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "model.safetensors", "y": "model-2.safetensors"}}))
    _, document = verified(specdec, "model")
    wrong = {file["name"]: file["note"] for file in document["files"] if file["status"] in ("missing", "damaged")}
    assert wrong.keys() == {"model-2.safetensors", "model.safetensors"}
    said(wrong["model-2.safetensors"], "model.safetensors.index.json")
    said(wrong["model.safetensors"], "model.safetensors.index.json", "x")
