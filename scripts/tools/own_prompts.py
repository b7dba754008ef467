"""Prompts that a chat model makes itself, to train a head on where there are none of users.

After the words that begin a user's message, a model that was trained on chats goes on with a request (Magpie, arXiv
2406.08464). They are drawn, and those that do not end within --max-output-len tokens are left out.

    python -m scripts.tools.own_prompts --model-dir MODEL --output prompts.jsonl [--num-prompts 3000] [--seed 0]
    specdec train --model-dir MODEL --input-file prompts.jsonl --apply-chat-template --max-batch-size 64 …
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from runtime.core.params import SamplingParams
from runtime.llm import LLM
from runtime.util.errors import SpecDecError

_WORD = "specdec-request"


def user_begins(llm: LLM) -> str:
    """The chat template's text up to a user's first word."""
    before, found, _ = llm.chat_template.render([{"role": "user", "content": _WORD}]).partition(_WORD)
    if not found:
        raise SpecDecError("the chat template leaves out what a user says", hint="give another model")
    return before


def drawn_requests(llm: LLM, num_prompts: int, max_output_len: int, seed: int) -> Iterator[str]:
    """Different requests as the model would make them, at a temperature of 1, from its likeliest 95 %."""
    begin, seen, at_once = llm.encode(user_begins(llm))[0], set[str](), llm.engine.max_batch_size
    while len(seen) < num_prompts:
        seeds = range(seed, seed := seed + at_once)
        params = [SamplingParams(temperature=1.0, top_p=0.95, max_tokens=max_output_len, seed=one) for one in seeds]
        outputs = llm.generate([begin] * at_once, params)
        whole = {text: None for one in outputs if one.finish_reason == "end_id" and len(text := one.text.strip()) > 9}
        new = [text for text in whole if text not in seen][: num_prompts - len(seen)]
        if not new:
            raise SpecDecError(f"of {at_once} drawn requests none is new and ends", hint="is it a model for chats?")
        seen.update(new)
        yield from new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=3000)
    parser.add_argument("--max-output-len", type=int, default=120)
    parser.add_argument("--max-batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sizes = (arguments.num_prompts, arguments.max_output_len, arguments.seed)
    with LLM(arguments.model_dir, max_batch_size=arguments.max_batch_size) as llm, arguments.output.open("w") as file:
        for text in drawn_requests(llm, *sizes):
            file.write(json.dumps({"prompt": text}, ensure_ascii=False) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
