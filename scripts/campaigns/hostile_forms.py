"""Forms that are meant to take all time, memory or stack, beside a polite client of the same server.

    specdec serve --model-dir demo --port 8000
    python -m scripts.campaigns.hostile_forms [--port 8000] [--num-forms 500] [--at-once 8]

Forms are random, the same for the same numbers: large multiples alone, by the hundred and together, huge bounds of
lengths and counts, nested `allOf`, `anyOf` and `oneOf`, long enumerations, chains and circles of references, patterns
with counted repetitions, many properties, ambiguous and deep grammars, tools with such schemas. One client asks for 3
tokens again and again: for 10 s alone, then beside them. Exit 1 if a form is answered otherwise than with 200, 400 or
503, if the polite client is refused, or if the server does not answer at the end.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from threading import Event, Thread
from typing import Any

HOST, TIMEOUT_S = "127.0.0.1", 600
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_ALONE_S, _PAUSE_S = 10.0, 0.05
_PRIMES = (101, 997, 9_973, 99_991, 999_983, 9_999_991, 99_999_989)

Form = dict[str, Any]
"""Fields of a body."""


def _multiple(rng: random.Random) -> Form:
    return _of_schema({"type": rng.choice(["integer", "number"]), "multipleOf": rng.choice(_PRIMES)})


def _multiples(rng: random.Random) -> Form:
    most = rng.choice((1_000, 10_000, 100_000))
    parts = [{"type": "integer", "multipleOf": rng.randrange(2, most)} for _ in range(rng.choice((2, 3, 20, 200)))]
    if rng.random() < 0.5:
        return _of_schema({"allOf": parts[:4]})
    return _of_schema({"type": "object", "properties": {f"p{i}": part for i, part in enumerate(parts)}})


def _bounds(rng: random.Random) -> Form:
    size = 10 ** rng.randrange(3, 12)
    least = rng.choice((0, 1, size // 2, size))
    return _of_schema(
        rng.choice(
            [
                {"type": "string", "minLength": least, "maxLength": size},
                {"type": "array", "items": {"type": "string", "maxLength": size}, "minItems": least, "maxItems": size},
                {"type": "object", "minProperties": least, "maxProperties": size},
                {"type": "integer", "minimum": -(size**3), "maximum": size**3 + 7},
                {"type": "number", "exclusiveMinimum": -1 / size, "maximum": size + 1 / 3},
            ]
        )
    )


def _nested(rng: random.Random) -> Form:
    word, width = rng.choice(["allOf", "anyOf", "oneOf"]), rng.randrange(2, 7)
    schema: Any = {"type": "string", "pattern": "^[a-z]{1,9}$"}
    for level in range(rng.randrange(2, 8)):
        parts = [{"properties": {f"k{level}{i}": schema}, "required": [f"k{level}{i}"]} for i in range(width)]
        schema = {word: parts if rng.random() < 0.5 else [schema] * width}
        if len(json.dumps(schema)) > 100_000:
            break
    return _of_schema(schema)


def _enumeration(rng: random.Random) -> Form:
    values = [f"value {rng.getrandbits(40)}" for _ in range(rng.choice((1_000, 5_000, 9_000)))]
    return rng.choice([_of_schema({"enum": values}), {"guided_choice": values[:1024]}])


def _deep(rng: random.Random) -> Form:
    depth = rng.choice((50, 120, 3_000))
    word, closing_text = rng.choice([('{"type":"array","items":', "}"), ('{"allOf":[', "]}"), ('{"not":', "}")])
    return {"guided_json": f"{word * depth}{{}}{closing_text * depth}"}


def _references(rng: random.Random) -> Form:
    length = rng.choice((10, 300, 2_000, 5_000))
    wrap: Callable[[Any], Any] = rng.choice(
        [
            lambda ref: ref,
            lambda ref: {"allOf": [ref, ref]},
            lambda ref: {"anyOf": [ref, ref]},
            lambda ref: {"type": "object", "properties": {"a": ref, "b": ref}, "required": ["a"]},
        ]
    )
    definitions = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    last = rng.choice([{"type": "null"}, {"$ref": "#/$defs/d0"}, {"type": "array", "items": {"$ref": "#"}}])
    return _of_schema({"$ref": "#/$defs/d0", "$defs": definitions | {f"d{length}": last}})


def _pattern(rng: random.Random) -> Form:
    count = rng.choice((10, 100, 1_000, 100_000))
    expression = rng.choice(
        [
            f"(a{{{count}}}){{{count}}}",
            f"[xy](a{{0,{count}}}){{{count}}}",
            f"(.*a.{{{min(count, 40)}}}b)*",
            "(" * 200 + "a" + "){0,9}" * 200,
            "|".join(f"a.*{i}b" for i in range(min(count, 2_000))),
            f"(([a-z]{{1,{count}}}){{1,{count}}}-){{1,{count}}}",
            "(?=a)b",
            "(a|b|ab)*" * min(count, 1_000) + f"c{{{count}}}",
        ]
    )
    if rng.random() < 0.5:
        return {"guided_regex": expression}
    names = {f"^x{i}.*{i}$": {} for i in range(rng.choice((2, 60)))}
    keyword: Any = {"pattern": f"^{expression}$"} if rng.random() < 0.5 else {"patternProperties": names}
    return _of_schema(keyword)


def _properties(rng: random.Random) -> Form:
    names = [f"p{i}" for i in range(rng.choice((50, 500, 2_000)))]
    schema: Any = {
        "type": "object",
        "properties": {name: {"type": rng.choice(["integer", "string"])} for name in names},
    }
    schema["required"] = rng.sample(names, rng.randrange(len(names)))
    schema["additionalProperties"] = rng.random() < 0.5
    return _of_schema(schema)


def _grammar(rng: random.Random) -> Form:
    count = rng.choice((10, 60, 1_000))
    primes = [2, 3, 5, 7, 11, 13, 17, 19, 23][: rng.randrange(2, 10)]
    return {
        "guided_grammar": rng.choice(
            [
                'start: e\ne: e e | "x" | ',
                "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(count)) + f'a{count}: "x" | ',
                "start: A\nA: " + " & ".join(f"/(.{{{prime}}})*/" for prime in primes),
                f"start: A{{{10 ** rng.randrange(3, 8)}}}\nA: /a/",
                f"start: {'(' * count}A{')' * count}\nA: /a/",
                f'root ::= {"(" * count}"a"{")" * count}',
                "start: A B\nA: ~/(.*a.{18}b.*)/ & ~/.*[aeiou].{17}[a-m].*/\nB: /x*/",
                "start: "
                + " | ".join(f"A{i}" for i in range(count))
                + "".join(f"\nA{i}: /a*{i}/" for i in range(count)),
                f"start: A\nA: /{'a?' * count}a{{{count}}}/",
            ]
        )
    }


KINDS = (
    _multiple, _multiples, _bounds, _nested, _enumeration, _deep, _references, _pattern, _properties, _grammar
)  # fmt: skip


def _of_schema(schema: Any) -> Form:
    return {"guided_json": schema}


def hostile_request(number: int) -> tuple[str, dict[str, Any]]:
    """Path and body, the same for the same number; every fifth schema is the one of a tool's arguments."""
    rng = random.Random(number)
    form = KINDS[number % len(KINDS)](rng)
    if number % 5 == 0 and isinstance(schema := form.get("guided_json"), dict):
        function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": schema}}}
        tools = [{"type": "function", "function": function}]
        messages = [{"role": "user", "content": "a"}]
        return CHAT, {"messages": messages, "max_tokens": 20, "tools": tools, "tool_choice": "required"}
    return COMPLETIONS, {"prompt": "a", "max_tokens": 20, "temperature": 1.0, "seed": number, **form}


