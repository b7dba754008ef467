"""Slots of states against what they must hold: rings of positions that are written as a step writes them.

Three promises, whatever comes: a step reads what its own tokens left; a slot is free, held or kept, and no text is kept
twice; bytes and counts are those of the memory and of the admissions that there were.
"""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.checkpoint.config import BuildConfig, RecurrentShape, StateShape
from runtime.core.request import Request, Sequence
from runtime.core.states import NULL_SLOT, StateManager, bytes_per_slot, num_rolled_back, state_pools
from runtime.engine.engine import KVCacheConfig
from runtime.loop import scheduler
from scripts.campaigns.oracle import CheckedEngine, ExactModel, one_by_one

NUM_BEFORE, NUM_BACK, NUM_SLOTS, MAX_RUNNING = 3, 8, 7, 3
LENGTH = NUM_BEFORE + NUM_BACK
Ring = list[tuple[int, int] | None]


class Rings:
    """The memory of slots: the position and the token that each place was last written for."""

    def __init__(self) -> None:
        self.manager = StateManager(NUM_SLOTS, NUM_BACK, reuse=True)
        self.rings: list[Ring] = [[None] * LENGTH for _ in range(NUM_SLOTS)]

    def admit(self, sequence: Sequence, num_known: int) -> int:
        """Returns how many tokens need not be computed."""
        found = self.manager.find(sequence, num_known)
        assert found is not None
        copy = self.manager.admit(sequence, found)
        if copy is not None:
            self.rings[copy.destination] = list(self.rings[copy.source])
        assert sequence.state_slot != NULL_SLOT
        sequence.num_computed = found.num_tokens
        return found.num_tokens

    def step(self, sequence: Sequence, draft: list[int], num_tokens: int) -> None:
        """Compute tokens behind the computed ones, and look whether those before them are there."""
        start, ring = sequence.num_computed, self.rings[sequence.state_slot]
        assert self.manager.can_begin(sequence)
        for position in range(max(0, start - NUM_BEFORE), start):
            assert ring[position % LENGTH] == (position, sequence.tokens[position])
        tokens = [*sequence.tokens, *draft][start : start + num_tokens]
        for position, token in enumerate(tokens, start):
            ring[position % LENGTH] = (position, token)
        self.manager.advance(sequence.state_slot, start, len(tokens))


def sequence_of(tokens: list[int]) -> Sequence:
    return Sequence.start(Request(0, tuple(tokens), 100))


@pytest.mark.parametrize("seed", range(20))
def test_what_a_step_reads_is_of_its_own_tokens(seed: int) -> None:
    """Random texts with common beginnings, drafts that are rejected, releases in the middle and at the end."""
    draw, rings, running = random.Random(seed), Rings(), []
    texts = [[draw.randrange(2) for _ in range(draw.randrange(1, 40))] for _ in range(4)]
    num_found = num_resumed = 0
    for _ in range(600):
        if len(running) < MAX_RUNNING and draw.random() < 0.4:
            text = draw.choice(texts)
            sequence = sequence_of([*text[: draw.randrange(1, len(text) + 1)], draw.randrange(2)])
            most = len(sequence.tokens) - 1
            found = rings.admit(sequence, min(most, draw.choice([0, 5, most, most])))
            num_found += found > 0
            running.append(sequence)
        elif running:
            sequence = draw.choice(running)
            missing = len(sequence.tokens) - sequence.num_computed
            if missing > 12:
                rings.step(sequence, [], 7)
                sequence.num_computed += 7
                continue
            draft = [draw.randrange(2) for _ in range(draw.randrange(4))]
            rings.step(sequence, draft, missing + len(draft))
            num_accepted = draw.randrange(len(draft) + 1)
            sequence.num_computed = len(sequence.tokens) + num_accepted
            sequence.tokens += [*draft[:num_accepted], draw.randrange(2)]
            if draw.random() < 0.3:
                is_over = draw.random() < 0.5
                sequence.finish_reason = "length" if is_over else None
                computed = sequence.num_computed
                rings.manager.release(sequence)
                running.remove(sequence)
                if is_over:
                    texts[draw.randrange(len(texts))] = sequence.tokens[:60]
                elif not running:  # as in orchestrator mode
                    assert rings.admit(sequence, len(sequence.tokens) - 1) == computed
                    num_resumed += 1
                    running.append(sequence)
        rings.manager.check_integrity()
        texts_kept = [tuple(kept.tokens) for kept in rings.manager._kept.values()]
        assert len(set(texts_kept)) == len(texts_kept), "two slots are kept of one text"
    assert num_found > 20 and num_resumed > 0


