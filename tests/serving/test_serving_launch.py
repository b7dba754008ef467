"""Agents in one command: each is told of the server, asks it, and leaves the machine as it was."""

import json
import os
import shutil
import signal
import socket
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked import MAIN, Forks, module
from sentences import Said
from serving_models import TEMPLATE, Listening
from waiting import HANG_S, wait_until

from commands.launch.tools import TOOLS

# Reads its settings as the agent's documentation says, and asks one question with them.
STAND_IN = """#!{python}
import json, os, sys, time, urllib.error, urllib.request
from pathlib import Path

name, home = Path(sys.argv[0]).name, Path.home()
asked, headers = {{"messages": [{{"role": "user", "content": "Hi"}}], "max_tokens": 3}}, {{}}
file = {{"codex": ".codex/config.toml", "cn": ".continue/config.yaml", "opencode": ".config/opencode/opencode.json"}}
text = (home / file[name]).read_text() if name in file else ""
if name == "claude":
    base, model, key = (os.environ["ANTHROPIC_" + one] for one in ("BASE_URL", "MODEL", "AUTH_TOKEN"))
    url = base + "/v1/messages"
elif name == "aider":
    model, key = os.environ["AIDER_MODEL"].removeprefix("openai/"), os.environ["OPENAI_API_KEY"]
    url = os.environ["OPENAI_API_BASE"] + "/chat/completions"
    if len(sys.argv) == 1:
        asked["tools"] = [{{"type": "function", "function": {{"name": "f"}}}}]
elif name == "codex":
    import tomllib
    config = tomllib.loads(text)
    provider = config["model_providers"][config["model_provider"]]
    url, model, key = provider["base_url"] + "/responses", config["model"], ""
    asked = {{"input": "Hi", "max_output_tokens": 3}}
elif name == "cn":
    import yaml
    own = yaml.safe_load(text)["models"][0]
    url, model, key = own["apiBase"] + "/chat/completions", own["model"], own["apiKey"]
else:
    config = json.loads(text)
    provider, model = config["model"].split("/")
    options = config["provider"][provider]["options"]
    assert model in config["provider"][provider]["models"]
    url, key = options["baseURL"] + "/chat/completions", options["apiKey"]
headers = {{"Authorization": "Bearer " + key}} if key else {{}}
data = json.dumps(asked | {{"model": model}}).encode()
with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
    answered = json.load(answer)
record = {{"arguments": sys.argv[1:], "url": url, "text": text, "answered": answered}}
(home / "record.json").write_text(json.dumps(record))
parent = os.getppid()
while "wait" in sys.argv and os.getppid() == parent:
    time.sleep(0.01)
sys.exit(7)
"""
OLD = {
    "codex": 'model = "theirs"  # kept\nsandbox = "on"\n\n[mcp_servers.git]\nmodel = "mine"\n\n[[hooks]]\na = 1\n',
    "continue": "name: mine\nmodels:\n- {name: theirs, provider: other}\nrules: [short]\n",
    "opencode": '{"theme": "dark", "provider": {"other": {"name": "x"}}}',
}
READ: dict[str, Callable[[str], Any]] = {"codex": tomllib.loads, "continue": yaml.safe_load, "opencode": json.loads}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home directory with a stand-in of each agent in its `bin`."""
    (tmp_path / "bin").mkdir()
    for tool in TOOLS.values():
        path = tmp_path / "bin" / tool.executable
        path.write_text(STAND_IN.format(python=sys.executable))
        path.chmod(0o755)
    return tmp_path


def environment(home: Path) -> dict[str, str]:
    agents = ("ANTHROPIC_", "OPENAI_", "CODEX_", "CONTINUE_", "XDG_CONFIG", "CLAUDE", "SPECDEC_API_KEY")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(agents)}
    return kept | {"HOME": str(home), "PATH": f"{home / 'bin'}:/usr/bin:/bin"}


def record(home: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((home / "record.json").read_text())
    return found


def config_path(home: Path, name: str) -> Path | None:
    file = TOOLS[name].file
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XDG_CONFIG_HOME", raising=False)  # as in `environment`
        return None if file is None else home / file.path().relative_to(Path.home())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", TOOLS)
def test_an_agent_asks_the_server_that_runs(
    make_listening_once: Callable[..., Listening], forks: Forks, home: Path, name: str
) -> None:
    """Its arguments and its exit status go through, and its old config file is there again, to the byte."""
    listening = make_listening_once()
    path, old = config_path(home, name), OLD.get(name, "")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(old)
        path.chmod(0o640)
    done = forks.run("launch", name, "--port", listening.port, "--", "--print", "-x", environment=environment(home))
    assert done.returncode == 7, done.stderr
    found = record(home)
    assert found["arguments"] == ["--print", "-x"] and found["url"].startswith(listening.url)
    assert found["answered"]["model"] == "tiny"
    assert f"has {listening.model.name}" in done.stderr and listening.url in done.stderr
    if path is not None:
        config, before = READ[name](found["text"]), READ[name](old)
        assert {key: config[key] for key in before if key not in ("model", "models", "name", "provider")} == {
            key: value for key, value in before.items() if key not in ("model", "models", "name", "provider")
        }
        assert name != "continue" or [one["name"] for one in config["models"]] == ["specdec", "theirs"]
        assert name != "opencode" or config["provider"]["other"] == {"name": "x"}
        assert path.read_text() == old and path.stat().st_mode & 0o777 == 0o640
        assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_a_server_is_begun_with_what_fits_and_ended(forks: Forks, shared: Path, llama_dir: Path, home: Path) -> None:
    """The template knows no tools, and the agent's question has one: that is seen to as well."""
    model_dir = home / "tiny-model"
    shutil.copytree(llama_dir, model_dir)
    (model_dir / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1234}))
    begun = ["launch", "aider", model_dir, "--compiler=none", "--log-requests", "--port", "0"]
    printed = forks.run(*begun, "--print", environment=environment(home))
    for part in ("--max-seq-len 1234 ", "--spec-decode-algo AUTO", "--tool-call-parser hermes", "tiny-model"):
        assert part in printed.stdout
    assert "warning: aider begins with about" in printed.stderr.lower() and "1,234" in printed.stderr
    assert not (home / "record.json").exists()
    python = module(home / "python", shared / "forks")  # a fork serves
    program = f"import sys; sys.executable = {str(python)!r}; {MAIN}"
    done = forks.run(*begun, program=program, environment=environment(home) | {"SPECDEC_API_KEY": "much-secret"})
    assert done.returncode == 7, done.stderr
    found = record(home)
    assert found["answered"]["model"] == "tiny-model"
    assert 1 <= found["answered"]["usage"]["completion_tokens"] <= 3  # sampled without a seed: it may end before
    assert "export OPENAI_API_KEY=$SPECDEC_API_KEY" in done.stderr and "much-secret" not in done.stderr
    assert "the server said meanwhile" in done.stderr and "POST /v1/chat/completions 200" in done.stderr
    port = int(found["url"].split(":")[2].split("/")[0])
    with socket.socket() as connection:
        assert connection.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_what_was_changed_is_put_back_after_any_end(
    make_listening_once: Callable[..., Listening], forks: Forks, home: Path, number: signal.Signals
) -> None:
    """The command does it, or `--restore` where nothing could be done; the file was not there before."""
    port, path = make_listening_once().port, config_path(home, "codex")
    assert path is not None
    started = forks.start("launch", "codex", "--port", str(port), "--", "wait", environment=environment(home))
    try:
        wait_until(lambda: (home / "record.json").exists())
        assert path.exists()
        started.send_signal(number)
        started.wait(HANG_S)
    finally:
        started.kill()
        started.close()
    assert path.exists() == (number == signal.SIGKILL)
    restored = forks.run("launch", "codex", "--restore", environment=environment(home))
    assert restored.returncode == 0 and ("put back" in restored.stderr) == (number == signal.SIGKILL)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("wrong", ["name", "absent", "blocked", "broken", "model", "printed"])
