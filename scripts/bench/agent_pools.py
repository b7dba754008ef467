"""Tokens a step and time of an agent's turns, with lookups in an owner's pools and with private ones.

    python -m scripts.bench.agent_pools MODEL [--conversations 4] [--turns 12] [--tool-call-parser hermes]

An agent has one task after another, each a conversation of its own about another file, with the same system prompt, the
same six tools, and twelve turns. Which tool a turn calls is fixed, because small models repeat their first call; its
arguments are the model's, greedily. A server is started with `--ngram-pool private`, and another with `owner`. Both are
asked the same, and their answers must be equal. What counts are the conversations after the first. Then come prompts of
which none is like another, without tools: what pools cost where they find nothing.
"""

import argparse
import json
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

NAMES = ["parser", "reader", "cache", "router", "loader", "matrix", "ledger", "planner", "session", "scheduler"]
VERBS = ["rename", "split", "document", "simplify", "test", "speed up"]
SYSTEM = (
    "You are a coding agent. You work in a repository with the tools that you have. Look at a file before you change "
    "it. Change as little as you can. Run the tests after each change. When they pass, go on with the next step."
)


def function(name: str, description: str, **arguments: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": value, "maxLength": 80} for key, value in arguments.items()}
    schema = {"type": "object", "properties": properties, "required": list(arguments), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    function("read_file", "Read a file of the repository.", path="the file, from the root of the repository"),
    function("search", "Search the repository.", pattern="a regular expression", path="the directory"),
    function("edit_file", "Replace a text of a file.", path="the file", old="the text", new="the text in its place"),
    function("run_command", "Run a command in a shell.", command="the command", directory="where it runs"),
    function("run_tests", "Run tests.", selection="the tests to run", reason="why they are run"),
    function("commit", "Commit all changes.", message="what was changed, and why"),
]
QUESTIONS = [
    "Why is the sky blue?", "Write a poem about a harbour.", "What does a notary do?", "List five uses of copper.",
    "Explain compound interest.", "Who was Ada Lovelace?", "How do bees find flowers?", "Describe a thunderstorm.",
    "What is a fugue in music?", "How is glass made?", "Give advice for a first marathon.", "What are enzymes?",
]  # fmt: skip


@dataclass
class Cost:
    """Tokens, steps and seconds of answers."""

    tokens: int = 0
    steps: float = 0.0
    seconds: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps


def ask(url: str, **body: Any) -> tuple[dict[str, Any], Cost]:
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    start = time.perf_counter()
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)
    tokens, speculation = answer["usage"]["completion_tokens"], answer["metrics"]["speculative_decoding"]
    cost = Cost(tokens, tokens / speculation["tokens_per_step"], time.perf_counter() - start)
    return answer["choices"][0]["message"], cost


def add(costs: Cost, cost: Cost) -> None:
    costs.tokens, costs.steps, costs.seconds = (
        costs.tokens + cost.tokens, costs.steps + cost.steps, costs.seconds + cost.seconds,
    )  # fmt: skip


def given_by(call: dict[str, Any], name: str, rng: random.Random) -> str:
    """Result of a call: lines of a file, or of a command's output."""
    if call["name"].startswith("run_"):
        return f"{rng.randint(3, 40)} passed in {rng.random():.2f}s"
    if call["name"] in ("edit_file", "commit"):
        return "done"
    words = [f"{rng.choice(NAMES)}_{rng.choice(['size', 'name', 'limit', 'path'])}" for _ in range(8)]
    return "\n".join(f"def {word}({name}):\n    return {name}.{word}" for word in words)


def converse(url: str, number: int, turns: int) -> tuple[list[Any], Cost]:
    """A conversation about one file: its calls, and what they took."""
    rng, name, costs, calls = random.Random(number), NAMES[number % len(NAMES)], Cost(), list[Any]()
    task = f"{rng.choice(VERBS)} the functions of src/{name}.py, one by one."
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
    for turn in range(turns):
        chosen = {"type": "function", "function": {"name": TOOLS[turn % len(TOOLS)]["function"]["name"]}}
        body = {"messages": messages, "tools": TOOLS, "tool_choice": chosen, "parallel_tool_calls": False}
        message, cost = ask(url, **body, temperature=0, max_tokens=300)
        add(costs, cost)
        (call,) = message["tool_calls"]
        calls.append(call["function"])
        gave = given_by(call["function"], name, rng)
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": gave}]
    return calls, costs


def measure(url: str, conversations: int, turns: int, questions: list[str]) -> tuple[list[Any], dict[str, Cost]]:
    """All answers, and the costs of the later conversations and of the questions."""
    said, agent, unlike = list[Any](), Cost(), Cost()
    for number in range(conversations):
        calls, cost = converse(url, number, turns)
        said.append(calls)
        if number:
            add(agent, cost)
    for number, question in enumerate(questions):
        message, cost = ask(
            url, messages=[{"role": "user", "content": question}], seed=number, max_tokens=64, temperature=1
        )
        said.append(message["content"])
        add(unlike, cost)
    return said, {"agent": agent} | ({"nothing repeated": unlike} if questions else {})


@contextmanager
def server(arguments: list[str]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "specdec_cli", "serve", *arguments, "--port", str(port)]
    with subprocess.Popen(command) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            while True:
                try:
                    urllib.request.urlopen(f"{url}/health")
                    break
                except OSError:
                    assert process.poll() is None, "the server has ended"
                    time.sleep(0.5)
            yield url
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--questions", type=int, default=len(QUESTIONS))
    parser.add_argument("--pools", nargs="+", default=["private", "owner"])
    options, flags = parser.parse_known_args()
    flags = ["--model-dir", options.model, "--spec-decode-algo", "AUTO", "--max-seq-len", "8192", *flags]
    found: dict[str, tuple[list[Any], dict[str, Cost]]] = {}
    for pool in options.pools:
        with server([*flags, "--ngram-pool", pool]) as url:
            found[pool] = measure(url, options.conversations, options.turns, QUESTIONS[: options.questions])
        for name, cost in found[pool][1].items():
            print(
                f"{pool}, {name}: {cost.tokens} tokens, {cost.tokens_per_step:.2f} a step, {cost.seconds:.1f} s",
                flush=True,
            )
    first, *others = options.pools
    for pool in others:
        assert found[pool][0] == found[first][0], "the answers differ"
        for name, cost in found[pool][1].items():
            base = found[first][1][name]
            print(
                f"{pool} / {first}, {name}: tokens a step {cost.tokens_per_step / base.tokens_per_step:.3f}, "
                f"speed {base.seconds / cost.seconds:.3f}"
            )


if __name__ == "__main__":
    main()
