"""K/V on disk: restored is what computing again gives, to the bit, and nothing else is ever given out."""

import os
import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from common_fixtures import MakeEngineDir
from heads import copy_with_mtp, make_block, make_eagle, save_block, save_eagle
from sentences import Said
from tiny import make_model
from transformers import PreTrainedModel

from runtime.checkpoint.config import SelfDraft
from runtime.core.block_store import FILE
from runtime.core.request import Request, Sequence
from runtime.drafters.specs import DFlashDrafter, DraftTargetDrafter, EagleDrafter, MtpDrafter, SelfDrafter
from runtime.engine import kv_disk
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.llm import LLM
from runtime.loop import orchestrator, scheduler
from runtime.loop.prefill_chunks import ChunkSizes
from runtime.util.errors import SpecDecError, SpecDecWarning

PROMPT = [(7 * i * i + 3 * i) % 29 + 3 for i in range(45)]
NEXT = [9, 4, 11, 23, 5]


def request_of(prompt: list[int], num_tokens: int = 12, salt: str | None = None) -> Request:
    return Request(0, tuple(prompt), num_tokens, keep_logits=True, cache_salt=salt)


def answer(engine: Engine, prompt: list[int], num_tokens: int = 12, salt: str | None = None) -> Sequence:
    *_, (sequence, _) = scheduler.generate(engine, [request_of(prompt, num_tokens, salt)])
    return sequence


def opened(engine_dir: Path, disk: Path, **settings: Any) -> Engine:
    return Engine.open(engine_dir, kv_cache=KVCacheConfig(disk_dir=disk, **settings))


def same_bits(one: Sequence, other: Sequence) -> bool:
    return one.tokens == other.tokens and torch.equal(torch.stack(one.logits), torch.stack(other.logits))


