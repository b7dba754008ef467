"""An opened engine: sequences are admitted, stepped and released; the K/V cache is behind it.

Between `admit` and `release` a sequence owns blocks. `catch_up` and `compute_context` compute prompts, and `step`
computes a batch's rows. How the logits are used is decided above, in `runtime.loop.step`.
"""

import dataclasses
import math
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from runtime.checkpoint.bundle import Bundle, check_step_files, read_bundle, unchanged_while_opened, uses_kernels
from runtime.checkpoint.config import EngineConfig, Share, Size, check_arguments
from runtime.compiler.package import StepFunction
from runtime.core.batch import Row, context_row, pack, split_long_rows
from runtime.core.kv_cache import BlockManager, KVPool, bytes_per_block, kv_dtype
from runtime.core.limits import check_cache_size, check_draft_len, check_lengths, check_vocabulary
from runtime.core.old_answers import Answer
from runtime.core.request import Request, Sequence
from runtime.core.scopes import Scope
from runtime.core.states import States, bytes_per_slot, num_rolled_back, num_slots_of, state_inputs, state_pools
from runtime.core.stats import PromptTokens, StateStats
from runtime.engine.devices import check_device_ids
from runtime.engine.draft_vocab import read_draft_ids
from runtime.engine.head_cache import HeadCache, ReadsStates, bytes_of_head
from runtime.engine.kv_disk import KVDisk
from runtime.engine.load import check_environment, check_shape, open_copy
from runtime.engine.ranks import RankedModel, RankedStep, open_ranks
from runtime.kernels.ops import flush_denormals, openmp_alone
from runtime.util.control_groups import free_memory
from runtime.util.errors import SpecDecError, UsageError
from runtime.util.locks import MODEL_INIT_LOCK
from runtime.util.out_of_memory import is_out_of_memory, out_of_memory
from runtime.util.thread_turns import ThreadTurns

# A prompt is computed in chunks: other requests wait less for it, and a chunk does not read later blocks.
DEFAULT_MAX_NUM_TOKENS = 512
SHORT_ROW = 32
"""Length, in tokens, of the longest row that is computed together with other rows."""
_MAX_LOGITS = 1 << 23  # computed at once for a prompt that is scored
_STATE_CHECKPOINT_INTERVAL = 8192


@dataclass(frozen=True)
class KVCacheConfig:
    """Size of the K/V cache, and whether released blocks are reused.

    With `disk_dir` the cache is kept in that directory too, up to `disk_bytes` (20 GB), and found again there by other
    processes and after a restart.

    `max_tokens` bounds the cache on any device. Without it, a CPU gets the memory that max_batch_size sequences of
    max_seq_len tokens need, and a GPU `free_gpu_memory_fraction` of the memory that is free once the step is open.

    A model's states, if it has any, are kept after each `state_checkpoint_interval` tokens of a prompt, for other
    prompts with the same beginning; None stands for 8,192. A number is an error for a model without states, and if
    nothing is reused.
    """

    block_reuse: bool = True
    max_tokens: Size | None = None
    free_gpu_memory_fraction: Share = 0.9
    state_checkpoint_interval: int | None = None
    disk_dir: str | Path | None = None
    disk_bytes: Size | None = None

    def __post_init__(self) -> None:
        check_arguments(KVCacheConfig, vars(self))
        if self.disk_dir is None and self.disk_bytes is not None:
            raise UsageError(
                f"a size for K/V on disk is given without a directory: {self.disk_bytes}",
                hint="give `disk_dir` too",
                code="disk_size_alone",
                num_bytes=self.disk_bytes,
            )
        if self.disk_dir is not None and not self.block_reuse:
            raise UsageError(
                f"K/V are read from disk for requests that reuse them, and nothing is reused: {self.disk_dir}",
                hint="leave `block_reuse` on, or `disk_dir` out",
                code="disk_without_reuse",
                directory=self.disk_dir,
            )

    def interval(self, *, has_states: bool) -> int | None:
        """Tokens of a prompt between kept states; None if none are kept. UsageError for 0, or without effect."""
        interval = self.state_checkpoint_interval
        if interval is None:
            return _STATE_CHECKPOINT_INTERVAL if self.block_reuse else None
        if interval < 1:
            raise UsageError(
                f"states are kept at intervals of at least one token: {interval}",
                hint="raise `state_checkpoint_interval`",
            )
        if not has_states or not self.block_reuse:
            why = "nothing is reused" if has_states else "the model has no states"
            raise UsageError(
                f"state_checkpoint_interval is for requests that reuse states, and {why}: {interval}",
                hint="leave it out",
                name="state_checkpoint_interval",
            )
        return interval