def test_what_is_wrong_is_told_in_a_sentence(
    make_listening_once: Callable[..., Listening], forks: Forks, home: Path, wrong: str, said: Said, llama_dir: Path
) -> None:
    """Before anything is printed to type: a damaged model, for example, would not be opened by these lines."""
    port = make_listening_once().port
    at_server, arguments, values = ["--port", str(port)], ["codex"], list[str]()
    match wrong:
        case "name":
            arguments, values = ["coder"], ["coder"]
        case "absent":
            (home / "bin" / "codex").unlink()
            arguments, values = ["codex", *at_server], ["codex", "npm install -g @openai/codex"]
        case "blocked":
            (home / ".codex").write_text("a file")
            arguments, values = ["codex", *at_server], [".codex/config.toml"]
        case "broken":
            (home / ".codex").mkdir()
            (home / ".codex" / "config.toml").write_text("model = [")
            arguments, values = ["codex", *at_server], [".codex/config.toml"]
        case "model":
            arguments, values = ["codex", "other-model", *at_server], ["tiny", "other-model"]
        case "printed":
            shutil.copytree(llama_dir, home / "broken")
            (home / "broken" / "chat_template.jinja").write_text(TEMPLATE)
            os.truncate(home / "broken" / "model.safetensors", 1000)
            arguments = ["codex", str(home / "broken"), "--print", "--port", "0"]
    done = forks.run("launch", *arguments, environment=environment(home))
    assert done.returncode == (2 if wrong == "name" else 1) and not done.stdout, done.stderr
    first, second = done.stderr.splitlines()[-2:]
    assert first.startswith("error: ") and second.startswith("hint: ")
    said(first.replace(str(home), "HOME") + "\n" + second, *values)
    assert not (home / "record.json").exists()


def test_an_engine_keeps_its_own_limits(forks: Forks, home: Path, llama_uncompiled_dir: Path) -> None:
    build = json.loads((llama_uncompiled_dir / "config.json").read_text())["build_config"]
    for named in ([llama_uncompiled_dir], ["--engine-dir", llama_uncompiled_dir]):
        printed = forks.run("launch", "codex", *named, "--print", "--port", 0, environment=environment(home)).stdout
        assert f"model_context_window = {build['max_seq_len'] - build['max_draft_len']}\n" in printed
        assert "--spec-decode-algo AUTO --any-model" in printed and "--max-seq-len" not in printed


def test_a_file_of_settings_is_the_servers_too(forks: Forks, home: Path) -> None:
    """Its model, its port and its limits; what it says is not said again by what fits."""
    file = home / "prod.yaml"
    file.write_text("model: demo\nserve:\n  port: 8123\n  max_seq_len: 512\n  served_model_name: mine\n")
    given = ("--config", file, "--print")
    printed = forks.run("launch", "claude", *given, environment=environment(home)).stdout.splitlines()
    assert printed[0].startswith(f"specdec serve --config {file} ") and printed[0].endswith("--port 8123")
    assert "--max-seq-len" not in printed[0] and "--spec-decode-algo AUTO" in printed[0]
    assert "export ANTHROPIC_MODEL=mine" in printed
    others = ("launch", "claude", "demo", *given, "--port", 8124)
    named = forks.run(*others, environment=environment(home)).stdout.splitlines()[0]
    assert named.startswith(f"specdec serve --model-dir demo --config {file} ") and named.endswith("--port 8124")
