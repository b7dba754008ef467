"""Time until a function is called, in the turns of agents' conversations that a server answers in turn.

Each conversation has a long prompt of its own, with tools. A turn goes on from all that was said before, and adds
what a tool gave. What the first turn has computed is found by the later ones, also when others came between.

    specdec serve --model-dir MODEL --max-seq-len 8192 --tool-call-parser hermes
    python -m scripts.bench.agent_turns http://localhost:8000 [--prompt-words 4000] [--conversations 3] [--turns 3]
"""

import argparse
import json
import random
import statistics
import time
import urllib.request
from typing import Any

WORDS = ["get", "set", "read", "write", "file", "line", "index", "value", "return", "import", "class", "test", "name"]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string", "maxLength": 12}}, "required": ["path"]}
TOOLS = [
    {"type": "function", "function": {"name": f"{name}_file", "description": f"{name} a file", "parameters": SCHEMA}}
    for name in ("read", "write", "list", "delete")
]


def system(seed: int, num_words: int) -> str:
    """Text of an agent's instructions and files: words in lines, other ones in each conversation."""
    rng = random.Random(seed)
    return "\n".join(" ".join(rng.choices(WORDS, k=12)) for _ in range(num_words // 12))


def ask(url: str, messages: list[dict[str, Any]]) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """Seconds until a name is called, the message, and the usage."""
    body = {"messages": messages, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
    body |= {"max_tokens": 60, "stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    start, first_s = time.perf_counter(), None
    usage: dict[str, Any] = {}
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if "role" not in choice["delta"] and first_s is None:
                    first_s = time.perf_counter() - start
                for call in choice["delta"].get("tool_calls", ()):
                    if "id" in call:
                        message["tool_calls"] = [call]
                    else:
                        message["tool_calls"][0]["function"]["arguments"] += call["function"]["arguments"]
    assert first_s is not None
    return first_s, message, usage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--prompt-words", type=int, default=4000)
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    url, said = arguments.url.rstrip("/"), []
    for seed in range(arguments.conversations):
        text = system(seed, arguments.prompt_words)
        said.append([{"role": "system", "content": text}, {"role": "user", "content": "Read the next file."}])
    firsts: list[float] = []
    for turn in range(arguments.turns):
        times = []
        for messages in said:
            first_s, message, usage = ask(url, messages)
            times.append(first_s)
            num_found = usage["prompt_tokens_details"]["cached_tokens"]
            print(f"turn {turn + 1}: {usage['prompt_tokens']} tokens, {num_found} found, called after {first_s:.3f} s")
            (call,) = message["tool_calls"]
            messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": " ".join(WORDS)}]
        firsts.append(statistics.median(times))
    for turn, first_s in enumerate(firsts[1:], start=2):
        print(f"turn {turn} / turn 1: {first_s / firsts[0]:.3f} ({first_s:.3f} s, {firsts[0]:.3f} s)")


if __name__ == "__main__":
    main()
