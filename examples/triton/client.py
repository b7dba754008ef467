"""Asks `specdec_bls` by Triton's generate extension, with drafts and without, and compares with the engine by itself.

    python examples/triton/client.py --engine-dir engines/target

Exit code 1 if an output is not the engine's own. Needs nothing but specdec.
"""

import argparse
import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from specdec_cli import LLM, SamplingParams

PROMPTS = [
    "def area(w, h):",
    'def greet(name):\n    """Return a greeting for the person of that name."""\n\n'
    'def farewell(name):\n    """Return words of goodbye for the person of that name.""" TL;DR:',
    'class Counter:\n    """Counts how often each word of a text occurs."""\n\n    """Counts words.""" TL;DR:',
]
SAMPLINGS = [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 50, "random_seed": 7}]


def ask(url: str, prompt: str, num_draft_tokens: int, sampling: dict) -> dict:
    body = {"text_input": prompt, "max_tokens": 64, "num_draft_tokens": num_draft_tokens, **sampling}
    request = urllib.request.Request(
        f"{url}/v2/models/specdec_bls/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def compare(llm: LLM, url: str, num_draft_tokens: int, sampling: dict) -> int:
    """Ask all prompts at once; returns how many outputs are not the engine's own."""
    params = {"seed" if name == "random_seed" else name: value for name, value in sampling.items()}
    expected = [llm.generate(prompt, SamplingParams(max_tokens=64, **params))[0] for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as together:
        answers = list(together.map(lambda prompt: ask(url, prompt, num_draft_tokens, sampling), PROMPTS))
    num_same = sum(a["output_ids"] == e.token_ids for a, e in zip(answers, expected, strict=True))
    steps, accepted, drafted = (
        sum(answer[name] for answer in answers)
        for name in ("num_steps", "total_accepted_draft_tokens", "total_draft_tokens")
    )
    same = f"{num_same} of {len(PROMPTS)} outputs are the engine's own"
    print(f"{sampling}, drafts of {num_draft_tokens}: {same}; {steps} steps, {accepted} of {drafted} drafted accepted")
    return len(PROMPTS) - num_same


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--engine-dir", required=True)
    given = parser.parse_args()
    with LLM(given.engine_dir) as llm:
        num_wrong = sum(compare(llm, given.url, n, sampling) for sampling in SAMPLINGS for n in (0, 4))
    sys.exit(1 if num_wrong else 0)


if __name__ == "__main__":
    main()