def test_a_sequence_that_goes_on_takes_its_slot_back_without_a_copy() -> None:
    rings, sequence = Rings(), sequence_of([1, 2, 3, 4])
    rings.admit(sequence, 3)
    rings.step(sequence, [], 4)
    slot, sequence.num_computed = sequence.state_slot, 4
    rings.manager.release(sequence)
    sequence.tokens.append(5)
    found = rings.manager.find(sequence, 4)
    assert found is not None and rings.manager.admit(sequence, found) is None
    assert sequence.state_slot == slot and found.num_tokens == 4


def test_a_slot_holds_a_draft_and_its_copys() -> None:
    """The copy computes a token and its draft, goes back, and the target computes the same with one more."""
    for max_draft_len in (0, 10, 256):
        assert num_rolled_back(max_draft_len) >= 2 * max_draft_len + 2


@pytest.mark.parametrize("num_claimed", range(1, 7))
def test_state_is_kept_of_the_tokens_that_it_was_computed_of(num_claimed: int) -> None:
    """Four were computed; one that went back may go on from there, and one that claims more is forgotten."""
    rings, sequence = Rings(), sequence_of([1, 2, 3, 4, 5, 6, 7])
    rings.admit(sequence, 6)
    rings.step(sequence, [], 4)
    sequence.num_computed = num_claimed
    rings.manager.release(sequence)
    found = rings.manager.find(sequence, 6)
    assert found is not None and found.num_tokens == (num_claimed if num_claimed <= 4 else 0)
    rings.manager.check_integrity()


shapes = st.builds(
    StateShape,
    layer=st.integers(0, 3),
    width=st.integers(0, 5),
    num_before=st.integers(1, 4),
    recurrent=st.none()
    | st.builds(RecurrentShape, num_heads=st.integers(1, 3), key_dim=st.integers(1, 4), value_dim=st.integers(1, 4)),
)


@given(states=st.lists(shapes, min_size=1, max_size=4), max_draft_len=st.integers(0, 40), num_slots=st.integers(1, 4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_a_slot_are_those_of_its_memory(
    dtype: torch.dtype, states: list[StateShape], max_draft_len: int, num_slots: int
) -> None:
    pools = state_pools(states, num_slots, num_rolled_back(max_draft_len), dtype, torch.device("cpu"))
    assert bytes_per_slot(states, max_draft_len, dtype) * num_slots == sum(pool.nbytes for pool in pools)


@pytest.mark.parametrize("seed", range(6))
def test_hits_and_misses_are_prompts_of_which_something_was_found(seed: int) -> None:
    """An engine of the exact model: what an admission found is seen beside its counts."""
    draw = random.Random(seed)
    build = BuildConfig("none", 2, 100, 140, 4, 4, "draft_tokens_external")
    interval = draw.choice([3, 8, 8192])
    model = ExactModel(1, 12, num_before=2)
    engine = CheckedEngine(model, build, KVCacheConfig(state_checkpoint_interval=interval), 512)
    text = [draw.randrange(12) for _ in range(40)]
    admit, counted = engine.admit, [0, 0, 0]

    def watched(sequence: Sequence, **reads: bool) -> bool:
        is_admitted = admit(sequence, **reads)
        if is_admitted and not sequence.num_generated:
            is_miss = sequence.shared_len > 0
            counted[0 if is_miss else 1 if sequence.num_computed else 2] += 1
        return is_admitted

    engine.admit = watched  # type: ignore[method-assign]
    for i in range(12):
        tokens = (*text[: draw.randrange(1, 40)], draw.randrange(12))
        request = Request(i, tokens, draw.randrange(1, 6))
        *_, (sequence, _) = scheduler.generate(engine, [request], None, 0)
        assert sequence.output_tokens == one_by_one(model, request)
    assert [engine.state_stats.num_misses, engine.state_stats.num_hits] == counted[:2]
    assert sum(counted) == 12 and counted[2]
