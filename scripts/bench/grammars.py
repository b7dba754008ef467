"""Cost and gain of grammars: what they add to the time of steps, and tokens per step of JSON answers.

Twenty schemas of the kinds that tools have are answered, greedily and sampled, and each answer that is whole is checked
by `jsonschema`. `--flexible` leaves white space to the model.

    python -m scripts.bench.grammars MODEL [--at-once 1,16] [--max-tokens 200] [--flexible]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import runtime  # before torch, as commands do: it tells OpenMP how long to wait  # noqa: F401

# isort: split
import jsonschema

from runtime.core.grammar import Matcher
from runtime.core.params import SamplingParams
from runtime.core.sampling import Sampler
from runtime.drafters.specs import AnySpec, GrammarDrafter, NgramDrafter, SuffixDrafter
from runtime.llm import LLM

DRAFTERS: dict[str, AnySpec | None] = {
    "none": None,
    "grammar": GrammarDrafter(10),
    "grammar + n-gram": NgramDrafter(10, 2),
    "grammar + suffix": SuffixDrafter(10),
}


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def text(most: int = 20) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


def one_of(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


def array(items: dict[str, Any], most: int = 3) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


INTEGER, NUMBER, BOOLEAN = {"type": "integer", "minimum": 0, "maximum": 9999}, {"type": "number"}, {"type": "boolean"}
SCHEMAS = [
    obj(name=text(), age=INTEGER),
    obj(city=text(), country=text(), population=INTEGER),
    obj(title=text(30), year=INTEGER, genre=one_of("comedy", "drama", "action", "documentary")),
    obj(sentiment=one_of("positive", "negative", "neutral"), confidence=NUMBER),
    obj(first_name=text(), last_name=text(), email={"type": "string", "pattern": r"^[a-z]{1,8}@[a-z]{1,8}\.com$"}),
    obj(
        function=one_of("get_weather", "get_time", "search_web"),
        arguments=obj(location=text(), unit=one_of("celsius", "fahrenheit")),
    ),
    obj(items=array(obj(product_id=INTEGER, quantity=INTEGER)), total_price=NUMBER),
    obj(is_spam=BOOLEAN, reason=text(40)),
    obj(steps=array(obj(explanation=text(30), output=text())), final_answer=text()),
    obj(
        person=obj(name=text(), address=obj(street=text(), postal_code={"type": "string", "pattern": "^[0-9]{5}$"})),
        active=BOOLEAN,
    ),
    obj(latitude=NUMBER, longitude=NUMBER, label=text()),
    obj(tags=array(text(10), 4), priority=one_of("low", "medium", "high", "urgent")),
    obj(
        date={"type": "string", "format": "date"},
        start_time={"type": "string", "format": "time"},
        attendees=array(text(10)),
    ),
    obj(question=text(40), options=array(text(10), 4), correct_option_index=INTEGER),
    obj(command=one_of("read_file", "write_file", "list_directory"), path=text(30), recursive=BOOLEAN),
    obj(color=obj(red=INTEGER, green=INTEGER, blue=INTEGER), opacity=NUMBER),
    obj(
        user_id=INTEGER,
        permissions=array(one_of("read", "write", "execute", "admin"), 4),
        last_login={"type": ["string", "null"], "maxLength": 10},
    ),
    obj(from_currency=one_of("USD", "EUR", "GBP"), to_currency=one_of("USD", "EUR", "GBP"), amount=NUMBER),
    obj(nodes=array(obj(id=INTEGER, label=text(8))), edges=array(obj(source=INTEGER, target=INTEGER))),
    obj(
        summary=text(60),
        keywords=array(text(10)),
        language=one_of("english", "german", "french", "spanish"),
        word_count=INTEGER,
    ),
]


class Stopwatch:
    """Seconds spent in functions, of which none calls another."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def over(self, *functions: tuple[type, str]) -> Any:
        before = [(owner, name, getattr(owner, name)) for owner, name in functions]
        for owner, name, function in before:
            setattr(owner, name, self._timed(function))
        try:
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def show_shares(llm: LLM, schemas: list[dict[str, Any]], sizes: list[int], max_tokens: int) -> None:
    """Time of waiting for masks, of applying them and of the look for an output's end, beside that of the steps."""
    session = llm.session()
    for size in sizes:
        stopwatch, step_s, num_tokens, num_steps = Stopwatch(), 0.0, 0, 0
        for start in range(0, len(schemas), size):
            some = [schemas[(start + i) % len(schemas)] for i in range(size)]
            params = [SamplingParams(json_schema=s, seed=i, max_tokens=max_tokens) for i, s in enumerate(some)]
            _, requests = llm._requests(["A form: "] * size, params)
            session.run(requests)  # a first time, of which the cache of lexers remains, as of a schema that is in use
            with stopwatch.over((Sampler, "legal"), (Matcher, "is_over")):
                generation = session.run(requests)
            step_s += generation.times.target_time_s
            num_tokens += generation.work.num_tokens
            num_steps += generation.times.num_iterations
        print(
            f"{size:2} at once: {1e6 * stopwatch.seconds / num_tokens:.0f} us a token, "
            f"{1e3 * stopwatch.seconds / num_steps:.2f} ms of a step's {1e3 * step_s / num_steps:.2f} ms: "
            f"{stopwatch.seconds / step_s:.1%} ({num_tokens} tokens, {num_steps} steps)"
        )


