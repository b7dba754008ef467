"""`pull`, `list`, `rm` and `run` with models of a hub, which is a stand-in on this machine."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_line import Result, Specdec, assert_valid, ids_of
from hub_stand_in import Hub, running_hub
from huggingface_hub import constants
from huggingface_hub.utils import _cache_manager
from quantized import Q, save_gguf
from sentences import Said

from commands.options.model_word import may_be_model
from runtime.checkpoint.hub import download, gguf_models
from runtime.util.errors import SpecDecError

Commands = Callable[..., list[Result]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """The hub that the client in this process asks; it keeps its files in `tmp_path / "hf"`."""
    with running_hub() as made:
        files = f"{made.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for module in (constants, _cache_manager):
            monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path / "hf"))
        download.cache_clear()
        yield made
        download.cache_clear()


@pytest.fixture
def specdec_of_hub(hub: Hub, specdec: Specdec, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """`specdec_of_hub(["pull", …], ["offline", "run", …])`: commands with this hub, some without a network."""

    def call(*lines: list[object]) -> list[Result]:
        results = []
        for line in lines:
            is_offline = line[0] == "offline"
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
            download.cache_clear()
            results.append(specdec(*line[is_offline:]))
        return results

    return call


def gguf_bytes(directory: Path) -> bytes:
    path = directory / "model.gguf"
    save_gguf(path, Q.Q4_0)
    return path.read_bytes()


def test_one_file_of_a_repository_is_pulled_listed_run_and_removed(
    hub: Hub, specdec_of_hub: Commands, tmp_path: Path
) -> None:
    """Its download breaks off twice; then the hub is gone, and the model still answers."""
    data = gguf_bytes(tmp_path)
    others = {"tiny-Q8_0.gguf": b"GGUF", "mmproj-tiny-Q4_0.gguf": b"GGUF", "tiny-Q4_0_4_4.gguf": b"GGUF"}
    hub.repos["lab/tiny-GGUF"] = {"tiny-Q4_0.gguf": data, "README.md": b"hello", **others}
    hub.breaks["tiny-Q4_0.gguf"] = [len(data) // 2, len(data) // 4]
    (tmp_path / "ids.jsonl").write_text('{"prompt_ids": [5, 6, 7]}')
    asked = ["--input-file", tmp_path / "ids.jsonl", "--max-output-len", 4, "--compiler", "none", "--json"]
    remove = ["rm", "lab/tiny-GGUF:Q4_0", "--json"]
    pulled, *ran, absent, before, removed, after, again = specdec_of_hub(
        ["pull", "lab/tiny-GGUF:q4_0", "--json"],
        ["offline", "run", "lab/tiny-GGUF:Q4_0", *asked],
        ["run", tmp_path / "model.gguf", *asked],
        ["offline", "run", "lab/tiny-GGUF:Q8_0", "hi"],
        ["list", "--json"],
        remove,
        ["list", "--json"],
        remove,
    )
    assert_valid("pull", pulled.document)
    assert pulled.document["num_bytes"] == len(data)
    fetched = {path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path}
    assert fetched == {"tiny-Q4_0.gguf"} and hub.breaks["tiny-Q4_0.gguf"] == []
    ids = [ids_of(one.document)[0] for one in ran]
    assert ids[0] == ids[1] and len(ids[0]) == 4
    assert absent.exit_code == 1 and "`lab/tiny-GGUF:Q4_0`" in absent.stderr
    listed = before.document
    assert [(one["model"], one["num_bytes"]) for one in listed["downloaded"]] == [("lab/tiny-GGUF:Q4_0", len(data))]
    assert "tiny-GGUF_Q4_0" in {one["model"] for one in listed["models"]}
    assert_valid("rm", removed.document)
    assert removed.document["num_engines"] >= 1 and removed.document["num_bytes"] > len(data)
    assert after.document["downloaded"] == [] and again.exit_code == 1
    assert not list((tmp_path / "hf").rglob("blobs/*"))


def test_a_download_goes_on_where_it_broke_off(hub: Hub, specdec_of_hub: Commands) -> None:
    data = b"GGUF" + os.urandom(3_000_000)
    parts = {f"big/big-Q6_K-0000{i}-of-00002.gguf": data + bytes([i]) for i in (1, 2)}
    hub.repos["lab/big"] = {**parts, "big-Q6_K_L.gguf": data}
    hub.breaks["big/big-Q6_K-00001-of-00002.gguf"] = [2_000_000]
    _, model = gguf_models((name, len(data)) for name, data in sorted(hub.repos["lab/big"].items(), reverse=True))
    assert model.files == tuple(sorted(parts)) and model.num_bytes == 2 * len(data) + 2 and model.format == "Q6_K"
    (result,) = specdec_of_hub(["pull", "lab/big:Q6_K"])
    assert result.exit_code == 1 and "big-Q6_K" in result.stderr  # it is no GGUF file, but all of it was fetched
    assert len(hub.ranges) == 1 and int(hub.ranges[0].removeprefix("bytes=").removesuffix("-")) > 1_000_000
    assert not any("Q6_K_L" in path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path)


def test_a_repository_is_its_weights_or_its_only_gguf_model(hub: Hub) -> None:
    """And what is there already is not asked for again, but for its newest revision."""
    plain = {"config.json": b"{}", "model.safetensors": b"12345", "tokenizer.json": b"{}"}
    hub.repos = {
        "lab/both": {**plain, "both-Q4_0.gguf": b"GGUF"},
        "lab/one": {"sub/one.gguf": b"GGUF", "a.md": b""},
    }
    found = download("lab/both")
    assert {path.name for path in found.iterdir()} == set(plain)
    assert (found / "model.safetensors").read_bytes() == b"12345"
    assert download("lab/one").relative_to(download("lab/one").parents[1]) == Path("sub/one.gguf")
    for site in ("hf://", "hf.co/", "https://huggingface.co/"):  # as llama.cpp, Ollama and browsers have it
        assert download(f"{site}lab/one") == download("lab/one") and may_be_model(f"{site}lab/one:x", is_answered=True)
    download.cache_clear()
    before = len(hub.requests)
    assert download("lab/both") == found
    assert [path for _, path, _ in hub.requests[before:]] == ["/api/models/lab/both/revision/main"]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("lab/tiny-GGUF:Q5_K_M", ("`lab/tiny-GGUF:Q4_0`", "`lab/tiny-GGUF:Q8_0`")),
        ("lab/tiny-GGUF", ("several", "`lab/tiny-GGUF:Q4_0`", "`lab/tiny-GGUF:Q8_0`")),
        ("lab/twice:Q4_0", ("several", "`lab/twice:a-Q4_0.gguf`", "`lab/twice:b-Q4_0.gguf`")),
        ("lab/half:Q4_0", ("1 of 2 parts",)),
        ("lab/plain:Q4_0", ("lab/plain:Q4_0",)),
        ("lab/gated", ("`hf auth login`", "terms")),
        ("lab/gated:Q4_0", ("`hf auth login`", "terms")),
        ("lab/secret:Q4_0", ("`hf auth login`", "terms")),
        ("lab/forbidden", ("`hf auth login`", "terms")),
        ("lab/down", ("503",)),
        ("lab/none:Q4_0", ("lab/none:Q4_0", "`hf auth login`")),
        ("lab/none", ("lab/none", "`hf auth login`")),
    ],
)
def test_what_the_hub_does_not_give_is_said(name: str, values: tuple[str, ...], hub: Hub, said: Said) -> None:
    hub.repos = {
        "lab/tiny-GGUF": {"tiny-Q4_0.gguf": b"GGUF", "tiny-Q8_0.gguf": b"GGUF"},
        "lab/twice": {"a-Q4_0.gguf": b"GGUF", "b-Q4_0.gguf": b"GGUF"},
        "lab/half": {"a-Q4_0-00001-of-00002.gguf": b"GGUF"},
        "lab/plain": {"config.json": b"{}", "model.safetensors": b""},
        "lab/gated": {"config.json": b"{}"},
    }
    hub.gated, hub.refuses = {"lab/gated"}, {"lab/secret": 401, "lab/forbidden": 403, "lab/down": 503}
    with pytest.raises(SpecDecError) as caught:
        download(name)
    said(caught, *values)
