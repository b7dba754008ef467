"""The agents themselves, where they are installed: `launch` runs each against a model that answers anything.

`npm install -g @anthropic-ai/claude-code @openai/codex @continuedev/cli opencode-ai` and `pip install aider-chat` bring
them. Their prompts have up to 80,000 tokens of the tiny tokenizer.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import pytest
from forked import Forks
from serving_models import TOOL_TEMPLATE
from waiting import HANG_S, wait_until

from commands.launch.tools import TOOLS

ARGUMENTS = {
    "claude": ("-p", "Say hello", "--max-turns", "1"),
    "codex": ("exec", "--skip-git-repo-check", "Say hello"),
    "aider": ("--no-git", "--yes-always", "--no-stream", "--no-check-update", "--analytics-disable", "--message", "Hi"),
    "continue": ("-p", "Say hello"),
    "opencode": ("run", "Say hello"),
}
"""One question each, without a terminal."""
ROUTES = {"claude": "/v1/messages", "codex": "/v1/responses"}


class Server(NamedTuple):
    port: int
    log: list[str]


@pytest.fixture(scope="module")
def server(forks: Forks, llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with room for every prompt, whose model ends soon: a quarter of its tokens are ends."""
    model_dir = tmp_path_factory.mktemp("agents") / "tiny"
    shutil.copytree(llama_dir, model_dir)
    config = json.loads((model_dir / "config.json").read_text())
    ends = list(range(2, config["vocab_size"], 4))
    (model_dir / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 131_072}))
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (model_dir / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    limits = ["--max-seq-len", "131072", "--max-tokens-in-paged-kv-cache", "262144", "--compiler", "none"]
    process = forks.start("serve", "--model-dir", model_dir, *limits, "--any-model", "--log-requests", "--port", 0)
    log: list[str] = []
    reader = Thread(target=lambda: [log.append(line) for line in process.stderr], daemon=True)
    try:
        for line in process.stderr:
            log.append(line)
            if found := re.search(r"http://127\.0\.0\.1:(\d+) \(only", line):
                reader.start()
                yield Server(int(found[1]), log)
                break
        else:
            raise AssertionError("".join(log))
    finally:
        process.terminate()
        process.wait()
        if reader.is_alive():
            reader.join(HANG_S)
        process.close()


INSTALLED = [
    pytest.param(name, marks=pytest.mark.skipif(shutil.which(tool.executable) is None, reason=f"install {tool.title}"))
    for name, tool in TOOLS.items()
]


@pytest.mark.parametrize("name", INSTALLED)
def test_the_real_agent_gets_an_answer(forks: Forks, server: Server, tmp_path: Path, name: str) -> None:
    (tmp_path / "work").mkdir()
    environment = {name: os.environ[name] for name in ("PATH", "TERM", "LANG") if name in os.environ}
    done = forks.run(
        "launch", name, "--port", server.port, "--", *ARGUMENTS[name],
        environment=environment | {"HOME": str(tmp_path), "DO_NOT_TRACK": "1"},
        directory=tmp_path / "work",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    asked = f"POST {ROUTES.get(name, '/v1/chat/completions')} 200 in "
    wait_until(lambda: any(asked in line and " output" in line for line in server.log))
