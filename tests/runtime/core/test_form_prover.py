"""Forms that would take all time, memory or stack end a process of their own, and nothing else."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import byte_tokenizers
import numpy as np
import psutil
import pytest
from waiting import wait_until

from runtime.core.form_prover import FormProver, FormRefused, FormsBusy
from runtime.core.grammar import Grammars, Matcher
from runtime.core.params import Grammar
from runtime.engine import rank_processes
from runtime.util.errors import SpecDecError, UsageError

END_IDS = frozenset({2})
A_CHAIN = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(5000)}
RULES = ["start: r0", *(f"r{i}: r{i + 1}" for i in range(3000))]
PATTERNS = [f"/(.{{{prime}}})*/" for prime in (2, 3, 5, 7, 11, 13, 17, 19, 23)]
PROPERTIES = {f"p{i}": {"type": "integer", "multipleOf": 10_007 + i} for i in range(200)}
HOSTILE = {
    "a large multiple": Grammar("json_schema", json.dumps({"type": "integer", "multipleOf": 99_999_989})),
    "a multiple that takes long": Grammar("json_schema", json.dumps({"type": "integer", "multipleOf": 1_234_567})),
    "two multiples": Grammar(
        "json_schema", json.dumps({"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]})
    ),
    "many multiples": Grammar("json_schema", json.dumps({"type": "object", "properties": PROPERTIES})),
    "a chain of references": Grammar(
        "json_schema", json.dumps({"$ref": "#/$defs/a0", "$defs": A_CHAIN | {"a5000": {"type": "null"}}})
    ),
    "a chain of rules": Grammar("grammar", "\n".join([*RULES, 'r3000: "a"'])),
    "an intersection": Grammar("grammar", f"start: A\nA: {' & '.join(PATTERNS)}"),
    "deep brackets": Grammar("grammar", f"root ::= {'(' * 5000}'a'{')' * 5000}"),
}
HARMLESS = [
    Grammar("regex", "(the (dog|ball)( and )?){1,3}[0-9]{2,4}"),
    Grammar("json_schema", json.dumps({"properties": {"a": {"type": "integer"}}, "required": ["a"], "type": "object"})),
    Grammar("grammar", 'root ::= "the " ("dog" | "ball")'),
    Grammar("choice", json.dumps(["yes", "no"])),
]


def opened() -> Iterator[Grammars]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.core.form_prover.MOST_S", 0.2)
        made = Grammars(byte_tokenizers.byte_level(), 300, END_IDS, proves=True)
        yield made
        made.close()


grammars = pytest.fixture(opened)
grammars_of_all = pytest.fixture(opened, scope="module", name="grammars_of_all")
"""Grammars with a single process for all forms, hostile or not."""


def process_of(grammars: Grammars) -> psutil.Process | None:
    """The process that this one has begun for forms."""
    assert grammars._prover is not None
    return None if grammars._prover.pid is None else psutil.Process(grammars._prover.pid)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_form_is_refused_and_the_next_one_is_compiled(grammars_of_all: Grammars, name: str) -> None:
    too_deep = name in ("a chain of references", "a chain of rules", "deep brackets")
    said = "is nested too deeply" if too_deep else "never ends, or takes more than"
    with pytest.raises(UsageError, match=f"cannot be used: it {said}"):
        grammars_of_all.compiled(HOSTILE[name])
    assert grammars_of_all.compiled(Grammar("regex", name)).start().is_accepting() is False


def test_a_form_that_was_refused_is_refused_again_without_a_process(grammars: Grammars) -> None:
    with pytest.raises(UsageError) as first:
        grammars.compiled(HOSTILE["a large multiple"])
    grammars.close()
    with pytest.raises(UsageError) as second:
        grammars.compiled(HOSTILE["a large multiple"])
    assert second.value.message == first.value.message and process_of(grammars) is None


@pytest.mark.parametrize("grammar", HARMLESS, ids=lambda grammar: grammar.kind)
def test_a_form_that_was_proven_allows_the_same(grammars_of_all: Grammars, grammar: Grammar) -> None:
    """The same tokens as one that was compiled here alone."""
    alone = Grammars(byte_tokenizers.byte_level(), 300, END_IDS).compiled(grammar)
    proven, expected = (Matcher(one, 1, END_IDS) for one in (grammars_of_all.compiled(grammar), alone))
    tokens, num_positions = [1], 0
    while (mask := expected.allowed(tokens, [])[0]) is not None and num_positions < 8:
        (found,) = proven.allowed(tokens, [])
        assert found is not None and np.array_equal(found.allowed, mask.allowed)
        tokens.append(int(np.flatnonzero(mask.allowed)[-1]))
        num_positions += 1
    assert num_positions > 1


def test_a_process_that_was_killed_is_begun_again(grammars: Grammars) -> None:
    grammars.compiled(HARMLESS[0])
    process = process_of(grammars)
    assert process is not None
    process.suspend()  # it forks no more
    for one in (*process.children(), process):  # a child that was forked before would answer for the next form
        one.kill()
    assert grammars.compiled(HARMLESS[1]) is not None
    assert process_of(grammars) != process


ASKER = """
import sys, byte_tokenizers
from runtime.core.form_prover import FormProver
prover = FormProver(byte_tokenizers.byte_level().backend_tokenizer.to_str(), 300, [2])
prover.prove("regex", "a")
print(prover.pid, flush=True)
sys.stdin.read()
"""


def test_the_process_ends_with_an_asker_that_is_killed() -> None:
    """The asker is a fork where there are some, which begins sooner."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [rank_processes._PYTHON, "-c", ASKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as asker:
        assert asker.stdout is not None
        pid = int(asker.stdout.readline())
        assert psutil.pid_exists(pid)
        asker.kill()
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_a_form_that_takes_long_makes_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of those that take long is told to ask later; the next is answered."""
    monkeypatch.setattr("runtime.core.form_prover.MOST_S", 3600.0)
    monkeypatch.setattr("runtime.core.form_prover.MOST_AT_ONCE", 2)
    prover = FormProver(byte_tokenizers.byte_level().backend_tokenizer.to_str(), 300, [2])
    with ThreadPoolExecutor(2) as threads:
        slow = []
        for name in ("a multiple that takes long", "many multiples"):
            slow.append(threads.submit(prover.prove, "json_schema", HOSTILE[name].text))
            wait_until(lambda: len(prover._slow) == len(slow))
        first, second = prover._slow
        assert prover.prove("regex", "ab").seconds < 3600
        with pytest.raises(FormsBusy):
            slow[0].result(60)
        assert not slow[1].done()
        os.kill(second, signal.SIGKILL)
        with pytest.raises(FormRefused):
            slow[1].result(60)
        assert first != second and not prover._slow
    prover.close()


def test_too_many_forms_at_once_are_told_to_come_later(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.core.grammar.MOST_COMPILING", 1)
    grammars.compiled(HARMLESS[0])
    process = process_of(grammars)
    assert process is not None
    process.suspend()
    try:
        with ThreadPoolExecutor(2) as threads:
            waiting = threads.submit(grammars.compiled, HARMLESS[1])
            same = threads.submit(grammars.compiled, HARMLESS[1])
            wait_until(lambda: grammars._num_compiling == 1)
            with pytest.raises(FormsBusy):
                grammars.compiled(HARMLESS[2])
            assert grammars.compiled(HARMLESS[0]) is not None  # that one is kept
            process.resume()
            assert waiting.result(60) is same.result(60)
    finally:
        process.resume()
    assert grammars.compiled(HARMLESS[2]) is not None


def test_no_process_is_an_error_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **named: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", fails)
    with pytest.raises(SpecDecError, match="no process can be started to compile forms"):
        Grammars(byte_tokenizers.byte_level(), 300, END_IDS, proves=True).compiled(HARMLESS[0])
