"""Faults to plant in the running code, so that the exact oracle has something to find.

scripts/mutate.py asks which faults the tests nearest to them catch; here one campaign has to find all of them.
"""

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, NamedTuple


class Fault(NamedTuple):
    """In the source of a function `old`, which is in it once, becomes `new`."""

    name: str
    function: str
    """Its module in `runtime`, a colon, and its name in it."""
    old: str
    new: str


BLOCKS, ENGINE, BATCH = "kv_cache:BlockManager", "engine:Engine", "batch"
LEADER, FOLLOW, SEQUENCE = "leader:Leader", "drafters.draft_target:DraftModel", "request:Sequence"

FAULTS = [
    Fault("part-one-too-long", f"{BLOCKS}.admit", "num_computed += num_matched", "num_computed += num_matched + 1"),
    Fault("revived-not-counted", f"{BLOCKS}.admit", "num_new + num_revived >", "num_new >"),
    Fault("last-token-found", f"{BLOCKS}.admit", "block_size, max_reused)", "block_size, max_reused + 1)"),
    Fault("held-once-only", f"{BLOCKS}._hold", "self._num_holders[block] += 1", "self._num_holders[block] = 1"),
    Fault("freed-by-first", f"{BLOCKS}.release", "self._num_holders[block] -= 1", "self._num_holders[block] = 0"),
    Fault("all-blocks-found", f"{BLOCKS}._find_full_blocks", "len(tokens) - self.block_size", "len(tokens)"),
    Fault("found-under-any-parent", f"{BLOCKS}._find_full_blocks", "node = self._nodes[block].id", "node = _ROOT"),
    Fault("part-found-under-any-parent", f"{BLOCKS}._find_partial_block", ".get(parent, {})", ".get(_ROOT, {})"),
    Fault(
        "part-taken-for-whole",
        f"{BLOCKS}._find_partial_block",
        "_common_prefix_len(candidate, tokens)",
        "len(candidate)",
    ),
    Fault(
        "published-under-wrong-parent", f"{BLOCKS}._publish", "self._nodes[existing].id", "self._nodes[existing].parent"
    ),
    Fault(
        "uncomputed-published",
        f"{BLOCKS}._publish",
        "block_size, sequence.num_computed)",
        "block_size, len(sequence.tokens))",
    ),
    Fault("node-ids-used-twice", f"{BLOCKS}._publish", "self._next_node_id += 1", "pass"),
    Fault("held-block-taken-over", f"{BLOCKS}._take_over", "if unheld and (", "if ("),
    Fault("taken-over-still-found", f"{BLOCKS}._take_over", "self._forget(source)", "pass"),
    Fault("overwritten-still-found", f"{BLOCKS}._allocate", "self._forget(block)", "pass"),
    Fault("extended-without-room", f"{BLOCKS}.extend", "num_new > len(self._free)", "num_new > len(self._free) + 1"),
    Fault(
        "copy-turned",
        "kv_cache:KVPool.copy_block",
        "[copy.destination] = pool[copy.source]",
        "[copy.source] = pool[copy.destination]",
    ),
    Fault("copies-not-made", f"{ENGINE}.admit", "self._pool.copy_block(copy)", "pass"),
    Fault(
        "no-room-for-draft",
        f"{ENGINE}.extend",
        "len(sequence.tokens) + self.max_draft_len_of(sequence)",
        "len(sequence.tokens)",
    ),
    Fault("rollback-missing", f"{ENGINE}.step", "+ verdict.num_accepted\n", "+ len(drafts[i].tokens)\n"),
    Fault("own-token-taken-for-computed", f"{ENGINE}.step", "+ verdict.num_accepted\n", "+ verdict.num_accepted + 1\n"),
    Fault("logits-of-draft-dropped", f"{ENGINE}.step", "logits[i][: verdict.num_accepted + 1]", "logits[i][-1:]"),
    Fault(
        "groups-in-their-own-order",
        f"{ENGINE}._forward_apart",
        "[logits[i] for i in range(len(rows))]",
        "list(logits.values())",
    ),
    Fault(
        "context-skips-token",
        f"{ENGINE}.compute_context",
        "num_computed += len(row.tokens)",
        "num_computed += len(row.tokens) + 1",
    ),
    Fault(
        "draft-past-budget",
        f"{ENGINE}.max_draft_len_of",
        "min(self.max_draft_len, sequence.max_draft_len)",
        "self.max_draft_len",
    ),
    Fault(
        "num-computed-uncut",
        f"{SEQUENCE}.commit",
        "self.num_computed = min(self.num_computed, len(self.tokens))",
        "pass",
    ),
    Fault("goes-on-after-end", f"{SEQUENCE}.commit", "break", "continue"),
    Fault("end-id-not-seen", f"{SEQUENCE}._finish_reason", "self.tokens[-1] in", "self.tokens[-2] in"),
    Fault("one-past-budget", f"{SEQUENCE}._finish_reason", "self.num_remaining <= 0", "self.num_remaining < 0"),
    Fault("stop-word-sees-prompt", f"{SEQUENCE}._finish_reason", "len(self.request.prompt_tokens))", "0)"),
    Fault("probs-uncut", "request:Draft.cut", "self.probs[:max_len]", "self.probs"),
    Fault(
        "tail-begins-early",
        f"{BATCH}:generation_row",
        "*sequence.tokens[sequence.num_computed :]",
        "*sequence.tokens[sequence.num_computed - 1 :]",
    ),
    Fault("padding-overwrites", f"{BATCH}:pack", "Q, NULL_BLOCK * block_size", "Q, own_slots[-1]"),
    Fault("logits-of-padding", f"{BATCH}:pack", "end = b * Q + len(row.tokens)", "end = b * Q + Q"),
    Fault("slots-shifted", f"{BATCH}:pack", "position % block_size for", "(position + 1) % block_size for"),
    Fault("slots-of-first-block", f"{BATCH}:pack", "row.block_table[position // block_size] *", "row.block_table[0] *"),
    Fault(
        "last-block-not-read",
        f"{BATCH}:pack",
        "-(-(row.start + len(row.tokens)) // block_size)",
        "max((row.start + len(row.tokens)) // block_size, 1)",
    ),
    Fault("pieces-at-one-place", f"{BATCH}:_pieces", "row.start + i", "row.start"),
    Fault("pieces-with-all-logits", f"{BATCH}:_pieces", "max(row.num_logits - num_after, 0)", "row.num_logits"),
    Fault("everything-accepted", "verify:verify_tokens", "or token != draft_tokens[num_accepted]", ""),
    Fault(
        "recovered-token-from-draft",
        "verify:verify_tokens",
        "Verdict(num_accepted, token)",
        "Verdict(num_accepted, (draft_tokens + [token])[num_accepted])",
    ),
    Fault("rejection-without-draft-prob", "verify:_verify_probs", '"accept") * draft_prob >=', '"accept") >='),
    Fault("residual-exchanged", "verify:_verify_probs", "target_probs - draft_probs", "draft_probs - target_probs"),
    Fault("rejection-blind-to-draft", "verify:_verify_probs", "prefix.append(token)", "pass"),
    Fault("bonus-row-early", "verify:_verify_probs", "logits[len(draft.tokens)])", "logits[len(draft.tokens) - 1])"),
    Fault(
        "penalties-ignore-draft",
        "verify:verify_all",
        "drafts[i].tokens, all_logits[i])",
        "drafts[i].tokens[:1] * len(drafts[i].tokens), all_logits[i])",
    ),
    Fault("sent-past-budget", "drafting:propose", "draft.cut(engine.max_draft_len_of(s))", "draft"),
    Fault("orchestrator-keeps-blocks", "orchestrator:_generate_group", "engine.release(sequence)", "pass"),
    Fault("orchestrator-never-lets-go", "orchestrator:generate", "let_go(engine, drafter, group)", "pass"),
    Fault("finished-run-on", "orchestrator:_generate_group", "if not s.is_over", ""),
    Fault("preempted-keeps-blocks", f"{LEADER}._make_room", "self.engine.release(self.running[-1])", "pass"),
    Fault(
        "preempted-is-lost", f"{LEADER}._make_room", "self.waiting.appendleft(self.running.pop())", "self.running.pop()"
    ),
    Fault("finished-keep-blocks", f"{LEADER}._release_finished", "self.engine.release(sequence)", "pass"),
    Fault("leader-never-forgets", f"{LEADER}._release_finished", "self.drafter.forget(sequence.request.id)", "pass"),
    Fault("waiting-not-let-go", "leader:Leader.let_go", "[*self.running, *self.waiting]", "[*self.running]"),
    Fault("running-not-let-go", "leader:Leader.let_go", "[*self.running, *self.waiting]", "[*self.waiting]"),
    Fault("blocks-not-let-go", "drafting:let_go", "stack.callback(engine.release, sequence)", "pass"),
    Fault("drafter-not-let-go", "drafting:let_go", "stack.callback(drafter.forget, sequence.request.id)", "pass"),
    Fault("draft-rollback-missing", f"{FOLLOW}._follow", "num_computed, num_common,", "num_computed,"),
    Fault(
        "draft-keeps-rejected",
        f"{FOLLOW}._follow",
        "follower.tokens[num_common:] = tokens[num_common:]",
        "follower.tokens += tokens[len(follower.tokens) :]",
    ),
    Fault("draft-counts-uncomputed", f"{FOLLOW}._draft_tokens", "= len(follower.tokens)", "= len(follower.tokens) + 1"),
    Fault("draft-reads-foreign-id", f"{FOLLOW}._is_ready", "max(follower.tokens) >= draft_vocab_size", "False"),
    Fault(
        "draft-probs-of-other-token",
        "drafters.proposal:Proposal._draft_token",
        "self._add(token, probs)",
        "self._add(token, probs.roll(1))",
    ),
    Fault(
        "copys-kv-taken-for-computed",
        "drafters.self_draft:SelfDraft.propose",
        "for proposal in proposals]",
        "for proposal in proposals if not setattr(sequences[0], 'num_computed', proposals[0].follower.num_computed)]",
    ),
    Fault(
        "copy-in-the-place-of-the-target", f"{ENGINE}._forward", "if by_copy else", "if by_copy or self._copy_step else"
    ),
    Fault("follower-keeps-blocks", f"{FOLLOW}.forget", "if follower is not None:", "if False:"),
    Fault(
        "only-first-forgets",
        "drafters.chain:DrafterChain.forget",
        "drafter.forget(request_id)",
        "self.drafters[0].forget(request_id)",
    ),
    Fault("inner-never-forgets", "drafters.adaptive:AdaptiveDrafter.forget", "self.drafter.forget(request_id)", "pass"),
]


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """The function has the fault, whoever imported it; SystemExit if the table is out of date."""
    function = _function(fault.function)
    source = textwrap.dedent(inspect.getsource(function))
    source = source[source.index("def ") :]
    if source.count(fault.old) != 1:
        raise SystemExit(f"{fault.name}: not once but {source.count(fault.old)} times in {fault.function}: {fault.old}")
    code = compile(source.replace(fault.old, fault.new), f"<{fault.name}>", "exec")
    before = function.__code__
    function.__code__ = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == function.__name__)
    try:
        yield
    finally:
        function.__code__ = before


def _function(name: str) -> FunctionType:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(f"runtime.{module}")
    for part in path.split("."):
        found = inspect.getattr_static(found, part)
    assert isinstance(found, FunctionType)
    return found