@contextmanager
def warned(*parts: str) -> Iterator[list[str]]:
    """One warning, which has these parts; none without parts."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", SpecDecWarning)
        told: list[str] = []
        yield told
    told += [str(one.message) for one in found if issubclass(one.category, SpecDecWarning)]
    assert len(told) == bool(parts), told
    assert all(part in told[0] for part in parts)


# MLA, states alone, layers that share keys and values; then a window, recurrent states and convolutions, and ranks.
FAMILIES = ("deepseek-v3", "mamba2", "gemma4-shared")
# What is on disk is of the same kinds: sinks, chunks, one attention for several layers, both sorts of layers.
SLOW = ("llama", "gemma3", "lfm2", "qwen3.5", "gpt-oss", "llama4", "zamba2", "jamba", "kimi-linear")
KINDS = ["sliding_attention", "full_attention"] * 2
SHARED = {"layer_types": KINDS, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
CASES: list[tuple[str, dict[str, Any]]] = [(family, {}) for family in FAMILIES]
CASES += [("gemma3", {"kv_cache": "INT8"}), ("qwen3.5", {"kv_cache": "FP8", "dtype": "bfloat16"})]
CASES += [("llama", {"tp_size": 2, "compiler": "aot", "measure_costs": True})]  # other tests have built it
SLOW_CASES = [pytest.param(family, {}, marks=pytest.mark.slow) for family in SLOW]
SLOW_CASES += [pytest.param("qwen3.5", {"tp_size": 2}, marks=pytest.mark.slow)]


def name_of(one: Any) -> str:
    return one if isinstance(one, str) else "".join(one or ("plain",))


def model_of(family: str) -> PreTrainedModel:
    return make_model("gemma4-moe", **SHARED) if family == "gemma4-shared" else make_model(family)


@pytest.mark.parametrize(("family", "build"), [*CASES, *SLOW_CASES], ids=name_of)
def test_a_restored_conversation_goes_on_as_in_memory(
    family: str, build: dict[str, Any], make_engine_dir: MakeEngineDir, tmp_path: Path
) -> None:
    """Memory is an independent source: the tests of the cache say that it is what computing gives."""
    engine_dir = make_engine_dir(model_of(family), **build)
    with opened(engine_dir, tmp_path / "kv") as engine:
        first = answer(engine, PROMPT)
        with engine.without_disk():
            in_memory = answer(engine, first.tokens + NEXT)
        assert engine.prompt_tokens.num_on_disk == 0
    with opened(engine_dir, tmp_path / "kv") as engine:
        restored = answer(engine, first.tokens + NEXT)
        counts = engine.prompt_tokens
    assert restored.stats.num_reused_tokens == in_memory.stats.num_reused_tokens == counts.num_on_disk > len(PROMPT)
    assert (counts.num_in_memory, counts.num_computed) == (0, len(first.tokens + NEXT) - counts.num_on_disk)
    assert same_bits(restored, in_memory)


@pytest.mark.parametrize(
    ("family", "build"),
    [(None, {}), *(pytest.param(*case, marks=pytest.mark.slow) for case in [("gemma3", {}), ("lfm2", {}), *CASES])],
    ids=name_of,
)
def test_a_restored_prompt_has_the_bits_of_a_computed_one(
    family: str | None, build: dict[str, Any], llama_engine_dir: Path, make_engine_dir: MakeEngineDir, tmp_path: Path
) -> None:
    """Compiled engines give the same bits in any batch and chunks: here from the beginning, there from the disk."""
    engine_dir = make_engine_dir(model_of(family), **(build | {"compiler": "aot"})) if family else llama_engine_dir
    with Engine.open(engine_dir) as engine:
        first = answer(engine, PROMPT)
        engine.clear_cache()
        computed = answer(engine, first.tokens + NEXT)
    with opened(engine_dir, tmp_path) as engine:
        answer(engine, PROMPT)
        engine.flush_disk()
        engine.clear_cache()
        restored = answer(engine, first.tokens + NEXT)
        assert engine.prompt_tokens.num_on_disk > len(PROMPT)
    assert same_bits(restored, computed)


Made = tuple[Path, Any]
"""Directory of an engine, and a drafter for it."""
EAGLE_READS, BLOCK_READS = (0, 1, 1), (1, 2)


def with_draft_model(make: MakeEngineDir, directory: Path) -> Made:
    other = make_model("llama", num_hidden_layers=1)
    draft_dir = make(other, max_draft_len=0, max_seq_len=160, speculative_decoding_mode="none")
    return make(make_model("llama")), DraftTargetDrafter(draft_dir, 4)


def with_copy(make: MakeEngineDir, directory: Path) -> Made:
    return make(make_model("llama"), self_draft=SelfDraft("int4")), SelfDrafter(4)


def with_eagle(make: MakeEngineDir, directory: Path) -> Made:
    target = make_model("llama")
    head = save_eagle(make_eagle(target, states=EAGLE_READS, draft_vocab=20), directory, "speculators")
    return make(target, hidden_states=EAGLE_READS), EagleDrafter(head, 4)


def with_block(make: MakeEngineDir, directory: Path) -> Made:
    target = make_model("llama")
    head = save_block(make_block(target, states=BLOCK_READS), directory, "z-lab", num_target_layers=2)
    return make(target, hidden_states=BLOCK_READS, head_dir=head), DFlashDrafter(head, 4)


def with_mtp(make: MakeEngineDir, directory: Path) -> Made:
    target = make_model("llama")
    target.save_pretrained(directory / "model")
    return make(target, hidden_states=(2,)), MtpDrafter(copy_with_mtp(directory / "model", directory / "head"), 4)


DRAFTERS = {
    "draft-target": with_draft_model,
    "self": with_copy,
    "eagle": with_eagle,
    "block": with_block,
    "mtp": with_mtp,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_goes_on_as_in_memory(name: str, make_engine_dir: MakeEngineDir, tmp_path: Path) -> None:
    """Its context is there: the drafts are the same, token by token, and so is what of them is accepted."""
    engine_dir, drafter = DRAFTERS[name](make_engine_dir, tmp_path)
    found = []
    for is_first in (True, False):
        with LLM(engine_dir, kv_cache=KVCacheConfig(disk_dir=tmp_path / "kv")) as llm:
            session = llm.session(drafter, "fixed")
            engines = [engine for engine in (session.engine, session.draft_engine) if engine]
            if is_first:
                first = session.run([request_of(PROMPT, 16)]).sequences[0]
            with session._without_disk() if is_first else warned():
                found.append(session.run([request_of(first.tokens + NEXT, 16)]).sequences[0])
            if not is_first:
                assert all(engine.prompt_tokens.num_on_disk > 40 for engine in engines)
    in_memory, restored = found
    assert same_bits(restored, in_memory)
    assert restored.stats.num_draft_tokens > 0
    assert restored.stats.per_step_drafted == in_memory.stats.per_step_drafted
    assert restored.stats.per_step_accepted == in_memory.stats.per_step_accepted


def test_a_head_that_was_not_there_shortens_what_is_found(make_engine_dir: MakeEngineDir, tmp_path: Path) -> None:
    """Its hidden states are missing, and without them it would not draft."""
    engine_dir, eagle = with_eagle(make_engine_dir, tmp_path)
    for drafter, num_found in ((None, False), (eagle, False), (eagle, True), (None, True)):
        with LLM(engine_dir, kv_cache=KVCacheConfig(disk_dir=tmp_path / "kv")) as llm:
            session = llm.session(drafter, "fixed")
            sequence = session.run([request_of(PROMPT, 16)]).sequences[0]
            assert (session.engine.prompt_tokens.num_on_disk > 0) == num_found
            assert bool(sequence.stats.num_draft_tokens) == (drafter is not None)


def test_only_the_same_salt_finds_what_was_computed(llama_engine_dir: Path, tmp_path: Path) -> None:
    """Counts in memory and on disk, so that nothing depends on time. Names of salts are not in the file."""
    found = {}
    for place in ("memory", "disk"):
        with opened(llama_engine_dir, tmp_path / "kv") as engine:
            if place == "memory":
                answer(engine, PROMPT, salt="alice's secret")
            for salt in (None, "bob", "alice", "alice's secret"):
                with engine.without_disk() if place == "memory" else warned():
                    found[place, salt] = answer(engine, PROMPT, 1, salt).stats.num_reused_tokens
    assert {salt: num for (_, salt), num in found.items() if num} == {"alice's secret": 44}
    assert found["memory", "alice's secret"] == found["disk", "alice's secret"] == 44
    assert b"alice" not in (tmp_path / "kv" / FILE).read_bytes()


@contextmanager
def writing_elsewhere(directory: Path) -> Iterator[None]:
    """Another process writes, so that nobody else can."""
    other = sqlite3.connect(directory / FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    yield
    other.execute("ROLLBACK")
    other.close()


def test_what_is_needed_for_others_is_written_before(llama_engine_dir: Path, tmp_path: Path) -> None:
    """Blocks are overwritten while another process keeps the writer waiting."""
    with opened(llama_engine_dir, tmp_path, max_tokens=64) as engine:
        answer(engine, PROMPT, 2)
        engine.flush_disk()
        prompts = [[*PROMPT[i:], *PROMPT[:i]] for i in range(5, 25, 5)]
        with writing_elsewhere(tmp_path):
            computed = [answer(engine, prompt, 2) for prompt in prompts]
    with opened(llama_engine_dir, tmp_path, max_tokens=64) as engine:
        for prompt, expected in zip(prompts, computed, strict=True):
            restored = answer(engine, prompt, 2)
            assert restored.stats.num_reused_tokens == 44 and same_bits(restored, expected)


def test_what_comes_faster_than_it_is_written_is_told_once(
    llama_engine_dir: Path, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_disk, "_MOST_JOBS", 2)
    with opened(llama_engine_dir, tmp_path) as engine:
        answer(engine, PROMPT, 2)
        engine.flush_disk()
        with writing_elsewhere(tmp_path), warned("faster", "2 sequences") as told:
            for i in range(1, 8):
                answer(engine, PROMPT[i:], 2)
    said(told[0], "faster", tmp_path)


@pytest.mark.parametrize("is_over", [True, False], ids=["all", "what was aborted"])
def test_orchestrator_mode_writes_too(llama_engine_dir: Path, tmp_path: Path, is_over: bool) -> None:
    with opened(llama_engine_dir, tmp_path) as engine:
        steps = orchestrator.generate(engine, [request_of(PROMPT)])
        for num, _ in enumerate(steps):
            if not is_over and num == 5:
                steps.close()
    with opened(llama_engine_dir, tmp_path) as engine:
        assert answer(engine, PROMPT, 1).stats.num_reused_tokens == 44


@pytest.mark.parametrize("family", ["llama", "qwen3.5"])
def test_others_get_their_tokens_while_blocks_are_read(
    family: str, make_engine_dir: MakeEngineDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block a step where there is no time for more; an aborted sequence leaves nothing half read behind."""
    monkeypatch.setattr(ChunkSizes, "chunk_s", 0.0)
    engine_dir = make_engine_dir(make_model(family))
    with opened(engine_dir, tmp_path / "kv") as engine:
        first = answer(engine, PROMPT)
        with engine.without_disk():
            expected = answer(engine, first.tokens + NEXT)
    with opened(engine_dir, tmp_path / "kv") as engine:
        leader = scheduler.Scheduler(engine, chunks=ChunkSizes(engine.max_num_tokens, 0.0))
        leader.add(watched := Sequence.start(Request(1, (3, 4, 5), 100)))
        leader.step()
        for is_aborted in (True, False):
            leader.add(other := Sequence.start(request_of(first.tokens + NEXT)))
            leader.step()
            assert other.unread
            while other.unread:
                num_unread, num_tokens = len(other.unread), watched.num_generated
                assert other.num_generated == 0
                if is_aborted and num_unread < 8:
                    leader.drop(other)
                    break
                leader.step()
                assert (len(other.unread), watched.num_generated) == (num_unread - 1, num_tokens + 1)
        while other.finish_reason is None:
            leader.step()
        leader.release_all()
        assert engine.prompt_tokens.num_on_disk == expected.stats.num_reused_tokens > len(PROMPT)
        assert other.stats.num_reused_tokens == expected.stats.num_reused_tokens
    assert other.tokens == expected.tokens
    torch.testing.assert_close(torch.stack(other.logits), torch.stack(expected.logits), atol=1e-3, rtol=1e-3)


