"""`specdec cache`: what is there, and what goes: the least recently used first, and none that is in use."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Specdec, assert_valid
from filelock import FileLock
from sentences import Said
from waiting import HANG_S

import runtime.checkpoint.cached_engines
from runtime.builder.engine_cache import engine_of_model, settings_of
from runtime.util.cache import used_entry
from runtime.util.errors import SpecDecError, SpecDecWarning

SIZES = {"oldest-1": 3000, "older-2": 2000, "newest-3": 1000}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three entries, which were used one after the other, and what else a cache has."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    for i, (name, size) in enumerate(SIZES.items()):
        entry = tmp_path / "engines" / name
        (entry / "inner").mkdir(parents=True)
        (entry / "config.json").write_bytes(b"x" * (size - 10))
        (entry / "inner" / "file").write_bytes(b"x" * 10)
        entry.with_name(f"{name}.lock").touch()
        os.utime(entry, (1000 * i, 1000 * i))
    (tmp_path / "digests").mkdir()
    (tmp_path / "digests" / "a").write_bytes(b"x" * 7)
    (tmp_path / "engines" / ".newest-3.left").mkdir()
    return tmp_path


def names(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "engines").iterdir() if path.is_dir() and path.name[0] != ".")


def test_list_shows_sizes_and_the_last_used_first(cache: Path, specdec: Specdec) -> None:
    document = specdec("cache", "list", "--json").document
    assert [(Path(one["path"]).name, one["num_bytes"], one["in_use"]) for one in document["engines"]] == [
        (name, size, False) for name, size in reversed(SIZES.items())
    ]
    assert document["other_bytes"] == 7
    shown = specdec("cache", "list").stdout
    assert shown.index("newest-3") < shown.index("older-2") < shown.index("oldest-1") and "3 engines" in shown


def test_list_says_that_shared_weights_count_once(cache: Path, specdec: Specdec) -> None:
    weights = cache / "engines" / "oldest-1" / "weights"
    weights.write_bytes(b"x" * 5_000_000)
    assert "count once" not in specdec("cache", "list").stdout
    os.link(weights, cache / "engines" / "newest-3" / "weights")
    total, shared = specdec("cache", "list").stdout.splitlines()[-2:]
    assert total.startswith("3 engines, 5.0 MB;") and "count once" in shared and shared.endswith(" 10.0 MB")


def test_an_empty_file_of_keys_and_values_stays_as_it_is(cache: Path, tmp_path: Path, specdec: Specdec) -> None:
    directory = tmp_path / "kv"
    directory.mkdir()
    (directory / "kv.sqlite").touch()
    for command in (["list"], ["prune", "--max-size", "1K"]):
        assert specdec("cache", *command, "--kv-cache-dir", directory).exit_code == 1
    assert [(path.name, path.stat().st_size) for path in directory.iterdir()] == [("kv.sqlite", 0)]


@pytest.mark.parametrize(
    ("size", "left"),
    [
        ("6000", ["newest-3", "older-2", "oldest-1"]),
        ("5999", ["newest-3", "older-2"]),
        ("3K", ["newest-3", "older-2"]),
        ("2.95KiB", ["newest-3", "older-2"]),
        ("0", []),
    ],
)
def test_prune_removes_the_least_recently_used_until_it_fits(
    size: str, left: list[str], cache: Path, specdec: Specdec
) -> None:
    dry = specdec("cache", "prune", "--max-size", size, "--dry-run", "--json").document
    assert names(cache) == sorted(SIZES)
    done = specdec("cache", "prune", "--max-size", size, "--json").document
    assert names(cache) == left and done["left_bytes"] == sum(SIZES[name] for name in left)
    assert done["removed"] == dry["removed"] and done["left_bytes"] == dry["left_bytes"]
    assert (cache / "digests" / "a").exists()


def hold(path: Path, is_held: Callable[[], None], until: Callable[[], None]) -> None:
    with used_entry(path) as is_there:
        assert is_there
        is_held()
        until()


def test_what_a_process_uses_stays(cache: Path, specdec: Specdec, said: Said) -> None:
    """Also if that process is another one; when it has ended, even by a kill, the entry may go."""
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()
    process = context.Process(target=hold, args=(cache / "engines" / "older-2", held.set, release.wait))
    process.start()
    assert held.wait(HANG_S)
    assert [one["in_use"] for one in specdec("cache", "list", "--json").document["engines"]] == [True, False, False]
    result = specdec("cache", "prune", "--max-size", 0)
    assert names(cache) == ["older-2"]
    said(result, "1")
    process.kill()
    process.join()
    assert specdec("cache", "prune", "--max-size", 0).exit_code == 0 and names(cache) == []


def test_what_a_process_is_making_stays(cache: Path, specdec: Specdec) -> None:
    with FileLock(cache / "engines" / "oldest-1.lock"):
        assert specdec("cache", "prune", "--max-size", 0).exit_code == 0
    assert names(cache) == ["oldest-1"]


def test_engines_of_one_model_share_their_weights_and_the_oldest_go(
    llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, specdec: Specdec, said: Said
) -> None:
    """Engines with other limits have one file of weights, which goes with the last of them."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(runtime.checkpoint.cached_engines, "_SHARED_BYTES", 1)
    opened = []
    for max_seq_len, quantization in ((64, None), (128, None), (128, "int8")):
        settings = settings_of({"max_seq_len": max_seq_len, "quantization": quantization, "compiler": "none"})
        with engine_of_model(str(llama_dir), settings) as engine_dir:
            opened.append((engine_dir / "rank0.safetensors").resolve())
            assert specdec("verify", engine_dir).exit_code == 0
    weights = {path.stat().st_ino: path for path in opened}
    assert opened[0] == opened[1] and len(weights) == 2
    assert sorted(weights[i].name for i in weights) == sorted(p.name for p in (tmp_path / "cache/weights").glob("*.*s"))
    listed = specdec("list", "--json").document
    assert_valid("list", listed)
    counts = [(one["model"], one["format"].partition(",")[0], one["num_engines"]) for one in listed["models"]]
    assert counts == [(llama_dir.name, "float32", 1), (llama_dir.name, "float32", 2)]
    alone = [path.stat().st_size for path in weights.values()]
    plain = listed["models"][1]["num_bytes"]
    assert max(alone) < plain < 2 * max(alone) and listed["num_bytes"] < plain + 2 * min(alone) + max(alone)
    assert "W8A16" in specdec("list").stdout
    monkeypatch.setenv("SPECDEC_CACHE_SIZE", "1")
    settings = settings_of({"max_seq_len": 32, "compiler": "none"})
    with pytest.warns(SpecDecWarning, match="SIZE") as told, engine_of_model(str(llama_dir), settings) as engine_dir:
        pass
    said(str(told[0].message))
    left = [path.name for path in (tmp_path / "cache" / "engines").iterdir() if path.is_dir()]
    assert left == [engine_dir.name]
    assert [path.name for path in (tmp_path / "cache/weights").glob("*.*s")] == [opened[0].name]
    assert specdec("cache", "prune", "--max-size", 0).exit_code == 0
    assert [*(tmp_path / "cache/weights").glob("*.*s")] == []
    assert specdec("list").exit_code == 0
    monkeypatch.setenv("SPECDEC_CACHE_SIZE", "much")
    refused = specdec("list")
    assert refused.exit_code == 1
    said(refused, "SPECDEC_CACHE_SIZE", "much")
    with pytest.raises(SpecDecError, match="much"), engine_of_model(str(llama_dir), settings):
        pass  # and no engine is built first
    assert [path.name for path in (tmp_path / "cache" / "engines").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("size", ["much", "-1"])
def test_no_size_is_wrong_usage(size: str, cache: Path, specdec: Specdec, said: Said) -> None:
    result = specdec("cache", "prune", f"--max-size={size}")
    assert result.exit_code == 2
    said(result, "`--max-size`", size)
    assert names(cache) == sorted(SIZES)