@dataclass
class Waits:
    """Waits of the polite client, in seconds, and what went wrong."""

    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        found = sorted(self.seconds) or [0.0]
        return f"{len(self.seconds):,} requests, median {found[len(found) // 2]:.3f} s, longest {found[-1]:.3f} s"


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Status and text of an answer; 0 and the reason if there is none."""
    try:
        with closing(HTTPConnection(HOST, port, timeout=TIMEOUT_S)) as connection:
            connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read().decode()
    except (OSError, HTTPException) as error:
        return 0, repr(error)


def ask_politely(port: int, waits: Waits, is_over: Event) -> None:
    body = {"prompt": "x", "max_tokens": 3, "temperature": 0}
    while not is_over.is_set():
        start = time.perf_counter()
        status, text = ask(port, COMPLETIONS, body)
        waits.seconds.append(time.perf_counter() - start)
        if status != 200:
            waits.failures.append(f"the polite client: {status} {text[:200]}")
        is_over.wait(_PAUSE_S)


def politely(port: int, work: Callable[[], object]) -> Waits:
    """Waits of the polite client while this is done."""
    waits, is_over = Waits(), Event()
    thread = Thread(target=ask_politely, args=(port, waits, is_over))
    thread.start()
    try:
        work()
    finally:
        is_over.set()
        thread.join()
    return waits


def attack(port: int, numbers: range, at_once: int) -> tuple[Counter[int], list[str]]:
    """Send hostile forms; numbers of answers by status, and what is wrong."""
    counts: Counter[int] = Counter()
    wrong: list[str] = []

    def send(number: int) -> None:
        path, body = hostile_request(number)
        status, text = ask(port, path, body)
        counts[status] += 1
        if status not in (200, 400, 503):
            wrong.append(f"form {number}: {status} {text[:200]}")

    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(send, numbers))
    return counts, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--num-forms", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="number of the first form")
    parser.add_argument("--at-once", type=int, default=8, help="connections that send hostile forms")
    given = parser.parse_args()
    alone = politely(given.port, lambda: time.sleep(_ALONE_S))
    print(f"polite client alone: {alone}", flush=True)
    found: list[tuple[Counter[int], list[str]]] = []
    numbers = range(given.first, given.first + given.num_forms)
    start = time.perf_counter()
    beside = politely(given.port, lambda: found.append(attack(given.port, numbers, given.at_once)))
    (counts, wrong), seconds = found[0], time.perf_counter() - start
    print(f"beside {given.num_forms} hostile forms, {given.at_once} at once, in {seconds:.0f} s: {beside}")
    print(f"answers by status: {dict(sorted(counts.items()))}")
    status, _ = ask(given.port, "/health")
    wrong += [*alone.failures, *beside.failures, *([] if status == 200 else [f"/health at the end: {status}"])]
    print("\n".join(wrong) or "nothing wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
