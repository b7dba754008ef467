"""The K/V cache on disk, below the cache in memory: read when a sequence is admitted, and written in a thread.

All parts that a sequence needs to continue are read together or not at all: the model's keys and values, a trained
head's keys, values and hidden states, and the state of layers without attention. If a part is missing, the sequence
continues from before it. So the restored numbers equal computed numbers to the bit, and a test checks it.

A thread copies blocks of released sequences straight from the cache's memory. `BlockManager` tells whether a block
still has the content that was to be written. A block that is needed for other tokens before it was written is copied at
that moment, up to 256 MiB of such blocks.
"""

import contextlib
import ctypes
import os
import threading
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeVar
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from runtime.checkpoint.build_code import digests_of_build_code
from runtime.checkpoint.config import EngineConfig, as_json
from runtime.core.block_store import (
    STATE,
    BlockStore,
    Bytes,
    Damaged,
    FoundRecords,
    Owner,
    Record,
    Unwritable,
    as_bytes,
)
from runtime.core.kv_cache import BlockManager, CachedBlock, KVPool
from runtime.core.old_answers import Answer
from runtime.core.request import Sequence
from runtime.core.scopes import Scope
from runtime.core.states import States
from runtime.core.text_tables import forget_answers, read_answers, read_outputs, write_answers, write_output
from runtime.engine.head_cache import HeadCache
from runtime.util.digests import digest
from runtime.util.errors import SpecDecError, SpecDecWarning, UsageError

_KV = "kv"
_BATCH_BYTES = 8 << 20
"""Bytes after which a transaction ends; readers wait for the end of a transaction."""
_MOST_COPIED_BYTES = 256 << 20
"""Most bytes of blocks that are copied because they were needed before they were written."""
_MOST_JOBS = 256
"""Most jobs that wait, such as released sequences; further jobs are not written."""
_CLOSE_S = 60.0
_MEASURED = ("step_costs", "host_s", "self_draft_costs", "machine", "quality", "logits_check", "self_draft_check")
_NOTES = ("compiler_note", "why_whole", "config_digest")
_DECAY, _TRY_AGAIN = 0.7, 32
_LEAST_TIMED = 64
T = TypeVar("T")


def digest_of_engine(config: EngineConfig) -> str:
    """Digest of everything that an engine's keys and values depend on: its files, settings and build code."""
    settings = {name: value for name, value in as_json(config).items() if name not in (*_MEASURED, *_NOTES)}
    return digest([repr(settings), _digest_of_code()])


@cache
def _digest_of_code() -> str:
    return digest(digests_of_build_code())


@dataclass
class Rates:
    """Seconds to compute a token, and to read a token from disk: decaying means, None until they are measured."""

    compute_s: float | None = None
    read_s: float | None = None
    _num_skipped: int = 0

    def computed(self, num_tokens: int, seconds: float) -> None:
        self.compute_s = _mean(self.compute_s, seconds / num_tokens)

    def read(self, num_tokens: int, seconds: float) -> None:
        if num_tokens >= _LEAST_TIMED:  # otherwise most of the time is the fixed cost of a read
            self.read_s = _mean(self.read_s, seconds / num_tokens)

    def reading_pays(self) -> bool:
        """True unless reading takes longer than computing; then True every 32nd time, to measure reading again."""
        if self.compute_s is None or self.read_s is None or self.read_s < self.compute_s:
            return True
        self._num_skipped += 1
        return self._num_skipped % _TRY_AGAIN == 0


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before * _DECAY + now * (1 - _DECAY)