class Engine:
    """An engine that `Engine.open` opens. Use it as a context manager, or `close` it."""

    def __init__(
        self,
        config: EngineConfig,
        step: StepFunction,
        device: torch.device,
        kv_cache: KVCacheConfig,
        max_num_tokens: int = DEFAULT_MAX_NUM_TOKENS,
        copy_step: StepFunction | None = None,
        draft_ids: Tensor | None = None,
    ) -> None:
        if max_num_tokens < 1:
            raise UsageError(f"max_num_tokens must be at least 1: {max_num_tokens}", hint="raise it")
        interval = kv_cache.interval(has_states=bool(config.states))
        self.config = config
        self.max_draft_len, self.max_batch_size = config.build_config.max_draft_len, config.build_config.max_batch_size
        self.max_num_tokens = max_num_tokens
        self.device = device
        self.block_reuse = kv_cache.block_reuse
        self.turns = ThreadTurns()
        """Turns of the threads that use the engine."""
        self.step_time_s = self.copy_time_s = 0.0
        self._is_open = True
        self._step, self._copy_step = step, copy_step
        self.draft_ids = draft_ids
        """Ids int64 [n] that may be drafted by a copy and by heads without ids of their own; None for all."""
        self.directory: Path | None = None
        self.ranks = step if isinstance(step, RankedStep) else None
        # Without kernels each row's K/V are gathered first, and a GPU computes padding while it waits for its memory.
        self._reads_in_place = uses_kernels(config.build_config.compiler, device.type)
        num_blocks = _num_blocks(config, kv_cache, device)
        copied = None if self.ranks is None else self.ranks.copy_slot
        self._states = (
            States(config.states, config.build_config, getattr(torch, config.dtype), device, interval, copied)
            if config.states
            else None
        )
        block_size = config.build_config.tokens_per_block
        self._blocks = BlockManager(num_blocks, block_size, reuse=kv_cache.block_reuse)
        try:
            self._pool = KVPool(config.layers, num_blocks, block_size, _kv_dtype(config), device)
        except (RuntimeError, MemoryError, OSError) as error:  # less memory was free than the system said
            raise out_of_memory(error) if is_out_of_memory(error) else error from error
        self._heads: list[HeadCache] = []
        self.prompt_tokens = PromptTokens()
        """Counts of the prompts' tokens by origin, except prompts that are computed `without_disk`."""
        self._disk: KVDisk | None = None
        self._num_without_disk = 0
        if kv_cache.disk_dir is not None:
            if self.ranks is not None and device.type != "cpu":
                raise UsageError(
                    f"K/V of an engine that is split over GPUs are not kept on disk: {kv_cache.disk_dir}",
                    hint="leave `disk_dir` out",
                    code="disk_of_ranks",
                    directory=kv_cache.disk_dir,
                )
            directory = Path(kv_cache.disk_dir).expanduser()
            pools = [self._pool, *self._pools_of_ranks()]
            self._disk = KVDisk(directory, kv_cache.disk_bytes, config, self._blocks, pools, self._states)

    @classmethod
    def open(
        cls,
        engine_dir: Path,
        device_ids: Seq[int] | None = None,
        kv_cache: KVCacheConfig | None = None,
        max_num_tokens: int = DEFAULT_MAX_NUM_TOKENS,
    ) -> "Engine":
        """Open an engine directory on a device for each of its ranks, by default the first devices.

        An engine for the CPU has one rank on all cores, which are device 0, or several ranks, each on cores of its own.
        Prompts are computed `max_num_tokens` tokens at a time. Raises SpecDecError if the directory is damaged or was
        built for another environment, if there are no such devices, or if the cache does not fit.
        """
        return cls.of_bundle(read_bundle(engine_dir), device_ids, kv_cache, max_num_tokens)

    @classmethod
    def of_bundle(
        cls,
        bundle: Bundle,
        device_ids: Seq[int] | None = None,
        kv_cache: KVCacheConfig | None = None,
        max_num_tokens: int = DEFAULT_MAX_NUM_TOKENS,
    ) -> "Engine":
        """Open a directory whose configuration has been read, as `open` does."""
        config, engine_dir = bundle.config, bundle.directory
        device_ids = check_device_ids(device_ids, config.mapping.tp_size)
        if config.environment.device == "cuda" and not torch.cuda.is_available():
            check_environment(config, engine_dir, torch.device("cpu"))
        device = _first_device(config.environment.device, device_ids)
        check_environment(config, engine_dir, device)
        with MODEL_INIT_LOCK, unchanged_while_opened(bundle):
            check_step_files(bundle)
            check_shape(config, engine_dir)
            step = open_ranks(RankedModel.of(engine_dir, config, config.step_shape), device, device_ids)
            draft_ids = read_draft_ids(bundle)
            copy_step = open_copy(step, engine_dir, device, draft_ids) if config.build_config.self_draft else None
        try:
            engine = cls(config, step, device, kv_cache or KVCacheConfig(), max_num_tokens, copy_step, draft_ids)
            engine.directory = engine_dir
            return engine
        except BaseException:
            if isinstance(step, RankedStep):
                step.close()
            raise

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def without_disk(self) -> Iterator[None]:
        """Read nothing from disk within the block, and write nothing, so that everything is computed."""
        self._num_without_disk += 1
        try:
            yield
        finally:
            self._num_without_disk -= 1

    @property
    def _used_disk(self) -> KVDisk | None:
        """The disk, once all ranks have done everything that they were sent; None if no disk is to be used."""
        if self._num_without_disk or self._disk is None or (self.ranks is not None and not self.ranks.settle()):
            return None
        return self._disk

    def _pools_of_ranks(self) -> list[KVPool]:
        """The other ranks' pools of keys and values; the pools of their states are handed to `self._states`."""
        if self.ranks is None:
            return []
        states, kind, num_slots = self.config.states, _kv_dtype(self.config), 0
        dtype, num_back = getattr(torch, self.config.dtype), num_rolled_back(self.max_draft_len)
        if self._states is not None:
            num_slots = self._states.manager.num_slots

        def make() -> tuple[KVPool, list[Tensor]]:
            pool = KVPool(self.config.layers, self._blocks.num_blocks, self._blocks.block_size, kind, self.device)
            return pool, state_pools(states, num_slots, num_back, dtype, self.device)

        made = self.ranks.share(self._pool.keys, num_slots, make)
        if self._states is not None:
            self._states.pools_of_ranks += [one for _, pools in made for one in pools]
        return [pool for pool, _ in made]

    @property
    def has_disk(self) -> bool:
        """True if keys and values are kept on disk as well."""
        return self._disk is not None

    def flush_disk(self) -> bool:
        """Wait until the K/V of released sequences are on disk. False if some were left out since the last call."""
        return self._disk is None or self._disk.flush()

    def keep_answer(self, vocabulary: str, salt: str | None, answer: Answer) -> None:
        """Keep an owner's answer on disk, for all engines with this vocabulary; without a disk do nothing."""
        if self._used_disk is not None:
            self._used_disk.keep_answer(vocabulary, salt, answer)

    def read_answers(self, vocabulary: str, salt: str | None, after: int) -> tuple[list[Answer], int]:
        """An owner's answers on disk after row `after`, the oldest first, and the number of the last row."""
        return ([], after) if self._used_disk is None else self._used_disk.read_answers(vocabulary, salt, after)

    def keep_output(self, salt: str | None, scopes: Seq[Scope], tokens: list[int]) -> None:
        """Keep an owner's output on disk (`runtime.drafters.owner_pools.OutputStore`); without a disk do nothing."""
        if self._used_disk is not None:
            self._used_disk.keep_output(salt, scopes, tokens)

    def kept_outputs(self, salt: str | None) -> list[tuple[list[Scope], list[int]]]:
        """An owner's outputs on disk, the oldest first."""
        return [] if self._used_disk is None else self._used_disk.kept_outputs(salt)

    def clear_cache(self) -> None:
        """Forget all K/V of released sequences in memory, so that the next request starts cold."""
        self.turns.take(self._clear_cache)

    def _clear_cache(self) -> None:
        self._blocks.clear()
        if self._states is not None:
            self._states.manager.clear()

    def close(self) -> None:
        """Give back the memory of the K/V cache and of the compiled step. It may be called again.

        A step that another thread is running is waited for; that thread's next step is an error.
        """
        self.turns.take(self._close)

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            if self._disk is not None:
                self._disk.close()
                self._disk = None
            if self.ranks is not None:
                self.ranks.close()
            del self._step, self._copy_step, self._pool
            self._heads.clear()
            if self._states is not None:
                self._states.pools.clear()
                self._states.pools_of_ranks.clear()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # the next engine's cache is sized by the free memory

    @property
    def failure(self) -> SpecDecError | None:
        """The reason why the engine computes no more steps, such as a rank that has ended; None while it does."""
        return None if self.ranks is None else self.ranks.failure

    def alone(self) -> AbstractContextManager[None]:
        """Context for code around a step, such as sampling, in which torch's loops wake none of its OpenMP threads.
        Those threads would then wait for more work on the cores that the step needs. Only an `aot` step on a CPU has
        threads of its own; for other steps the context does nothing.
        """
        is_packaged = self.config.build_config.compiler == "aot" and self.device.type == "cpu"
        return openmp_alone() if is_packaged else nullcontext()

    def check_is_open(self) -> None:
        """SpecDecError if the engine was closed."""
        if not self._is_open:
            self.turns.wait_if_ended()
            raise SpecDecError("the engine was closed", hint="open it again")

    @property
    def cache_usage(self) -> float:
        """Share of the K/V cache's blocks that sequences hold."""
        return 1 - self._blocks.num_free_blocks / (self._blocks.num_blocks - 1)

    @property
    def num_cache_tokens(self) -> int:
        """Number of tokens whose keys and values fit the cache."""
        return self._blocks.num_cache_tokens

    @property
    def num_state_slots(self) -> int:
        """Number of slots for states of sequences; 0 for a model without states."""
        return 0 if self._states is None else self._states.manager.num_slots - 1

    @property
    def state_stats(self) -> StateStats:
        """Counts of the slots' use so far."""
        return StateStats() if self._states is None else self._states.manager.stats

    @property
    def num_cache_bytes(self) -> int:
        """Bytes of a full K/V cache."""
        block_bytes = bytes_per_block(self.config.layers, self._blocks.block_size, _kv_dtype(self.config))
        return self._blocks.num_blocks * block_bytes

    def check_request(self, request: Request) -> None:
        """SpecDecError if the engine could not answer the request even if nothing else ran."""
        self.check_is_open()
        self.check_lengths(request)
        check_vocabulary(request, self.config.vocab_size)

    def check_lengths(self, request: Request) -> None:
        """SpecDecError if the request is longer than the engine was built for, or than its K/V cache."""
        check_lengths(request, self.config.build_config, self._num_positions)
        # The last token's K/V are never needed.
        num_tokens = len(request.prompt_tokens) + request.max_new_tokens - 1
        check_cache_size(request, num_tokens, self._blocks.num_cache_tokens)

    def _num_positions(self) -> int | None:
        from runtime.model.pretrained import num_positions, parse_pretrained_config

        return num_positions(parse_pretrained_config(self.config.pretrained_config, "config.json"))

    def check_draft_len(self, max_draft_len: int) -> None:
        """SpecDecError if the engine was built for shorter drafts."""
        check_draft_len(max_draft_len, self.max_draft_len)

    def admit(self, sequence: Sequence, *, reads: bool = True) -> bool:
        """Give the sequence blocks for its tokens and a draft, and find K/V that are known already. Unless `reads`, K/V
        on disk are left to `read_on`.

        Returns False, without a change, if there is no room now. SpecDecError if the sequence would not fit an empty
        cache either.
        """
        self.check_is_open()
        num_tokens = len(sequence.tokens) + self.max_draft_len_of(sequence)
        found = None
        if self._states is not None:
            num_known = self._blocks.match_len(sequence)
            found = self._states.manager.find(sequence, num_known)
            if found is None:
                return False
            is_worth_keeping = num_known - found.num_tokens >= self._blocks.block_size
            sequence.shared_len = num_known if is_worth_keeping else 0
        copies = self._blocks.admit(sequence, num_tokens, None if found is None else found.num_tokens)
        if copies is None:
            check_cache_size(sequence.request, num_tokens, self._blocks.num_cache_tokens)
            return False
        try:
            if self._states is not None and found is not None:
                self._states.admit(sequence, found)
            for copy in copies:
                self._pool.copy_block(copy)
                for head in self._heads:
                    head.copy_block(copy)
                if self.ranks is not None:
                    self.ranks.copy_block(copy)
        except BaseException:  # Ctrl-C between two layers: the K/V were copied in part
            sequence.num_computed = 0
            raise
        for head in self._heads:
            head.forget(sequence.block_table, sequence.num_computed)
        self._count_found(sequence, len(sequence.tokens), sequence.num_computed, 0)
        if self._used_disk is not None:
            self._used_disk.find(sequence)
        if reads:
            self.read_on(sequence, math.inf)
        return True

    def read_on(self, sequence: Sequence, until: float) -> None:
        """Read K/V of an admitted sequence from disk until a `time.perf_counter`, but at least one block."""
        if not sequence.unread:
            return
        num_read, disk = 0, self._used_disk
        if disk is None:
            sequence.unread = []
        else:
            num_read = disk.read(sequence, until)
        for head in () if sequence.unread else self._heads:
            head.forget(sequence.block_table, sequence.num_computed)
        self._count_found(sequence, 0, num_read, num_read)

    def _count_found(self, sequence: Sequence, num_tokens: int, num_found: int, num_on_disk: int) -> None:
        sequence.stats.num_reused_tokens += num_found
        if not sequence.stats.num_steps and not self._num_without_disk:
            self.prompt_tokens = self.prompt_tokens.plus(num_tokens, num_found, num_on_disk)

    def extend(self, sequence: Sequence) -> bool:
        """Give a grown sequence blocks for its tokens and a draft; False, without a change, if there is no room."""
        num_blocks = len(sequence.block_table)
        if not self._blocks.extend(sequence, len(sequence.tokens) + self.max_draft_len_of(sequence)):
            return False
        for head in self._heads:
            head.forget(sequence.block_table, num_blocks * self._blocks.block_size)
        return True

    def catch_up(self, sequence: Sequence) -> None:
        """Compute an admitted sequence until the rest of its tokens fits a step; at least the last token is left.

        Prompt tokens whose log-probabilities are asked for are computed here, and tokens up to each place where states
        are kept.
        """
        if self._states is not None:
            self._states.rewind(sequence)
        while sequence.num_unscored:
            self.compute_context(sequence, min(sequence.num_unscored, self.max_num_tokens))
        while len(sequence.tokens) - sequence.num_computed > self.max_num_tokens:
            self.compute_context(sequence, self.max_num_tokens)
        while self._states is not None and (end := self._states.next_kept(sequence)):
            self.compute_context(sequence, end - sequence.num_computed)

    def step(self, rows: Seq[Row], *, by_copy: bool = False) -> list[Tensor]:
        """Logits [num_logits, vocab] for each row; the rows' sequences are admitted and have caught up.

        The caller advances `num_computed` of the sequences, by the tokens that it accepts.

        With `by_copy` the self-draft copy computes logits [num_logits, n] of the n `draft_ids`. The copy writes its K/V
        where the target's step overwrites them before it reads them, so they do not count as computed: `num_computed`
        of a sequence that is stepped or released must be the number of tokens that the target has computed.
        """
        logits: dict[int, Tensor] = {}
        for group in _similar_lengths(rows):
            together = self._forward([rows[i] for i in group], by_copy=by_copy)
            # One at a time needs no division, which takes 50 us where the step has emptied the caches.
            parts = [together] if len(group) == 1 else together.split_with_sizes([rows[i].num_logits for i in group])
            logits.update(zip(group, parts, strict=True))
        return [logits[i] for i in range(len(rows))]

    def add_head(self, head: ReadsStates, name: str | None = None) -> HeadCache:
        """Keep the hidden states that this head reads, from now on and until the head is removed.

        `name` identifies the head to the K/V on disk, such as a digest of its weights; a head without a name keeps
        nothing on disk. The K/V of released sequences are forgotten, since the head has nothing for their tokens.
        """
        self.check_is_open()
        block_size, dtype = self._blocks.block_size, getattr(torch, self.config.dtype)
        needed = self._blocks.num_blocks * bytes_of_head(head, block_size, dtype)
        if needed > (free_bytes := _free_memory(self.device)):
            raise SpecDecError(
                f"the keys, values and hidden states of a trained drafter need {needed / 1e6:,.1f} MB, and "
                f"{self.device} has free: "
                f"{free_bytes / 1e6:,.1f} MB",
                hint="lower max_tokens of the K/V cache, or free memory",
                code="cache_too_large",
            )
        cache = HeadCache(head, self._blocks.num_blocks, block_size, dtype, self.device)

        def add() -> None:
            self._clear_cache()
            self._heads.append(cache)
            if self._disk is not None:
                self._disk.add_head(cache, name)

        self.turns.take(add)
        return cache

    @property
    def target_step(self) -> Any:
        """The compiled step, for a drafter that shares its weights."""
        return self._step

    @property
    def kv_pool(self) -> KVPool:
        """The target's keys and values, for a head that reads them."""
        return self._pool

    def remove_head(self, cache: HeadCache) -> None:
        self.turns.take(partial(self._remove_head, cache))

    def _remove_head(self, cache: HeadCache) -> None:
        self._heads = [one for one in self._heads if one is not cache]
        if self._disk is not None:
            self._disk.remove_head(cache)

    def release(self, sequence: Sequence) -> None:
        """Free the sequence's blocks. With block reuse, its K/V can be found until the blocks are needed."""
        if self._used_disk is not None:
            self._used_disk.save(sequence)
        sequence.unread = []
        if self._states is not None and sequence.state_slot:
            self._states.manager.release(sequence)
        self._blocks.release(sequence)

    def max_draft_len_of(self, sequence: Sequence) -> int:
        """Most tokens that a draft may have, for the engine and for the sequence's budget."""
        return min(self.max_draft_len, sequence.max_draft_len)

    def raise_cache_is_taken(self, request: Request) -> NoReturn:
        """Raise the error that other requests hold the blocks that this request needs, and keep them meanwhile."""
        if self._states is not None and self._states.manager.is_full:
            why = f": sequences of another generation hold all slots of states: {self.num_state_slots}"
        else:
            why = (
                f" in the K/V cache: {self._blocks.num_free_blocks} of {self._blocks.num_blocks - 1} blocks are free, "
                "and sequences of another generation hold the rest"
            )
        raise SpecDecError(
            f"no room for {request.name}{why}",
            hint="finish or close other generations on this engine; a draft model needs an engine of its own",
        )

    def compute_context(self, sequence: Sequence, num_tokens: int) -> None:
        """Compute the next `num_tokens` of an admitted sequence's uncomputed tail, which must be longer.

        Prompt tokens that are still to be scored are computed in chunks, because each of these tokens has logits: of
        tokens with 128,000 logits, 65 at once. `num_tokens` must not go beyond the tokens that are scored.
        """
        while num_tokens:
            num_known = len(sequence.prompt_logprobs) - sequence.num_computed
            is_scored = sequence.num_unscored > 0 and num_known <= 0
            most = max(_MAX_LOGITS // self.config.vocab_size, 1) if is_scored else max(num_known, 0) or num_tokens
            kept = 0 if self._states is None else self._states.next_kept(sequence)
            most = min(most, kept - sequence.num_computed) if kept else most
            row = context_row(sequence, min(num_tokens, most))
            if is_scored:
                sequence.score(self._forward([dataclasses.replace(row, num_logits=len(row.tokens))]))
            else:
                self._forward([row])
            sequence.num_computed += len(row.tokens)
            num_tokens -= len(row.tokens)
            if self._states is not None and sequence.num_computed == kept:
                self._states.keep(sequence)
                if self._used_disk is not None:
                    self._used_disk.keep_state(sequence)

    def forward_context(self, sequence: Sequence, num_tokens: int) -> Tensor:
        """Compute the next `num_tokens` of an admitted sequence; returns logits [num_tokens, vocab] after each."""
        logits = self._forward([dataclasses.replace(context_row(sequence, num_tokens), num_logits=num_tokens)])
        sequence.num_computed += num_tokens
        return logits

    def occupy_cache(self, blocks: range) -> None:
        """Touch these blocks of the K/V cache, as if they were in use; forget the K/V of released sequences."""
        self.check_is_open()

        def occupy() -> None:
            self._clear_cache()
            self._pool.occupy(blocks)

        self.turns.take(occupy)

    def time_step(self, rows: list[Row], *, by_copy: bool = False) -> float:
        """Seconds of the compiled step for these rows, whose block tables name any blocks.

        The K/V of released sequences are forgotten, because the step overwrites them.
        """

        def step() -> float:
            self._clear_cache()
            before = self.step_time_s + self.copy_time_s
            self._forward(rows, by_copy=by_copy)
            return self.step_time_s + self.copy_time_s - before

        return self.turns.take(step)

    def _forward(self, rows: Seq[Row], *, by_copy: bool = False) -> Tensor:
        """Logits [logits, vocab] of all rows, one row after the other."""
        if not self._is_open:  # looked at here, for a call less in each step
            self.check_is_open()
        step = self._copy_step if by_copy else self._step
        assert step is not None
        if self._reads_in_place:
            rows = split_long_rows(rows)
        batch = pack(rows, self._blocks.block_size, self.device)
        if self.device.type == "cpu":
            flush_denormals()
        if self._states is not None:
            self._states.advance(rows)  # before the step writes states, also if it fails then
        start = time.perf_counter()
        with torch.inference_mode():
            states = () if self._states is None else state_inputs(rows, self._states.pools)
            output = step(*batch, *self._pool.tensors, *states)
            logits, hidden = output if isinstance(output, tuple) else (output, None)
            if hidden is not None and not by_copy:
                for head in self._heads:
                    head.keep(batch.slot_mapping.flatten(), hidden)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if by_copy:
            self.copy_time_s += time.perf_counter() - start
        else:
            seconds, num_tokens = time.perf_counter() - start, sum(len(row.tokens) for row in rows)
            self.step_time_s += seconds
            if self._disk is not None and num_tokens > SHORT_ROW:
                self._disk.rates.computed(num_tokens, seconds)
        return logits


def _similar_lengths(rows: Seq[Row]) -> list[list[int]]:
    """Indices of rows to compute together: a prompt is computed alone, because rows are padded to the longest row.

    Beside three rows of a draft's length, a prompt would be computed four times over. Alone it uses the whole machine.
    """
    short = [i for i, row in enumerate(rows) if len(row.tokens) <= SHORT_ROW]
    return [*([i] for i, row in enumerate(rows) if len(row.tokens) > SHORT_ROW), *([short] if short else [])]


def resolve_device(kind: Literal["cpu", "cuda", "auto"], device_id: int) -> torch.device:
    """The device with this id (`auto`: a GPU if there is one); UsageError if this machine has no such device."""
    if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
        count = torch.cuda.device_count()
        if count == 0:
            raise SpecDecError("this machine has no GPU to run on", hint="build for the CPU", code="no_gpu")
        if device_id >= count:
            raise UsageError(
                f"there is no such GPU (this machine has {count}): {device_id}", hint="GPUs are numbered from 0"
            )
        return torch.device("cuda", device_id)
    if device_id != 0:
        raise UsageError(
            f"there is no such device (the engine runs on the CPU, device 0): {device_id}", hint="the CPU is device 0"
        )
    return torch.device("cpu")


def _first_device(kind: Literal["cpu", "cuda"], device_ids: Seq[int]) -> torch.device:
    """Device of rank 0. A processor's devices are sets of cores, and are looked up only if there are several ranks."""
    if kind == "cpu" and len(device_ids) > 1:
        return torch.device("cpu")
    devices = [resolve_device(kind, device_id) for device_id in device_ids]  # an error if any of them is missing
    return devices[0]


def _kv_dtype(config: EngineConfig) -> torch.dtype:
    return kv_dtype(config.dtype, config.step_shape.kv_cache)


def _num_blocks(config: EngineConfig, kv_cache: KVCacheConfig, device: torch.device) -> int:
    """Number of blocks in the pool, the null block included; SpecDecError if there is too little memory for them."""
    build = config.build_config
    block_bytes = bytes_per_block(config.layers, build.tokens_per_block, _kv_dtype(config))
    num_blocks = build.max_batch_size * -(-build.max_seq_len // build.tokens_per_block)
    if kv_cache.max_tokens is not None:
        num_blocks = -(-kv_cache.max_tokens // build.tokens_per_block)
    free_bytes = _free_memory(device) - _bytes_of_states(config, device)
    usable_bytes, hint, code = free_bytes, "lower max_tokens of the K/V cache, or free memory", "cache_too_large"
    if device.type == "cuda" and block_bytes:
        usable_bytes = int(free_bytes * kv_cache.free_gpu_memory_fraction)
        fitting = usable_bytes // block_bytes - 1  # one is the null block
        num_blocks = min(num_blocks, fitting) if kv_cache.max_tokens is not None else fitting
        num_blocks = max(num_blocks, 1)
        hint, code = "raise free_gpu_memory_fraction, or free memory on the device", "cache_too_large_for_gpu"
    if (num_blocks + 1) * block_bytes > usable_bytes:
        raise SpecDecError(
            f"a K/V cache of {num_blocks * build.tokens_per_block} tokens needs "
            f"{(num_blocks + 1) * block_bytes / 1e6:,.1f} MB, and {device} has for it: "
            f"{usable_bytes / 1e6:,.1f} MB of {free_bytes / 1e6:,.1f} MB free",
            hint=hint,
            code=code,
        )
    return num_blocks + 1


def _bytes_of_states(config: EngineConfig, device: torch.device) -> int:
    """Bytes of all slots of states; SpecDecError, with the numbers, if less memory is free."""
    if not config.states:
        return 0
    build, dtype = config.build_config, getattr(torch, config.dtype)
    num_slots = num_slots_of(config.states, build, dtype)
    needed = num_slots * bytes_per_slot(config.states, build.max_draft_len, dtype)
    if needed > (free_bytes := _free_memory(device)):
        raise SpecDecError(
            f"the states of {build.max_batch_size} sequences, and the states kept for reuse, need "
            f"{needed / 1e6:,.1f} MB, and {device} has free: {free_bytes / 1e6:,.1f} MB",
            hint="build with a lower max_batch_size or max_draft_len, or free memory",
        )
    return needed


def _free_memory(device: torch.device) -> int:
    """Free bytes of the device's memory."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_memory()
