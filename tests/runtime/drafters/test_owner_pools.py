"""Pools of earlier outputs, beside a search by brute force; their bounds; what a kill or damage leaves of them."""

import random
import sqlite3
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest

from runtime.core.block_store import BlockStore
from runtime.core.request import Request, Sequence
from runtime.core.scopes import OWNER, Scope
from runtime.core.text_tables import read_outputs, write_output
from runtime.drafters import owner_pools as module
from runtime.drafters.owner_pools import OwnerPools, Pool


def longest(outputs: Seq[list[int]], tail: list[int], more_than: int) -> tuple[int, list[int]]:
    """Length of the longest match that an output goes on after, and its followers, the last first; by brute force."""
    for n in range(min(len(tail), 31), more_than, -1):
        ends = [
            output[i + n]
            for output in reversed(outputs)
            for i in range(len(output) - n - 1, -1, -1)
            if output[i : i + n] == tail[-n:]
        ]
        if ends:
            return n, ends
    return 0, []


def test_a_pool_finds_what_a_search_by_brute_force_finds() -> None:
    """A match that an output ends after hides shorter matches: then nothing is found, and never anything wrong."""
    rng, num_found = random.Random(0), 0
    for _ in range(300):
        pool, outputs = Pool(40), list[list[int]]()
        for _ in range(rng.randint(1, 8)):
            output = [rng.randint(0, 3) for _ in range(rng.randint(1, 20))]
            pool.add("".join(map(chr, output)))
            outputs.append(output)
            while sum(map(len, outputs)) > 40:
                outputs.pop(0)
            assert pool.num_tokens == sum(map(len, outputs))
        tail, more_than = [rng.randint(0, 3) for _ in range(rng.randint(1, 8))], rng.randint(0, 2)
        n, ends = pool.find("".join(map(chr, tail)), more_than)
        expected, followers = longest(outputs, tail, more_than)
        if ends:
            num_found += 1
            assert n >= expected and sorted(pool.continuation([end], 1)[0] for end in ends) == sorted(followers)
    assert num_found > 100


def finished(request_id: int, prompt: list[int], output: list[int], owner: str | None, *scopes: Scope) -> Sequence:
    request = Request(request_id, tuple(prompt), 100, cache_salt=owner, scopes=scopes, decode=str)
    return Sequence(request, [*prompt, *output])


def learn(pools: OwnerPools, sequence: Sequence) -> None:
    pools.see([sequence])
    for _ in range(2):  # of two lookups of a chain each forgets
        pools.learn(sequence.request.id)


def test_number_and_size_of_pools_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_OWNERS", 5)
    monkeypatch.setattr(module, "MOST_POOLS_OF_OWNER", 3)
    pools, rng = OwnerPools(max_tokens=500), random.Random(0)
    for i in range(400):
        system = Scope.of("system", rng.randint(0, 9))
        output = [rng.randint(0, 99) for _ in range(rng.randint(1, 60))]
        learn(pools, finished(i, [1], output, rng.choice("abcdefgh"), system))
        by_owner = {owner: list(own.values()) for owner, own in pools._owners.items()}
        assert len(by_owner) <= 5 and all(len(own) <= 3 for own in by_owner.values())
        assert pools.num_pools.total() == sum(map(len, by_owner.values()))
        assert pools.num_tokens.total() == sum(pool.num_tokens for own in by_owner.values() for pool in own) <= 500
    assert not pools._running


def test_the_most_specific_scope_is_followed_and_a_call_is_learned_for_its_tool_alone() -> None:
    pools = OwnerPools()
    seven, eight = Scope("tool", "7", name="7"), Scope("tool", "8", name="8")
    learn(pools, finished(0, [1, 2], [3, 7, 4], None, seven, eight))
    learn(pools, finished(1, [1, 2], [3, 6, 6], None))
    assert pools.num_pools == {"tool": 1, "owner": 1}
    asked = finished(2, [1, 2, 3], [], None, seven)
    assert pools.draft(asked, [], 0, 5).tokens == [7, 4]
    assert pools.draft(finished(3, [1, 2, 3], [], None, eight), [], 0, 5).tokens == [6, 6]
    assert pools.draft(asked, [6], 0, 5).tokens == [6]
    assert pools.draft(asked, [], 3, 5).tokens == pools.draft(asked, [], 0, 0).tokens == []
    assert pools.draft(finished(4, [1, 2, 3], [], "other", seven), [], 0, 5).tokens == []


def test_outputs_on_disk_are_whole_bounded_and_their_owners(tmp_path: Path) -> None:
    store = BlockStore(tmp_path / "kv", 1 << 20)
    owner, other = (store.make_owner("engine", salt, "a model") for salt in ("mine", None))
    assert read_outputs(store, owner) == []
    scopes = [Scope("tool", "ab"), OWNER]
    for i in range(400):
        write_output(store, owner, scopes, [i] * 100)
    write_output(store, other, [OWNER], [5, 6])
    found = read_outputs(store, owner)
    assert found == [(scopes, [i] * 100) for i in range(400 - len(found), 400)]
    assert 100 < len(found) < 400 and read_outputs(store, other) == [([OWNER], [5, 6])]
    database = sqlite3.connect(tmp_path / "kv" / "kv.sqlite")
    for number, value in enumerate(("tokens=x'00000001'", "scopes='[]'", "tokens=3", "checksum=1")):
        database.execute(f"UPDATE outputs SET {value} WHERE id=(SELECT max(id)-{number + 1} FROM outputs)")
    database.commit()
    database.close()
    assert read_outputs(store, owner) == found[:-4]
    assert store.prune(1 << 16) > 0 and len(read_outputs(store, owner)) < 100
    store.close()