class Part:
    """Tensors with a row for each block, which become the bytes of one part of a record."""

    def __init__(self, name: str, tensors: Seq[Tensor]) -> None:
        self.name = name
        self._rows = [tensor.detach().view(len(tensor), -1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        self._sizes = [rows.shape[1] for rows in self._rows]
        self._addresses = [rows.data_ptr() if rows.device.type == "cpu" else None for rows in self._rows]
        self.num_bytes = sum(self._sizes)

    def read(self, block: int) -> memoryview:
        """The bytes of a block."""
        data = np.empty(self.num_bytes, np.uint8)
        at = data.ctypes.data
        for rows, size, address in zip(self._rows, self._sizes, self._addresses, strict=True):
            if address is None:
                row = rows[block].cpu()
                ctypes.memmove(at, row.data_ptr(), size)
            else:  # a model may have 60 tensors, and slicing 60 arrays would take longer than the copies
                ctypes.memmove(at, address + block * size, size)
            at += size
        return data.data

    def write(self, block: int, data: bytes) -> None:
        """Give a block these `num_bytes` bytes."""
        numbers = np.frombuffer(data, np.uint8)
        assert len(numbers) == self.num_bytes
        start = numbers.ctypes.data
        at = start
        for rows, size, address in zip(self._rows, self._sizes, self._addresses, strict=True):
            if address is None:
                row = numbers[at - start : at - start + size]
                rows[block] = torch.from_numpy(row.copy()).to(rows.device)
            else:
                ctypes.memmove(address + block * size, at, size)
            at += size


def _part_of_rank(rank: int, pool: KVPool) -> Part:
    return Part(f"{_KV} {rank}" if rank else _KV, [*pool.keys, *pool.values, *pool.scales])


def _part_of_head(head: HeadCache, name: str) -> Part:
    pool = head.pool
    return Part(f"head {name}", [head.states, *pool.keys, *pool.values, *pool.scales, *head.flags()])


@dataclass(eq=False)
class _Waiting:
    """A block that waits to be written, with the parts that there were when it was last released. `data` has the bytes
    of each part, once the block was copied.
    """

    block: int
    content: CachedBlock
    parts: Seq[Part]
    data: dict[str, Bytes] | None = None
    num_jobs: int = 0


@dataclass(eq=False)
class _Job:
    """The computed tokens of a sequence, their blocks, and states after some of them."""

    salt: str | None
    tokens: list[int]
    blocks: list[_Waiting]
    parts: Seq[Part]
    states: dict[int, bytes] = field(default_factory=dict)


@dataclass(eq=False)
class _AnswerJob:
    """Answers that wait to be written, each with its owner's salt, and damaged rows that wait to be removed."""

    vocabulary: str
    answers: list[tuple[str | None, Answer]]
    damaged: list[int] = field(default_factory=list)
    blocks: tuple[()] = ()


@dataclass(eq=False)
class _OutputJob:
    """An output that waits to be written (`runtime.core.text_tables`)."""

    salt: str | None
    scopes: list[Scope]
    tokens: list[int]
    blocks: tuple[()] = ()


_AnyJob = _Job | _AnswerJob | _OutputJob


class KVDisk:
    """The disk of an engine. Its methods are called in the engine's turns, except `flush` and `close`.

    `pools` has the memory of each rank. A record has the bytes of all ranks, so all have the same tokens. SpecDecError
    if the directory cannot be used, or has no room for a sequence of the engine's longest length.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int | None,
        config: EngineConfig,
        blocks: BlockManager,
        pools: Seq[KVPool],
        states: States | None,
    ) -> None:
        self.rates = Rates()
        self.digest = digest_of_engine(config)
        self._model = f"{config.pretrained_config.get('model_type')}, {config.dtype}"
        self._blocks, self._states, self._block_size = blocks, states, blocks.block_size
        self._kv = [_part_of_rank(rank, pool) for rank, pool in enumerate(pools)]
        self._heads: list[tuple[HeadCache, Part | None]] = []
        self._process_id = os.getpid()
        self._told: set[str] = set()
        self._is_writing = True
        self._jobs: deque[_AnyJob] = deque()
        self._waiting: dict[int, _Waiting] = {}
        self._num_copied_bytes = 0
        self._condition = threading.Condition()
        self._is_idle, self._is_closed = True, False
        self._num_left_out = 0
        self._thread: threading.Thread | None = None
        self.directory = directory.resolve()
        self._check_size(directory, max_bytes, config)
        self._reader, self._writer = BlockStore(directory, max_bytes), BlockStore(directory)
        try:
            self._tell_of_directory(directory)
        except Damaged as error:
            self._fail(self._reader, error)  # the writer notices later that its database was replaced
        except (TimeoutError, Unwritable):
            pass  # a note about other engines is not worth waiting for
        blocks.on_evict = self._copy
        _OPEN.add(self)

    def _check_size(self, directory: Path, max_bytes: int | None, config: EngineConfig) -> None:
        longest = config.build_config.max_request_len
        needed = self._blocks.num_blocks_for(longest) * sum(part.num_bytes for part in self._kv) + (1 << 19)
        needed += 0 if self._states is None else self._states.num_saved_bytes
        if max_bytes is not None and max_bytes < needed:
            raise UsageError(
                f"K/V on disk need {needed / 1e6:,.1f} MB for one sequence of {longest:,} tokens, and may have "
                f"{max_bytes:,} bytes: {directory}",
                hint="raise `disk_bytes`, or lower `max_seq_len`",
                code="disk_too_small",
            )

    def _tell_of_directory(self, directory: Path) -> None:
        store = self._reader
        if store.was_damaged:
            self._tell("damaged", f"the K/V on disk were damaged, and are computed again: {directory}")
        if store.is_read_only:
            self._is_writing = False
            self._tell("writing", f"K/V on disk can be read only, and none are written: {directory}")
        if store.other_limit is not None:
            self._tell(
                "limit",
                f"K/V on disk had another limit, {store.other_limit / 1e6:,.1f} MB; the limit given last holds for all "
                f"processes, {store.max_bytes / 1e6:,.1f} MB: {directory}",
            )
        others = [one for one in store.engines() if one.digest != self.digest]
        is_shared = any(one.directory == self.directory for one in _OPEN)  # by a target, and this is its draft model
        if others and not is_shared and not store.knows(self.digest):
            self._tell("foreign", f"the K/V on disk belong to other engines, and none of them are read: {directory}")

    def add_head(self, head: HeadCache, name: str | None) -> None:
        """Read and write this head's memory of each block too, from now on. While there is a head without a name, which
        has no place on disk, nothing is read.
        """
        self._heads.append((head, None if name is None else _part_of_head(head, name)))

    def remove_head(self, head: HeadCache) -> None:
        self._heads = [one for one in self._heads if one[0] is not head]

    @property
    def _parts(self) -> list[Part]:
        return [*self._kv, *(part for _, part in self._heads if part is not None)]

    def find(self, sequence: Sequence) -> None:
        """Find the records on disk that an admitted sequence lacks, and set its `unread`, which `read` reads."""
        before, most = sequence.num_computed, sequence.max_reused
        sequence.unread = []
        if most - before < self._block_size or any(part is None for _, part in self._heads):
            return
        if not self.rates.reading_pays():
            return

        def find(reader: BlockStore) -> FoundRecords:
            owner = reader.owner(self.digest, sequence.request.cache_salt)
            return reader.find(owner, sequence.tokens[:most], self._block_size, with_states=self._states is not None)

        if (found := self._asked(find)) is None:
            return
        records = found.records
        if self._states is not None:
            state = max(found.states, key=lambda record: record.end, default=None)
            records = [] if state is None else [*(one for one in records if one.end <= state.start), state]
        sequence.unread = [one for one in records if one.end > before]

    def _asked(self, ask: Callable[[BlockStore], T]) -> T | None:
        """Result of `ask` with the database; None in a fork, while another process writes, and after a failure."""
        if os.getpid() != self._process_id:
            return None
        try:
            if self._reader.is_replaced():
                self._reader.reopen()
            return ask(self._reader)
        except TimeoutError:
            return None
        except (Damaged, Unwritable, SpecDecError) as error:
            self._fail(self._reader, error)
            return None

    def read(self, sequence: Sequence, until: float) -> int:
        """Read a sequence's `unread` records into its blocks, at least one record, and more until this time; returns
        the number of tokens by which `num_computed` advanced.

        If the model has states, `num_computed` advances only with the last record, whose state is read. Damaged records
        are removed from the disk.
        """
        before, start, num_read = sequence.num_computed, time.perf_counter(), 0
        records, sequence.unread = sequence.unread, []
        try:
            with ThreadPoolExecutor(1) as thread:  # reads a record while the one before is copied to its block
                ahead = thread.submit(self._parts_of, records[0], with_state=len(records) == 1)
                for i, record in enumerate(records, 1):
                    if num_read and time.perf_counter() >= until:
                        sequence.unread = records[i - 1 :]
                        break
                    if (parts := ahead.result()) is None:
                        break
                    if i < len(records):
                        ahead = thread.submit(self._parts_of, records[i], with_state=i + 1 == len(records))
                    self._put(sequence, record, parts)
                    num_read += record.end - record.start
        except TimeoutError:
            pass
        except (Damaged, Unwritable, SpecDecError) as error:
            self._fail(self._reader, error)
        if num_read:
            self.rates.read(num_read, time.perf_counter() - start)
        return sequence.num_computed - before

    def _put(self, sequence: Sequence, record: Record, parts: dict[str, bytes]) -> None:
        """Give a sequence the parts of one record."""
        for part in self._parts:
            part.write(sequence.block_table[record.start // self._block_size], parts[part.name])
        if self._states is not None and STATE in parts:
            self._states.load(sequence, record.end, parts[STATE])
        if self._states is None or STATE in parts:
            sequence.num_computed = record.end

    def _parts_of(self, record: Record, *, with_state: bool) -> dict[str, bytes] | None:
        """All parts of a record; None if a part is missing or damaged."""
        names = [part.name for part in self._parts]
        sizes = {part.name: part.num_bytes for part in self._parts}
        if with_state and self._states is not None:
            names.append(STATE)
            sizes[STATE] = self._states.num_saved_bytes
        try:
            parts = self._reader.read(record, names)
        except Damaged as error:
            self._tell(
                "record",
                f"K/V on disk are damaged ({error}), and are computed again: {self._reader.directory}",
            )
            with contextlib.suppress(Damaged, Unwritable, TimeoutError):
                self._reader.forget_parts(record.id)
            return None
        return parts if parts is not None and all(len(parts[name]) == sizes[name] for name in names) else None

    def keep_state(self, sequence: Sequence) -> None:
        """Have the state after a running sequence's computed tokens written when the sequence is released."""
        if self._is_writing and self._states is not None and (saved := self._states.saved(sequence)) is not None:
            sequence.kept_states[sequence.num_computed] = saved

    def save(self, sequence: Sequence) -> None:
        """Have a sequence written that is about to be released. If it will be continued later, this is done only if it
        has a new whole block or a state.
        """
        num_computed = sequence.num_computed
        num_whole = num_computed // self._block_size
        if not self._is_writing or not num_computed or os.getpid() != self._process_id:
            return
        if not sequence.is_over and num_whole <= sequence.num_saved and not sequence.kept_states:
            return
        if sequence.is_over:
            self.keep_state(sequence)
        sequence.num_saved = num_whole
        with self._condition:
            if self._is_closed:
                return
            if len(self._jobs) >= _MOST_JOBS:
                self._num_left_out += 1
                self._tell(
                    "late",
                    f"K/V are computed faster than they are written to disk, and some are left out ({_MOST_JOBS} "
                    f"sequences wait): {self._writer.directory}",
                )
                return
            waiting = [self._wait_for(block, content) for block, content in self._blocks.publish(sequence)]
            tokens, salt = list(sequence.tokens[:num_computed]), sequence.request.cache_salt
            self._submit(_Job(salt, tokens, waiting, self._parts, dict(sequence.kept_states)))
            sequence.kept_states.clear()

    def _submit(self, job: _AnyJob) -> None:
        """Queue a job for the thread; the caller holds the condition."""
        self._jobs.append(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="specdec-kv-disk", daemon=True)
            self._thread.start()
        self._condition.notify_all()

    def keep_answer(self, vocabulary: str, salt: str | None, answer: Answer) -> None:
        """Write an owner's answer, in the thread, together with other waiting answers."""
        if not self._is_writing or os.getpid() != self._process_id:
            return
        with self._condition:
            last = self._jobs[-1] if self._jobs else None
            if isinstance(last, _AnswerJob) and last.vocabulary == vocabulary and len(last.answers) < _MOST_JOBS:
                last.answers.append((salt, answer))
            elif len(self._jobs) < _MOST_JOBS and not self._is_closed:
                self._submit(_AnswerJob(vocabulary, [(salt, answer)]))

    def read_answers(self, vocabulary: str, salt: str | None, after: int) -> tuple[list[Answer], int]:
        """An owner's answers that were written after row `after`, the oldest first, and the number of the last row."""
        found = self._asked(lambda reader: read_answers(reader, vocabulary, salt, after))
        if found is None:
            return [], after
        if found.damaged:
            self._tell("answer", f"old answers on disk are damaged, and are left out: {self._reader.directory}")
            with self._condition:
                if self._is_writing and not self._is_closed:
                    self._submit(_AnswerJob(vocabulary, [], found.damaged))
        return found.answers, found.last

    def keep_output(self, salt: str | None, scopes: Seq[Scope], tokens: list[int]) -> None:
        """Write an owner's output, in the thread."""
        if not self._is_writing or os.getpid() != self._process_id:
            return
        with self._condition:
            if len(self._jobs) < _MOST_JOBS and not self._is_closed:
                self._submit(_OutputJob(salt, list(scopes), tokens))

    def kept_outputs(self, salt: str | None) -> list[tuple[list[Scope], list[int]]]:
        """An owner's last outputs, the oldest first."""
        return self._asked(lambda reader: read_outputs(reader, reader.owner(self.digest, salt))) or []

    def _wait_for(self, block: int, content: CachedBlock) -> _Waiting:
        waiting = self._waiting.setdefault(content.id, _Waiting(block, content, self._parts))
        waiting.num_jobs += 1
        waiting.parts = self._parts
        return waiting

    def _copy(self, block: int, content: CachedBlock) -> None:
        """Copy a block that waits to be written, before it is overwritten."""
        if os.getpid() != self._process_id:
            return
        with self._condition:
            waiting = self._waiting.get(content.id)
            if waiting is None or waiting.data is not None or self._num_copied_bytes > _MOST_COPIED_BYTES:
                return
            waiting.data = {part.name: part.read(block) for part in waiting.parts}
            self._num_copied_bytes += sum(map(len, waiting.data.values()))

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing waits to be written. False if that takes longer than `timeout_s`, or if something was left
        out since the last call, because other processes wrote for 20 s or because 256 sequences waited.
        """
        with self._condition:
            is_idle = self._condition.wait_for(lambda: self._is_idle and not self._jobs, timeout_s)
            num_left_out, self._num_left_out = self._num_left_out, 0
            return is_idle and not num_left_out

    def close(self) -> None:
        """Write everything that waits, and end the thread; each is waited for at most a minute."""
        if os.getpid() != self._process_id:
            return
        if self._thread is not None:
            self.flush(_CLOSE_S)
            with self._condition:
                self._is_closed = True
                self._condition.notify_all()
            self._thread.join(_CLOSE_S)  # on a busy machine a write may take long
            if self._thread.is_alive():
                return  # it ends with the process, and its transaction with it
        self._blocks.on_evict = None
        _OPEN.discard(self)
        self._reader.close()
        self._writer.close()

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                if self._is_writing:
                    self._write(job)
            except TimeoutError:  # other processes have written all the while
                self._num_left_out += 1
            except Exception as error:  # whatever it is, requests are answered without the disk
                self._num_left_out += 1
                self._fail(self._writer, error)
            finally:
                self._forget(job)

    def _next_job(self) -> _AnyJob | None:
        with self._condition:
            self._is_idle = not self._jobs
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._jobs or self._is_closed)
            if self._is_closed:
                return None
            self._is_idle = False
            return self._jobs.popleft()

    def _forget(self, job: _AnyJob) -> None:
        with self._condition:
            for waiting in job.blocks:
                waiting.num_jobs -= 1
                if not waiting.num_jobs:
                    self._waiting.pop(waiting.content.id, None)
                    self._num_copied_bytes -= sum(map(len, (waiting.data or {}).values()))

    def _write(self, job: _AnyJob) -> None:
        store = self._writer
        if store.is_replaced():
            store.reopen()
        if isinstance(job, _AnswerJob):
            forget_answers(store, job.damaged)
            write_answers(store, job.vocabulary, job.answers)
            return
        owner = store.make_owner(self.digest, job.salt, self._model)
        if isinstance(job, _OutputJob):
            write_output(store, owner, job.scopes, job.tokens)
            return
        found = store.find(owner, job.tokens, self._block_size)
        names = {part.name for part in job.parts}
        ids, path = list[int](), owner.path
        for record in found.records:
            is_of_text = record.is_whole and (record.end % self._block_size == 0 or record.end == len(job.tokens))
            if is_of_text and names <= store.parts_of(record.id):
                ids.append(record.id)
                path = record.path
            else:
                break
        is_covered = found.num_tokens == len(job.tokens) and len(ids) == len(found.records) - 1
        last = found.records[-1] if found.records else None
        blocks = job.blocks[len(ids) :]
        if is_covered and last is not None and not last.is_whole and names <= store.parts_of(last.id):
            blocks = []  # a longer text's block holds the last tokens
        ids = self._write_blocks(owner, ids, blocks, path)
        for num_tokens, saved in job.states.items():
            self._write_state(owner, job, ids, num_tokens, saved)

    def _write_blocks(self, owner: Owner, ids: list[int], blocks: Seq[_Waiting], path: int) -> list[int]:
        """Write blocks behind the records `ids` while there is room and content; returns the ids of all records."""
        store, batch, num_bytes, ids = self._writer, list[tuple[bytes, dict[str, Bytes]]](), 0, list(ids)

        def end_batch() -> bool:
            nonlocal path, num_bytes
            written = store.write(owner, ids, batch, path)
            path = zlib.crc32(b"".join(tokens for tokens, _ in batch), path)
            ids.extend(written)
            is_whole = len(written) == len(batch)
            batch.clear()
            num_bytes = 0
            return is_whole

        for waiting in blocks:
            data = self._data_of(waiting)
            if data is None:
                break
            batch.append((as_bytes(waiting.content.tokens), data))
            num_bytes += sum(map(len, data.values()))
            if num_bytes >= _BATCH_BYTES and not end_batch():
                return ids
        if batch or not blocks:  # records written before count as used now
            end_batch()
        return ids

    def _data_of(self, waiting: _Waiting) -> dict[str, Bytes] | None:
        """The bytes of a block by part; None if its content is gone."""
        if waiting.data is None and self._blocks.holds(waiting.block, waiting.content):
            data: dict[str, Bytes] = {part.name: part.read(waiting.block) for part in waiting.parts}
            if self._blocks.holds(waiting.block, waiting.content):
                return data
        return waiting.data

    def _write_state(self, owner: Owner, job: _Job, ids: list[int], num_tokens: int, saved: bytes) -> None:
        """Write the state after `num_tokens` of the job's tokens, with the block in which they end."""
        place = (num_tokens - 1) // self._block_size
        if place > len(ids) or place >= len(job.blocks):
            return
        start = place * self._block_size
        data = self._data_of(job.blocks[place])
        if data is None and not (num_tokens == len(job.tokens) or num_tokens % self._block_size == 0):
            return
        path = zlib.crc32(as_bytes(job.tokens[:start]), owner.path)
        tokens = as_bytes(job.tokens[start:num_tokens])
        self._writer.write(owner, ids[:place], [(tokens, (data or {}) | {STATE: saved})], path)

    def _fail(self, store: BlockStore, error: Exception) -> None:
        """Report once what is wrong, and write nothing from now on; if the database is damaged, begin an empty one."""
        if isinstance(error, Damaged):
            self._tell("damaged", f"the K/V on disk are damaged, and are computed again: {store.directory}")
            try:
                store.renew()
                return
            except (SpecDecError, TimeoutError) as again:
                error = again
        self._is_writing = False
        self._tell("writing", f"no more K/V are written to disk ({error}): {store.directory}")

    def _tell(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warnings.warn(message, SpecDecWarning, stacklevel=4)


_OPEN: WeakSet[KVDisk] = WeakSet()
"""Disks of the engines that are open in this process."""