def test_reading_stops_where_computing_is_faster(llama_engine_dir: Path, tmp_path: Path) -> None:
    with opened(llama_engine_dir, tmp_path) as engine:
        answer(engine, PROMPT)
    with opened(llama_engine_dir, tmp_path) as engine:
        disk = engine._disk
        assert disk is not None and disk.rates.read_s is None
        disk.rates.read_s, disk.rates.compute_s = 2.0, 1.0
        answer(engine, PROMPT)
        assert engine.prompt_tokens.num_on_disk == 0
        engine.clear_cache()
        disk.rates.compute_s = 3.0
        answer(engine, PROMPT)
        assert engine.prompt_tokens.num_on_disk == 44


def test_the_writer_gets_its_share_of_a_busy_processor(llama_engine_dir: Path, tmp_path: Path) -> None:
    """Priority of the thread that writes. At the lowest it stood still beside six busy programs while it held the
    database's lock: an admission waited 1 s for the lock, and found nothing on disk.
    """
    with opened(llama_engine_dir, tmp_path) as engine:
        answer(engine, PROMPT)
        assert engine._disk is not None and engine._disk._thread is not None
        writer = engine._disk._thread.native_id
        assert writer is not None and writer != os.getpid()
        engine.flush_disk()  # the thread has begun
        assert os.getpriority(os.PRIO_PROCESS, writer) == os.getpriority(os.PRIO_PROCESS, os.getpid())


