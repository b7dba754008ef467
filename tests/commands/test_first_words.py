"""Lines that users of vLLM, llama.cpp and Ollama type first: each works, or is answered with the command that does.

Each row is a line of a shell, or a few of Python. The routes of other servers are in `tests/serving`.
"""

import asyncio
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Specdec

from specdec_cli import LLM, AsyncLLM, SamplingParams

WORKS = ""
RUN = ["--compiler", "none", "--json"]
LINES: dict[str, tuple[list[str], str]] = {
    # a line, with MODEL for a model's directory, and what is said where it does not simply work
    "vllm serve MODEL --port PORT": (["serve", "MODEL", "--port", "PORT"], "PORT"),
    'ollama run MODEL "…"': (["run", "MODEL", "One day", "-n", "4"], WORKS),
    "llama-cli -m -p -n -c": (["run", "-m", "MODEL", "-p", "One day", "-n", "4", "-c", "64"], WORKS),
    "llama-cli -hf": (["run", "-hf", "MODEL", "-p", "One day", "-n", "4"], WORKS),
    "--max-model-len, --max-num-seqs, --max-tokens": (
        ["run", "MODEL", "One day", "--max-model-len", "64", "--max-num-seqs", "2", "--max-tokens", "4"],
        WORKS,
    ),
    "--quantization": (["run", "MODEL", "One day", "--quantization", "int8", "-n", "4"], WORKS),
    "--kv-cache-dtype": (["run", "MODEL", "One day", "--kv-cache-dtype", "int8", "-n", "4"], WORKS),
    "--gpu-memory-utilization": (
        ["run", "MODEL", "One day", "--gpu-memory-utilization", "0.9"],
        "`--kv-cache-free-gpu-memory-fraction 0.9`",
    ),
    "--tensor-parallel-size": (
        ["run", "MODEL", "One day", "--tensor-parallel-size", "2"],
        "`specdec convert MODEL --tp-size 2`",
    ),
    "--enable-prefix-caching": (["run", "MODEL", "One day", "--enable-prefix-caching", "-n", "4"], WORKS),
    "--enable-auto-tool-choice": (["run", "MODEL", "One day", "--enable-auto-tool-choice", "-n", "4"], WORKS),
    "--trust-remote-code": (["run", "MODEL", "One day", "--trust-remote-code", "-n", "4"], WORKS),
    "--n-gpu-layers": (["run", "MODEL", "One day", "--n-gpu-layers", "99", "-n", "4"], WORKS),
    "--speculative-config": (
        [
            "run",
            "MODEL",
            "One day",
            "--speculative-config",
            '{"method": "ngram", "num_speculative_tokens": 5}',
            "-n",
            "4",
        ],
        WORKS,
    ),
    "ollama list": (["list"], WORKS),
    "ollama ps": (["ps"], "`specdec list`"),
    "ollama pull": (["pull"], "specdec"),
}


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        yield bound.getsockname()[1]


@pytest.mark.parametrize("row", LINES)
def test_a_first_line_works_or_is_answered(
    row: str, specdec: Specdec, llama_dir: Path, taken_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`serve` is tried on a port that is taken, so that it ends when all its flags have been read."""
    monkeypatch.chdir(tmp_path)
    Path("MODEL").symlink_to(llama_dir)
    line, answer = LINES[row]
    arguments = [str(taken_port) if one == "PORT" else one for one in line]
    result = specdec(*arguments, *(RUN if line[0] == "run" else ()))
    assert "Traceback" not in result.stderr
    if answer == WORKS:
        assert result.exit_code == 0, result.stderr
        assert line[0] != "run" or len(result.document["requests"][0]["output_ids"]) <= 4
    else:
        assert result.exit_code in (1, 2) and answer.replace("PORT", str(taken_port)) in result.stderr, result.stderr
        assert "hint: " in result.stderr


def generates(llm: LLM) -> None:
    params = SamplingParams(temperature=0.7, top_k=-1, n=2, seed=3, stop=["zzz"], logprobs=1, max_tokens=4)
    outputs = llm.generate(["One day", "A dog"], sampling_params=params, use_tqdm=False)
    assert len(outputs) == 2 and [len(one.outputs) for one in outputs] == [2, 2]
    assert isinstance(outputs[0].outputs[1].text, str) and outputs[0].request_id is not None


def takes_fields_of_vllm(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=4, min_tokens=2, skip_special_tokens=False, include_stop_str_in_output=True
    )
    (by_text,) = llm.generate({"prompt": "One day"}, params)
    ids = llm.get_tokenizer().encode("One day")
    (by_ids,) = llm.generate({"prompt_token_ids": ids}, params)
    assert by_text.outputs[0].token_ids == by_ids.outputs[0].token_ids
    (held,) = llm.generate("One day", SamplingParams(max_tokens=8, choice=["a", "b"]))
    assert held.outputs[0].text in ("a", "b")


def streams(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)

    async def texts() -> list[str]:
        async with AsyncLLM(llm.bundle) as engine:
            return [one.outputs[0].text async for one in engine.generate("One day", params, request_id="a")]

    found = asyncio.run(texts())
    assert found and found[-1] == llm.generate("One day", params)[0].outputs[0].text


PYTHON: dict[str, Callable[[Any], None]] = {
    "SamplingParams, generate, outputs[0].text": generates,
    "dict prompts, get_tokenizer, min_tokens, skip_special_tokens": takes_fields_of_vllm,
    "AsyncLLM": streams,
}


@pytest.mark.parametrize("row", PYTHON)
def test_first_lines_of_python_work(row: str, llama_dir: Path) -> None:
    with LLM(model=str(llama_dir), compiler="none", max_model_len=64, max_num_seqs=2, seed=0) as llm:
        PYTHON[row](llm)