def show_delays(llm: LLM, sizes: list[int], max_tokens: int) -> None:
    """Time by which steps take longer than without a grammar, for outputs none of which ends meanwhile."""
    session = llm.session()
    of_words = obj(text=text(4 * max_tokens) | {"minLength": 4 * max_tokens})
    of_keys = array(obj(product_id=INTEGER, color=one_of("red", "green"), label=text(8)), 99) | {"minItems": 99}

    def step_s(size: int, *, has_grammar: bool) -> float:
        schemas = [(of_words, of_keys)[i % 2] if has_grammar else None for i in range(size)]
        params = [SamplingParams(json_schema=s, seed=i, max_tokens=max_tokens) for i, s in enumerate(schemas)]
        times = session.run(llm._requests(["A form: "] * size, params)[1]).times
        return times.wall_s / times.num_iterations

    for size in sizes:
        step_s(size, has_grammar=True)
        pairs = [(step_s(size, has_grammar=False), step_s(size, has_grammar=True)) for _ in range(7)]
        longer = [with_it / without - 1 for without, with_it in pairs]
        without_s = statistics.median(without for without, _ in pairs)
        print(
            f"{size:2} at once: a step takes {statistics.median(longer):.1%} longer "
            f"({min(longer):.1%} to {max(longer):.1%}), {1e3 * without_s:.1f} ms without"
        )


def show_tokens_per_step(llm: LLM, schemas: list[dict[str, Any]], max_tokens: int) -> None:
    for temperature in (0.0, 1.0):
        for name, drafter in DRAFTERS.items():
            num_tokens = num_steps = num_whole = 0
            ratios = []
            for i, schema in enumerate(schemas):
                prompt = f"Answer as JSON by this schema: {json.dumps(schema)[:200]}\nAnswer: "
                params = SamplingParams(json_schema=schema, temperature=temperature, seed=i, max_tokens=max_tokens)
                (output,) = llm.generate(prompt, params, drafter=drafter, draft_len_mode="fixed")
                num_tokens += len(output.token_ids)
                num_steps += output.stats.num_steps
                ratios.append(len(output.token_ids) / output.stats.num_steps)
                if output.finish_reason != "length":
                    jsonschema.validate(json.loads(str(output.text)), schema)
                    num_whole += 1
            print(
                f"temperature {temperature:g}, {name}: {statistics.mean(ratios):.2f} tokens per step of an answer, "
                f"{num_tokens / num_steps:.2f} of all ({num_tokens} in {num_steps}), {num_whole} of "
                f"{len(schemas)} whole and valid"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--at-once", default="1,16")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--max-seq-len", type=int, default=512)
    parser.add_argument("--flexible", action="store_true")
    parser.add_argument("--only-time", action="store_true")
    arguments = parser.parse_args()
    options = {"x-guidance": {"whitespace_flexible": True}} if arguments.flexible else {}
    schemas = [schema | options for schema in SCHEMAS]
    sizes = [int(size) for size in arguments.at_once.split(",")]
    with LLM(arguments.model, dtype="auto", max_batch_size=max(sizes), max_seq_len=arguments.max_seq_len) as llm:
        show_shares(llm, schemas, sizes, arguments.max_tokens)
        show_delays(llm, sizes, min(arguments.max_tokens, 60))
        if not arguments.only_time:
            show_tokens_per_step(llm, schemas, arguments.max_tokens)


if __name__ == "__main__":
    main()
