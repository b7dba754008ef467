"""Calls of real tools: a call that must come is valid by its schema, whatever the model chooses.

    python -m scripts.campaigns.tool_schemas TOOLS.json [--walks 5] [--format hermes]

The file is a list of objects with `name` and `schema`, such as the answers of MCP servers to `tools/list`. Each schema
is made a grammar for the shipped model's tokenizer, tokens are chosen at random among those allowed, and the call that
they make is read back and checked by `jsonschema`. Prints the names of those refused and invalid, then the counts; exit
1 if any call is invalid. Formats whose calls are JSON can be named.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import jsonschema

from runtime.core.grammar import CompiledGrammar, Grammars
from runtime.core.params import Grammar
from runtime.llm import LLM
from runtime.text.call_formats import Tool, named_tool_format
from runtime.text.call_grammar import Calls, SpecialIds, call_grammar
from runtime.text.parser import OutputForm, OutputParser, special_token_ids
from runtime.text.text import TextStream
from runtime.util.errors import SpecDecError

_LONG = 150
"""Tokens after which what ends a text or a list is preferred."""
_MOST = 6000


def walk(compiled: CompiledGrammar, tokenizer: Any, rng: random.Random) -> list[int]:
    """Random tokens to the end of the grammar."""
    matcher, tokens, texts = compiled.start(), list[int](), tokenizer.get_vocab()
    closing = {i for text, i in texts.items() if text in ('"', "}", "]", '"}', '"]', "}}", "</")}
    while not matcher.is_stopped() and not matcher.is_accepting():
        bits = matcher.compute_bitmask()
        allowed = [i for i in range(len(texts)) if bits[i // 8] >> (i % 8) & 1]
        ends = [i for i in allowed if i in closing] if len(tokens) > _LONG or rng.random() < 0.2 else []
        tokens.append(rng.choice(ends or allowed))
        matcher.consume_token(tokens[-1])
        if len(tokens) > _MOST:
            raise SpecDecError("a call does not end", hint="raise the bound")
    return tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--walks", type=int, default=5)
    parser.add_argument("--format", default="hermes")
    arguments = parser.parse_args()
    form = named_tool_format(arguments.format)
    assert form is not None
    counts = {"tools": 0, "refused": 0, "calls": 0, "invalid": 0}
    with LLM("demo") as llm:
        tokenizer, grammars = llm.tokenizer, Grammars(llm.tokenizer, llm.bundle.config.vocab_size, llm.end_ids)
        assert tokenizer is not None
        special = SpecialIds(grammars.special_tokens(), llm.end_ids)
        for one in json.loads(arguments.file.read_text()):
            counts["tools"] += 1
            tool = Tool(one["name"], one["schema"], is_strict=True)
            text = call_grammar(Calls((tool,), "required", are_parallel=False), form, None, special, in_reasoning=False)
            try:
                compiled = grammars.compiled(Grammar("lark", text or ""))
            except SpecDecError as error:
                counts["refused"] += 1
                print(f"refused: {tool.name}: {error.message}")
                continue
            reading = OutputForm.of(form, None, special_token_ids(tokenizer), [tool])
            for seed in range(arguments.walks):
                tokens = walk(compiled, tokenizer, random.Random(f"{tool.name} {seed}"))
                parser = OutputParser(reading)
                said = [*parser.feed(TextStream(tokenizer).next_piece(tokens, finished=True)), *parser.end()]
                counts["calls"] += 1
                try:
                    (name,) = [part.text for part in said if part.kind == "call"]
                    values = json.loads("".join(part.text for part in said if part.kind == "arguments"))
                    assert name == tool.name
                    jsonschema.validate(values, one["schema"])
                except (AssertionError, ValueError, jsonschema.ValidationError) as error:
                    counts["invalid"] += 1
                    print(f"invalid: {tool.name}: {str(error)[:200]!r}")
    print(", ".join(f"{name} {count:,}" for name, count in counts.items()))
    return 1 if counts["invalid"] else 0


if __name__ == "__main__":
    sys.exit(main())
