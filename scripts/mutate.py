"""Plants faults, one at a time, and sees which test catches each: one that survives is a test that is missing.

python scripts/mutate.py                      all of them
python scripts/mutate.py residual-exchanged   by name
python scripts/mutate.py --list               names and files; nothing is run
python scripts/mutate.py --markdown           the table in Markdown

A fault is planted in a copy of the tree, and the tests nearest to it are run there. Exit 1 if one survives, or if the
tests fail without any.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("specdec_cli", "commands", "runtime", "tests", "scripts", "pyproject.toml")


class At(NamedTuple):
    """A file, and the tests nearest to it as pytest's arguments."""

    file: str
    tests: str


class Fault(NamedTuple):
    """`old`, which is in the file once, becomes `new`."""

    name: str
    at: At
    old: str
    new: str


class Run(NamedTuple):
    """What came of the tests: the first that failed, None if all passed."""

    failed: str | None
    seconds: float


T = "tests/runtime/"
KERNELS = f"{T}compiler/test_kernels.py"
DISTRIBUTION = f"{T}test_verify.py {T}test_rejection.py -k 'not texts'"
ADAPTIVE = At("runtime/drafters/adaptive.py", f"{T}drafters/test_adaptive.py")
ALLOCATION = At("runtime/drafters/allocation.py", f"{T}drafters/test_allocation.py")
ARGMAX = At("runtime/compiler/csrc/sampling.cpp", f"{KERNELS} -k argmax")
CHOICES = f"{T}test_sampling_kernels.py"
CUTS = At("runtime/compiler/csrc/cuts.h", CHOICES)
DRAWS = At("runtime/compiler/csrc/sampling.cpp", CHOICES)
OCCURRENCES = At("runtime/occurrences.py", CHOICES)
ATTENTION = At("runtime/compiler/attention.py", f"{T}test_families.py -k 'test_greedy and (llama or sliding)'")
BATCH = At("runtime/batch.py", f"{T}test_batch.py -k 'not compute_what_each'")
BLOCKS = At("runtime/kv_cache.py", f"{T}test_kv_cache.py")
BUDGET = At("runtime/request.py", f"{T}test_request.py -k room")
CHAIN = At("runtime/drafters/chain.py", f"{T}drafters/test_chain.py")
CHOOSING = At("runtime/drafters/choosing.py", f"{T}drafters/test_choosing.py")
CORPUS = At("runtime/drafters/corpus.py", f"{T}test_corpus.py -k draft")
DRAFTING = At("runtime/drafting.py", f"{T}drafters/test_drafter_protocol.py")
REDRAW = At("runtime/sampling.py", f"{T}test_rejection.py -k whether")
DRAW = At("runtime/drafters/proposal.py", f"{T}test_rejection.py -k 'whether or texts and similar'")
ENGINE = At("runtime/engine.py", f"{T}test_engine.py -k 'not aot'")
FOLLOW = At("runtime/drafters/draft_target.py", f"{T}drafters/test_draft_target.py")
LEADER = At("runtime/leader.py", f"{T}test_leader.py")
LINEAR = At("runtime/compiler/csrc/linear.cpp", f"{KERNELS} -k linear")
PRODUCTS = At("runtime/compiler/csrc/products.h", f"{KERNELS} -k 'linear or company'")
LOOKUP = At("runtime/drafters/lookup.py", f"{T}drafters/test_ngram.py")
SURENESS = At("runtime/drafters/sureness.py", f"{T}drafters/test_choosing.py -k sure")
SUGGESTED = At("runtime/drafters/self_draft.py", f"{T}drafters/test_choosing.py -k suggestions")
SELF_DRAFT = At("runtime/drafters/self_draft.py", f"{T}drafters/test_self_draft.py -k 'not compiled'")
NGRAM = At("runtime/drafters/ngram.py", f"{T}drafters/test_ngram.py")
NOISE = At("runtime/sampling.py", DISTRIBUTION)
OUTCOMES = At("runtime/drafters/outcomes.py", f"{T}drafters/test_adaptive.py")
ORCHESTRATOR = At("runtime/orchestrator.py", f"{T}test_orchestrator.py")
ATTENTION_TESTS = f"{KERNELS} -k 'attention or scores or finite or nan'"
PAGED = At("runtime/compiler/csrc/paged_attention.cpp", ATTENTION_TESTS)
STORED = At("runtime/compiler/csrc/kv_pool.h", ATTENTION_TESTS)
SOFTMAX = At("runtime/compiler/csrc/softmax.h", ATTENTION_TESTS)
FEW_ROWS = At("runtime/compiler/csrc/attention_products.h", ATTENTION_TESTS)
POISON = At("runtime/compiler/attention.py", f"{T}test_poison.py -k 'none and stays'")
MEMORY = At("runtime/compiler/memory.py", f"{T}test_poison.py -k 'none and fork'")
FAILED = At("runtime/drafting.py", f"{T}test_poison.py -k 'none and stays'")
WEIGHTS = At("runtime/compiler/weights.py", f"{T}compiler/test_weights.py")
CACHED = At("runtime/cache.py", f"{KERNELS} -k corrupt")
POOL = At("runtime/drafters/pool.py", f"{T}drafters/test_pool.py -k 'not ten_thousand'")
REQUEST = At("runtime/request.py", f"{T}test_request.py")
SAMPLING = At("runtime/sampling.py", f"{T}test_sampling.py")
STATS = At("runtime/stats.py", f"{T}test_stats.py")
SUFFIX = At("runtime/drafters/suffix.py", f"{T}drafters/test_suffix.py")
TIMES = At("runtime/orchestrator.py", f"{T}test_leader.py -k times")
VERIFY = At("runtime/verify.py", DISTRIBUTION)