def test_flush_says_whether_everything_is_on_disk(
    llama_engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.core.block_store._WRITER_BUSY_S", 0.1)
    with opened(llama_engine_dir, tmp_path) as engine, closing(sqlite3.connect(tmp_path / FILE)) as other:
        other.execute("BEGIN IMMEDIATE")
        answer(engine, PROMPT)
        assert not engine.flush_disk()
        other.rollback()
        answer(engine, PROMPT)
        assert engine.flush_disk()
        engine.clear_cache()
        assert answer(engine, PROMPT).stats.num_reused_tokens == 44


def test_a_full_disk_stops_writing_and_nothing_else(llama_engine_dir: Path, tmp_path: Path, said: Said) -> None:
    with opened(llama_engine_dir, tmp_path) as engine:
        expected = answer(engine, PROMPT)
        engine.flush_disk()
        assert engine._disk is not None
        database = engine._disk._writer._db
        (num_pages,) = database.execute("PRAGMA page_count").fetchone()
        database.execute(f"PRAGMA max_page_count={num_pages}")
        with warned("the disk is full") as told:
            for i in range(1, 40):
                answer(engine, PROMPT[i:])
            engine.flush_disk()
        engine.clear_cache()
        assert answer(engine, PROMPT).tokens == expected.tokens
    said(told[0], "the disk is full", tmp_path)


def test_what_is_read_only_is_read(
    llama_engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    with opened(llama_engine_dir, tmp_path) as engine:
        answer(engine, PROMPT)
    before = (tmp_path / FILE).read_bytes()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write where others may not
    with warned("read only") as told, opened(llama_engine_dir, tmp_path, disk_bytes=10**8) as engine:
        assert answer(engine, PROMPT).stats.num_reused_tokens == 44
        answer(engine, PROMPT[1:])
    said(told[0], tmp_path)
    assert (tmp_path / FILE).read_bytes() == before


def damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    if kind == "a truncated file":
        data = data[: len(data) // 2]
    elif kind == "an empty file":
        data.clear()
    elif kind == "another file":
        data = bytearray(b"no database at all" * 1000)
    elif kind == "an index":
        del data[3 << 14 :]  # behind the page of the settings, so that it opens
        data += b"\xa5" * (path.stat().st_size - len(data))
    else:
        with sqlite3.connect(path) as database:
            database.execute("UPDATE parts SET data=zeroblob(length(data)) WHERE block=(SELECT max(id)-6 FROM blocks)")
        database.close()
        return
    path.write_bytes(data)


DAMAGES = ("a truncated file", "an empty file", "another file", "an index", "a record")


WHEN = [(kind, is_open) for kind in DAMAGES for is_open in (False, True) if is_open or kind != "another file"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "while_open"), WHEN, ids=[f"{kind}-{'open' if is_open else 'closed'}" for kind, is_open in WHEN]
)
def test_what_is_damaged_is_told_once_and_computed_again(
    kind: str, while_open: bool, llama_engine_dir: Path, tmp_path: Path, said: Said
) -> None:
    path = tmp_path / FILE
    with opened(llama_engine_dir, tmp_path) as engine:
        expected = answer(engine, PROMPT)
        engine.flush_disk()
        if not while_open:
            engine.close()
            damage(path, kind)
            parts = () if kind == "an empty file" else ("damaged", "computed again")  # an empty one is a new one
            with warned(*parts) as told:
                engine = opened(llama_engine_dir, tmp_path)
                assert answer(engine, PROMPT).tokens == expected.tokens
        else:
            damage(path, kind)
            with warned("damaged", "computed again") as told:
                engine.clear_cache()
                assert answer(engine, PROMPT).tokens == expected.tokens
                engine.flush_disk()
                assert answer(engine, PROMPT[1:]).finish_reason == "length"
        engine.close()
    if told:
        said(told[0], "damaged", tmp_path)
    with warned(), opened(llama_engine_dir, tmp_path) as engine:
        again = answer(engine, PROMPT)
        assert again.stats.num_reused_tokens == 44
        assert again.tokens == expected.tokens


def test_bad_directories_and_sizes_are_one_sentence_each(
    llama_engine_dir: Path, make_engine_dir: MakeEngineDir, tmp_path: Path, said: Said
) -> None:
    for settings in (
        {"disk_bytes": 10**9},
        {"disk_dir": tmp_path, "block_reuse": False},
        {"disk_dir": tmp_path, "disk_bytes": 10**5},
    ):
        with pytest.raises(SpecDecError) as raised:
            Engine.open(llama_engine_dir, kv_cache=KVCacheConfig(**settings))
        said(raised)
    with opened(llama_engine_dir, tmp_path, disk_bytes=10**8) as engine:
        answer(engine, PROMPT)
        engine.flush_disk()
        with warned("100.0 MB", "50.0 MB") as told:
            opened(llama_engine_dir, tmp_path, disk_bytes=5 * 10**7).close()
        said(told[0])
        assert engine._disk is not None and engine._disk._writer.max_bytes == 5 * 10**7
    other = make_engine_dir(make_model("qwen3"))
    with opened(llama_engine_dir, tmp_path), warned():  # a target, and its draft model
        opened(other, tmp_path).close()
    with warned("other engines") as told:
        opened(other, tmp_path).close()
    said(told[0])
