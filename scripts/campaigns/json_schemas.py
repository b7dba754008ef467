"""Outputs of the JSON Schema test suite's schemas, written at random under their grammars, judged by `jsonschema`.

Of each schema that is taken: no instance that the suite calls invalid may be written, and what is written at random
must be valid. Prints the faults, how many of the suite's valid instances can be written (in the one style that
grammars have), and for what schemas are refused. The suite is in the source distribution of `jsonschema`:

    pip download --no-binary :all: --no-deps jsonschema==4.26.0 && tar xf jsonschema-4.26.0.tar.gz
    python -m scripts.campaigns.json_schemas jsonschema-4.26.0/json/tests [--drafts draft2020-12,draft7] [--walks 4]
"""

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from runtime.checkpoint.resolve import resolve_model
from runtime.checkpoint.tokenizer import Tokenizer
from runtime.core.grammar import Grammars, Matcher
from runtime.core.params import SamplingParams
from runtime.text.text import encode_text, open_tokenizer
from runtime.util.errors import SpecDecError

VALIDATORS = {
    "draft2020-12": jsonschema.Draft202012Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft4": jsonschema.Draft4Validator,
}
_END = 1


def written(matcher: Matcher, tokenizer: Tokenizer, value: Any) -> bool:
    """True if the value can be written whole, as `json.dumps` writes it."""
    tokens = encode_text(tokenizer, json.dumps(value, ensure_ascii=False))
    return matcher.num_legal([], [*tokens, _END]) == len(tokens) + 1 or (
        matcher.num_legal([], tokens) == len(tokens) and matcher.is_over(tokens)
    )


def walk(matcher: Matcher, rng: random.Random, most: int = 80) -> list[int] | None:
    """Tokens that were chosen at random, with few letters and digits, up to the end; None if it did not come."""
    tokens: list[int] = []
    while len(tokens) < most:
        (mask,) = matcher.allowed(tokens, [])
        if mask is None:
            return tokens
        allowed = np.flatnonzero(mask.allowed).tolist()
        if not allowed:
            raise AssertionError(f"nothing can follow: {tokens}, {matcher.error}")
        if mask.allowed[_END] and (allowed == [_END] or rng.random() < 0.5):
            return tokens
        tokens.append(rng.choice([token for token in allowed if token != _END] or allowed))
    return None


def groups(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(directory.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            yield f"{path.stem}: {group['description']}", group


def _kind(error: SpecDecError) -> str:
    """Reason of a refusal without what it quotes."""
    reason = error.message.partition(": ")[2]
    return re.sub(r"'[^']*'|/[^ ]*/|[\d.]+$", "…", reason) if "keys" not in reason else reason


class Campaign:
    """Findings on a draft of JSON Schema."""

    def __init__(self, grammars: Grammars, tokenizer: Tokenizer, num_walks: int) -> None:
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.faults: list[str] = []
        self._grammars, self._tokenizer, self._num_walks = grammars, tokenizer, num_walks

    def look(self, name: str, group: dict[str, Any], validator: Any) -> None:
        self.counts["schemas"] += 1
        try:
            grammar = SamplingParams(json_schema=group["schema"]).output_grammar
            assert grammar is not None
            compiled = self._grammars.compiled(grammar)
        except SpecDecError as error:
            self.refused[_kind(error)] += 1
            return
        self.counts["taken"] += 1
        matcher = Matcher(compiled, 0, frozenset({_END}))
        for test in group["tests"]:
            self.counts[f"{test['valid']}"] += 1
            if written(matcher, self._tokenizer, test["data"]):
                self.counts[f"{test['valid']} written"] += 1
                if not test["valid"]:
                    self.faults.append(f"{name}: invalid, and can be written: {test['data']!r}")
        for seed in range(self._num_walks):
            tokens = walk(matcher, random.Random(seed))
            if tokens is None:
                continue
            self.counts["walks"] += 1
            text = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
            try:
                errors = [error.message for error in validator(group["schema"]).iter_errors(json.loads(text))]
            except Exception as error:  # a reference that the validator does not find either
                errors = [f"{type(error).__name__}: {error}"]
            if errors:
                self.faults.append(f"{name}: {text!r}: {errors[0][:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--drafts", default=",".join(VALIDATORS))
    parser.add_argument("--walks", type=int, default=4)
    arguments = parser.parse_args()
    tokenizer = open_tokenizer(resolve_model("demo"))
    grammars = Grammars(tokenizer, max(tokenizer.get_vocab().values()) + 1, frozenset({_END}))
    for draft in arguments.drafts.split(","):
        campaign = Campaign(grammars, tokenizer, arguments.walks)
        for name, group in groups(arguments.suite / draft):
            campaign.look(name, group, VALIDATORS[draft])
        counts = campaign.counts
        print(
            f"{draft}: {counts['taken']} of {counts['schemas']} schemas taken; {counts['walks']} outputs; of valid "
            f"instances {counts['True written']} of {counts['True']} can be written, of invalid ones "
            f"{counts['False written']} of {counts['False']}; faults: {len(campaign.faults)}"
        )
        for fault in campaign.faults:
            print(f"  {fault}")
        for reason, num in campaign.refused.most_common():
            print(f"  refused {num}: {reason}")


if __name__ == "__main__":
    main()