# Name, place, the exact old text, the new text.
TABLE = [
    ("accept-inverted", VERIFY, '"accept") * draft_prob >= float(', '"accept") * draft_prob < float('),
    ("accept-by-target-alone", VERIFY, '"accept") * draft_prob >= ', '"accept") >= '),
    ("accept-and-recover-with-one-number", VERIFY, '"accept")', '"target")'),
    ("residual-exchanged", VERIFY, "(target_probs - draft_probs)", "(draft_probs - target_probs)"),
    ("prefix-without-draft", VERIFY, "prefix.append(token)", "pass"),
    ("bonus-row-early", VERIFY, "logits[len(draft.tokens)])", "logits[len(draft.tokens) - 1])"),
    ("kept-one-too-many", VERIFY, "Verdict(num_kept - 1, draft", "Verdict(num_kept, draft"),
    ("noise-ignores-position", SAMPLING, 'self._number(position, "noise")', 'self._number(0, "noise")'),
    ("noise-turned", NOISE, "numbers.max() + noise", "numbers.max() - noise"),
    ("return-index-ignored", SAMPLING, "(params.random_seed, return_index, tuple", "(params.random_seed, tuple"),
    ("penalty-below-one-skipped", SAMPLING, "params.repetition_penalty != 1.0", "params.repetition_penalty > 1.0"),
    ("penalties-ignore-draft", OCCURRENCES, "            self._append(token)\n            slots", "            slots"),
    ("drafts-stay", OCCURRENCES, "for _ in draft_tokens:\n            self._drop()", "pass"),
    ("prompt-penalised", OCCURRENCES, "entry[_COUNT] += len(self._tokens) >= self._start", "entry[_COUNT] += 1"),
    ("first-of-equals-kept", CUTS, "(share * sum - boundary.above)", "(sum - boundary.above)"),
    ("negligible-too-early", CUTS, "(1 - share) * sum /", "10 * sum /"),
    ("boundary-not-reached", CUTS, ">= wanted) smallest", "> wanted) smallest"),
    ("winner-passed-over", DRAWS, ">= static_cast<float>(best.score))", "- 1 >= static_cast<float>(best.score))"),
    ("equal-cut-ones-drawn", DRAWS, "i + lane < cut.first_equal", "false"),
    ("greedy-skips-penalties", SAMPLING, "if self.is_greedy and not has_penalties(self._params)", "if self.is_greedy"),
    ("budget-before-stop-word", REQUEST, "stop_check is not None and", "stop_check and self.num_remaining and"),
    ("run-goes-on-after-end", REQUEST, "                break", "                continue"),
    ("num-computed-uncut", REQUEST, "self.num_computed = min(self.num_computed, len(self.tokens))", "pass"),
    ("logits-shared", REQUEST, "copy=True", "copy=False"),
    ("accepted-uncut", REQUEST, "min(verdict.num_accepted, len(new_tokens))", "verdict.num_accepted"),
    ("shared-block-freed-by-first", BLOCKS, "self._num_holders[block] -= 1", "self._num_holders[block] = 0"),
    ("published-under-wrong-parent", BLOCKS, "self._nodes[existing].id", "self._nodes[existing].parent"),
    ("uncomputed-published", BLOCKS, "block_size, sequence.num_computed)", "block_size, len(sequence.tokens))"),
    ("part-one-too-long", BLOCKS, "num_computed += num_matched", "num_computed += num_matched + 1"),
    ("copy-turned", BLOCKS, "copy.destination] = pool[copy.source]", "copy.source] = pool[copy.destination]"),
    ("held-block-taken-over", BLOCKS, "if unheld and (", "if ("),
    ("source-overwritten", BLOCKS, "self._free.move_to_end(source)", "pass"),
    ("overwritten-still-found", BLOCKS, "._free))\n        self._forget(block)", "._free))"),
    ("prefix-forgotten-first", BLOCKS, "in reversed(sequence.block_table)", "in sequence.block_table"),
    ("padding-overwrites", BATCH, "own_slots, Q, NULL_BLOCK * block_size", "own_slots, Q, own_slots[-1]"),
    ("logits-of-padding", BATCH, "end = b * Q + len(row.tokens)", "end = b * Q + Q"),
    ("last-block-not-read", BATCH, "-(-(row.start + len(row.tokens))", "((row.start + len(row.tokens))"),
    ("rollback-forgotten", ENGINE, "(sequence.tokens) + verdict.num_accepted", "(sequence.tokens + draft.tokens)"),
    ("copies-not-made", ENGINE, "self._pool.copy_block(copy)", "pass"),
    ("budget-without-own-token", BUDGET, "max(self.num_remaining - 1, 0)", "max(self.num_remaining, 0)"),
    ("context-skips-token", ENGINE, "num_computed += len(row.tokens)", "num_computed += len(row.tokens) + 1"),
    ("groups-in-their-own-order", ENGINE, "[logits[i] for i in range(len(rows))]", "list(logits.values())"),
    ("release-missing", ORCHESTRATOR, "    engine.release(sequence)\n        times", "    pass\n        times"),
    ("state-not-forgotten", ORCHESTRATOR, "let_go(engine, drafter, group)", "pass"),
    ("who-waited-waits-on", ORCHESTRATOR, "running.extend(s for", "running.extendleft(s for"),
    ("time-of-last-step-only", TIMES, "times.target_time_s += engine", "times.target_time_s = engine"),
    ("finished-keep-blocks", LEADER, "self.engine.release(sequence)", "pass"),
    ("oldest-put-back", LEADER, "self.running.pop())", "self.running.pop(0))"),
    ("put-back-to-the-end", LEADER, "self.waiting.appendleft(self", "self.waiting.append(self"),
    ("full-for-ever", LEADER, "self._is_full = False\n            if", "if"),
    ("context-unbounded", LEADER, "budget -= num_missing", "pass"),
    ("draft-past-budget", DRAFTING, "draft.cut(engine.max_draft_len_of(s))", "draft"),
    ("end-id-drafted", LOOKUP, "return tokens[:i]", "return tokens[: i + 1]"),
    ("index-misses-one", NGRAM, "max(history.num_indexed + 1, n)", "max(history.num_indexed + 2, n)"),
    ("shortest-not-asked", NGRAM, "self.min_matching_ngram_size - 1, -1)", "self.min_matching_ngram_size, -1)"),
    ("older-of-equals", NGRAM, "chosen is None or count >= counts", "chosen is None or count > counts"),
    ("clone-starts-from-nothing", SUFFIX, "self.num_occurrences[clone] = self.num_occurrences[target]", "pass"),
    ("counted-one-further", SUFFIX, "min(n, self.max_counted - 1)", "min(n, self.max_counted)"),
    ("margin-skipped", SUFFIX, "num_private + 1 + _PUBLIC_MARGIN", "num_private + 1"),
    ("never-evicts", POOL, "while self.num_tokens > self.max_tokens:", "while False:"),
    ("prompt-in-pool", POOL, "range(text.num_context, len(tokens))", "range(1, len(tokens))"),
    ("best-stays-best", POOL, "if token == self.best and", "if self.best not in self.counts and"),
    ("corpus-drafts-end-id", CORPUS, "cut_at_end_id(draft, sequence.request.end_ids)", "draft"),
    ("draft-rollback-forgotten", FOLLOW, "num_computed, num_common,", "num_computed,"),
    (
        "draft-and-recover-with-one-number",
        DRAW,
        ".draft_uniform(position, position - len(self.tokens))",
        '.uniform(position, "target")',
    ),
    ("rejected-numbers-drawn-again", REDRAW, 'f"draft from {start}"', '"draft"'),
    ("foreign-id-drafted", FOLLOW, "value=-torch.inf", "value=0.0"),
    ("follower-keeps-blocks", FOLLOW, "if follower is not None:", "if False:"),
    ("copy-computes-prompts", SELF_DRAFT, "sequence.num_computed == len(sequence.tokens) - 1", "True"),
    ("copy-drafts-past-the-budget", SELF_DRAFT, "min(max_draft_len, sequence.max_draft_len)", "max_draft_len"),
    ("worth-of-lookups-ignored", CHOOSING, "found.rate >= best", "True"),
    ("lookups-not-suggested", CHOOSING, "found.draft.tokens[: math.ceil(found.worth - 1)]", "[]"),
    ("nothing-looked-up-ahead", CHOOSING, "draft.tokens[: math.ceil(worth - 1)]", "[]"),
    ("drafted-tokens-not-looked-at", NGRAM, "[*sequence.tokens, *drafted]", "sequence.tokens"),
    ("others-tokens-counted", SURENESS, "min(num_right + 1, len(known))", "len(known)"),
    ("drawn-drafts-weighed", CHOOSING, "is_drawn = self.draft.probs is not None", "is_drawn = False"),
    ("first-lookup-sent", CHOOSING, "found.rank > before.rank", "False"),
    ("unsure-tokens-sent", SURENESS, "survives < self._least_to_send", "False"),
    ("copy-goes-on-after-a-wrong-suggestion", SUGGESTED, "if proposal.is_done or", "if proposal.is_done or False and"),
    ("wrong-sequences-asked", CHAIN, "[sequences[i] for i in empty]", "sequences[: len(empty)]"),
    ("only-first-forgets", CHAIN, "drafter.forget(request_id)", "self.drafters[0].forget(request_id)"),
    (
        "nothing-cut",
        ADAPTIVE,
        "[draft.cut(length) for draft, length in zip(drafts, choice",
        "[draft for draft, length in zip(drafts, choice",
    ),
    ("after-wrong-is-wrong-too", OUTCOMES, "range(min(num_right + 1, num_known))", "range(num_known)"),
    ("cost-ignored", ALLOCATION, "promised - costs[num]", "promised"),
    ("inner-never-forgets", ADAPTIVE, "self.drafter.forget(request_id)", "pass"),
    ("undrafted-step-counted", STATS, "if num_drafted == 0:", "if num_drafted < 0:"),
    ("histogram-of-drafted", STATS, "acceptance_histogram, num_accepted)", "acceptance_histogram, num_drafted)"),
    ("bonus-not-counted", STATS, "else 1 + per_spec_step", "else per_spec_step"),
    ("times-not-added", STATS, "self.target_time_s += other", "self.target_time_s = other"),
    ("token-blind-to-itself", ATTENTION, "key_positions <= query_positions", "key_positions < query_positions"),
    ("window-one-wider", ATTENTION, "> query_positions - sliding", ">= query_positions - sliding"),
    ("mask-of-another-head", ATTENTION, ".repeat(1, 1, num_groups, 1)", ".repeat_interleave(num_groups, dim=2)"),
    ("kernel-blind-to-itself", PAGED, "positions[r] + 1 - start)", "positions[r] - start)"),
    ("kernel-window-one-wider", PAGED, "[r] - in.window + 1 - start", "[r] - in.window - start"),
    ("kernel-wrong-head", PAGED, "token = 0, ++query_head;", "token = 0;"),
    ("parts-not-corrected", SOFTMAX, "load(to + i) * before", "load(to + i)"),
    ("keys-shared-by-threads", PAGED, "round_up(kSplit, chunk_of", "round_up(num_keys / threads + 1, chunk_of"),
    ("window-moves-chunks", PAGED, "in.window + 1) / chunk * chunk", "in.window + 1) / 16 * 16"),
    ("pieces-not-added", PRODUCTS, "if (!start) load_sums(to, sums);\n    for_columns", "for_columns"),
    ("tiny-numbers-kept", PRODUCTS, "    const FlushDenormals as_tiles_do;\n", ""),
    ("one-panel-twice", PRODUCTS, "{at(begin), at(begin + 1)}", "{at(begin), at(begin)}"),
    ("last-of-four-panels-forgotten", PRODUCTS, "at(begin + 2), at(begin + 3)}", "at(begin + 2), at(begin + 2)}"),
    ("panel-left-over", PRODUCTS, "share_tasks((panels + together - 1) / together,", "share_tasks(panels / together,"),
    ("sums-of-panels-in-one-place", PRODUCTS, "(panel - begin) * block_rows + row - from", "row - from"),
    ("later-tokens-lost", PRODUCTS, "block < tile_end; block = last", "block < tile_end; block = tile_end"),
    ("waiting-outputs-lost", PRODUCTS, "write_some(waiting_.rows);\n      waiting_ = outputs;", "waiting_ = outputs;"),
    ("pairs-apart", LINEAR, "n % kPanel * group + k % group", "n % kPanel + k % group * kPanel"),
    ("last-of-equals", ARGMAX, "if (value > largest ||", "if (value >= largest ||"),
    ("nan-overlooked", ARGMAX, "!(widen(row + i) <= bound)", "widen(row + i) > bound"),
    ("rest-overlooked", ARGMAX, "  look(i, size);\n", ""),
    ("infinite-chosen", ARGMAX, "std::isfinite(largest) ? best : kNoNumbers", "best"),
    (
        "poison-written",
        STORED,
        "are_finite(key, in.D) && are_finite(value, in.Dv)) {\n      for",
        "true) {\n      for",
    ),
    ("poison-rounded", STORED, "are_finite(key, in.D) && are_finite(value, in.Dv)) {\n      of", "true) {\n      of"),
    ("odd-partner-multiplied", FEW_ROWS, "add_pair(depth - 1, 0)", "add_pair(depth - 1, b.stride)"),
    ("tiles-read-beyond-keys", PAGED, "std::min(j + 1, count - 1) * in.Dv", "(j + 1) * in.Dv"),
    ("part-of-nan-left-out", SOFTMAX, " && sum_of(load(part.sums + row * kLanes)) == 0", ""),
    ("poison-through-the-mask", POISON, "(paged.written()[:, None] & ~broken)", "paged.written()[:, None]"),
    ("stale-blocks-multiplied", POISON, "(paged.written()[:, None] & ~broken)", "(~broken)"),
    (
        "poison-taken-for-zeros",
        POISON,
        "output.masked_fill((mask & broken",
        "output.masked_fill((~mask & mask & broken",
    ),
    ("failed-request-goes-on", FAILED, "(error := sequence.error) is not None", "(error := sequence.error) and False"),
    ("memory-shared-with-forks", MEMORY, "mmap.MAP_PRIVATE", "mmap.MAP_SHARED"),
    ("shapes-unchecked", WEIGHTS, "found[name] != (dtype, shape)", "found[name][0] != dtype"),
    ("cached-library-unverified", CACHED, "size > 0 and sealed(data[:size]) == data", "size > 0"),
]
FAULTS = [Fault(*row) for row in TABLE]


