"""Lines that users of vLLM, llama.cpp and Ollama type first: each works, or is answered with the command that does.

Each row is a line of a shell, or a few of Python. The routes of other servers are in `tests/serving`.
"""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Specdec

from specdec_cli import LLM, SamplingParams

WORKS = ""
RUN = ["--compiler", "none", "--json"]
LINES: dict[str, tuple[list[str], str]] = {
    # a line, with MODEL for a model's directory, and what is said where it does not simply work
    "vllm serve MODEL --port PORT": (["serve", "MODEL", "--port", "PORT"], "PORT"),
    'ollama run MODEL "…"': (["run", "MODEL", "One day", "-n", "4"], WORKS),
    "llama-cli -hf -p -n -c": (["run", "-hf", "MODEL", "-p", "One day", "-n", "4", "-c", "64"], WORKS),
    "vllm's limits and formats": (
        [
            "run", "MODEL", "One day", "--max-model-len", "64", "--max-num-seqs", "2", "--max-tokens", "4",
            "--quantization", "int8", "--kv-cache-dtype", "int8",
        ],
        WORKS,
    ),
    "what is so anyway": (
        [
            "run", "MODEL", "One day", "-n", "4", "--enable-prefix-caching", "--enable-auto-tool-choice",
            "--trust-remote-code", "--n-gpu-layers", "99",
        ],
        WORKS,
    ),
    "ollama list": (["list"], WORKS),
    "ollama pull": (["pull"], "specdec"),
}  # fmt: skip


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


def test_first_lines_of_python_work(llama_dir: Path) -> None:
    with LLM(model=str(llama_dir), compiler="none", max_model_len=64, max_num_seqs=2, seed=0) as llm:
        params = SamplingParams(temperature=0.7, top_k=-1, n=2, seed=3, stop=["zzz"], logprobs=1, max_tokens=4)
        outputs = llm.generate(["One day", "A dog"], sampling_params=params, use_tqdm=False)
    assert [len(one.outputs) for one in outputs] == [2, 2]
    assert isinstance(outputs[0].outputs[1].text, str) and outputs[0].request_id is not None
