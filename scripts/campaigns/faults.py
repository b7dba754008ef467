"""Faults to plant in the running code, so that the exact oracle has something to find.

`scripts/tools/faults.py` asks which faults the tests nearest to them catch; here one campaign has to find all of them.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from scripts.tools.mutations import mutations

_BY_FUNCTION = {
    "core.batch:_pieces": "without 14",
    "core.batch:pack": "without 4, without 5, without 6, without 7, without 9, without 12, without 15, without 16, "
    "without 18, without 21, exchange 0",
    "drafters.protocol:CompositeDrafter.forget": "drop 0",
    "drafters.draft_target:DraftModel._draft_sequence": "without 7",
    "drafters.draft_target:DraftModel._draft_tokens": "one-more 0",
    "loop.step:release_all": "drop 0, drop 1",
    "loop.step:propose": "unwrap 5",
    "engine.engine:Engine._forward": "drop 2",
    "engine.engine:Engine.admit": "drop 3, drop 4, drop 7, without 6",
    "engine.engine:Engine.compute_context": "one-more 7",
    "engine.engine:Engine.extend": "without 0",
    "engine.engine:Engine.catch_up": "drop 0, one-more 3",
    "engine.engine:Engine.max_draft_len_of": "without 0",
    "loop.step:judge": "one-more 0, without 4",
    "core.kv_cache:BlockManager._allocate": "drop 0",
    "core.kv_cache:BlockManager._match_prefix": "without 0",
    "core.kv_cache:BlockManager._hold": "without 0",
    "core.kv_cache:BlockManager._insert": "drop 3, without 0, without 1, without 10, one-more 3",
    "core.kv_cache:BlockManager._reuse_partial_block": "without 0, drop 0",
    "core.kv_cache:BlockManager.admit": "without 6",
    "core.kv_cache:BlockManager.extend": "one-more 2",
    "core.kv_cache:KVPool.copy_block": "exchange 0",
    "loop.scheduler:Scheduler._make_room": "drop 0, without 1",
    "loop.scheduler:Scheduler._release_finished": "drop 0, drop 2",
    "loop.scheduler:Scheduler.release_all": "without 0, without 1",
    "loop.orchestrator:_step": "drop 3",
    "loop.orchestrator:generate": "drop 2",
    "core.request:Sequence._finish_reason": "constant 0, compare 2",
    "core.request:Sequence.commit": "drop 2, jump 0",
    "core.states:StateManager.__init__": "constant 1, one-more 0",
    "core.states:StateManager._allocate": "negate 1",
    "core.states:StateManager._put": "drop 1",
    "core.states:StateManager.admit": "without 4, drop 0",
    "core.states:StateManager.advance": "without 2, without 4, drop 0, drop 1, exchange 0",
    "core.states:StateManager.drop": "drop 0",
    "core.states:StateManager.find": "constant 1, negate 0",
    "core.states:StateManager.keep": "without 1, without 2",
    "core.states:StateManager.release": "without 2, without 3, drop 0, drop 1, drop 2",
    "core.states:States.advance": "drop 0",
    "core.states:States.keep": "drop 0",
    "core.states:States.next_kept": "negate 1, one-more 4",
    "core.states:States.rewind": "drop 0, constant 0",
    "core.states:copy_slot": "exchange 0, drop 0",
    "core.states:state_pools": "without 1",
    "core.states:_numbers_of_head": "without 8",
    "model.recurrences:_Chunks.attend": "drop 0, drop 1, drop 3",
    "model.recurrences:_Chunks._state_after": "one-more 0",
    "core.states:_Kept.match_len": "without 1, without 4, without 14, constant 3",
    "core.verify:_verify_probs": "without 0, exchange 0, drop 0",
    "core.verify:verify_tokens": "without 1",
}
"""A module in `runtime`, its function, and faults by operator and place (`mutations.py`)."""

FAULTS = [f"{function} {fault}" for function, faults in _BY_FUNCTION.items() for fault in faults.split(", ")]


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """The function has the fault, whoever imported it; SystemExit if there is no such place any more."""
    module_name, _, address = fault.partition(":")
    module = importlib.import_module(f"runtime.{module_name}")
    path = address.split()[0]
    function: Any = module
    for part in path.split("."):
        function = inspect.getattr_static(function, part)
    assert isinstance(function, FunctionType)
    for mutation in mutations(inspect.getsource(module), path):
        if mutation.address == address:
            with mutation.planted():
                code = compile(ast.Module([mutation.function], []), f"<{fault}>", "exec")
            break
    else:
        raise SystemExit(f"there is no such fault: {fault}")
    before = function.__code__
    function.__code__ = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == function.__name__)
    try:
        yield
    finally:
        function.__code__ = before