def planted(fault: Fault) -> str:
    """The file's text with the fault in it; SystemExit if the table is out of date."""
    text = (ROOT / fault.at.file).read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.name}: not once but {text.count(fault.old)} times in {fault.at.file}: {fault.old}")
    return text.replace(fault.old, fault.new)


def run_tests(tests: str, fault: Fault | None = None, limit_s: float | None = None) -> Run:
    """Run them in a copy of the tree, with the fault in it. No end within `limit_s` is a failure too."""
    with tempfile.TemporaryDirectory(prefix="mutate-") as directory:
        tree = Path(directory)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
            copy(ROOT / name, tree / name)
        if fault is not None:
            (tree / fault.at.file).write_text(planted(fault), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        start = time.perf_counter()
        with subprocess.Popen(
            [*command, f"--basetemp={tree / 'tmp'}", *shlex.split(tests)],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": directory, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # compilers and commands that a test started end with it
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit_s)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                return Run(f"no end in {limit_s:.0f} s", time.perf_counter() - start)
        return Run(first_failure(process.returncode, output), time.perf_counter() - start)


def first_failure(code: int, output: str) -> str | None:
    """The test that failed; SystemExit if none was run, because then the fault or its tests are wrong."""
    if code < 0:
        return signal.Signals(-code).name
    failed = re.search(r"^(?:FAILED|ERROR) \S*?(\w+\.py::\w+)", output, re.MULTILINE)
    if code not in (0, 1) or (code == 1) != bool(failed) or "cannot compile the kernels" in output:
        raise SystemExit(f"these tests cannot be run, pytest returned {code}:\n{output[-3000:]}")
    return failed[1] if failed else None


def judge(fault: Fault, limits_s: dict[str, float]) -> tuple[Fault, Run]:
    run = run_tests(fault.at.tests, fault, limits_s[fault.at.tests])
    print(f"{fault.name}: {run.failed or 'SURVIVED'}, {run.seconds:.0f} s", file=sys.stderr, flush=True)
    return fault, run


def table(results: list[tuple[Fault, Run]], *, markdown: bool) -> str:
    """A row for each fault; in columns of one width unless in Markdown."""
    rows = [("fault", "file", "what", "caught by", "seconds")]
    for fault, run in results:
        what = " → ".join(f"`{' '.join(text.split())}`" for text in (fault.old, fault.new))
        what = what.replace("|", r"\|") if markdown else what
        rows.append((fault.name, fault.at.file, what, run.failed or "SURVIVED", f"{run.seconds:.0f}"))
    if markdown:
        rows.insert(1, ("---",) * 5)
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant; without one all")
    parser.add_argument("--jobs", type=int, default=1, help="test runs at a time")
    parser.add_argument("--list", action="store_true", help="name the faults and run nothing")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - {fault.name for fault in FAULTS}):
        parser.error(f"no such fault: {', '.join(unknown)}")
    faults = [fault for fault in FAULTS if not options.names or fault.name in options.names]
    for fault in faults:
        planted(fault)
    if options.list:
        print("\n".join(f"{fault.name:40}{fault.at.file}" for fault in faults))
        return 0
    tests = list(dict.fromkeys(fault.at.tests for fault in faults))
    with ThreadPoolExecutor(options.jobs) as executor:
        whole = dict(zip(tests, executor.map(run_tests, tests), strict=True))
        if failing := [run.failed for run in whole.values() if run.failed]:
            raise SystemExit(f"tests fail without a fault: {', '.join(failing)}")
        limits_s = {name: 60 + 3 * run.seconds for name, run in whole.items()}
        results = list(executor.map(partial(judge, limits_s=limits_s), faults))
    print(table(results, markdown=options.markdown))
    survivors = [fault.name for fault, run in results if run.failed is None]
    print(f"{len(faults) - len(survivors)} of {len(faults)} caught", file=sys.stderr)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
