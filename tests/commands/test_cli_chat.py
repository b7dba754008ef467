"""`chat`, and conversations in `run`: the model gets what transformers' template makes of the messages, and no more."""

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Specdec, edit_json, ids_of
from sentences import Said
from shared import record_anew
from tiny import hf_greedy
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from runtime.engine.engine import Engine
from specdec_cli import LLM, KVCacheConfig, SamplingParams

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'cat' %}{{ raise_exception('what role?') }}{% endif %}"
    "<s>{{ m['role'] }}: {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}<s>dog: {% endif %}"
)
NUM_TOKENS = 12
TypeLines = Callable[..., None]
FLAGS = ["--ngram-config", "4,2", "--max-output-len", NUM_TOKENS, "--end-id", 299]


@pytest.fixture(scope="module")
def engine_dir(llama_engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama's, with a tokenizer that has a template."""
    directory = tmp_path_factory.mktemp("chat") / "engine"
    shutil.copytree(llama_engine_dir, directory)
    edit_json(directory / "tokenizer_config.json", chat_template=TEMPLATE)
    record_anew(directory)
    return directory


@pytest.fixture
def own(engine_dir: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(engine_dir)


@pytest.fixture
def type_lines(monkeypatch: pytest.MonkeyPatch) -> TypeLines:
    """Have these lines on standard input."""
    return lambda *lines: monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def answer(llama: PreTrainedModel, own: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> str:
    """Hugging Face's."""
    ids = own.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return own.decode(
        hf_greedy(llama, ids, NUM_TOKENS, 299), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def test_every_turn_is_hugging_faces(
    specdec: Specdec, engine_dir: Path, llama: PreTrainedModel, own: PreTrainedTokenizerFast, type_lines: TypeLines
) -> None:
    said = ["The dog", "had a ball"]
    type_lines(*said, "/stats", "/reset", said[1])
    result = specdec("chat", "--engine-dir", engine_dir, "--system", "the park", *FLAGS)
    assert result.exit_code == 0
    system = {"role": "system", "content": "the park"}
    messages, expected = [system], []
    for line in said:
        messages.append({"role": "user", "content": line})
        expected.append(answer(llama, own, messages))
        messages.append({"role": "assistant", "content": expected[-1]})
    alone = answer(llama, own, [system, {"role": "user", "content": said[1]}])
    assert alone != expected[1]
    text = result.stdout
    for part in (*expected, "prompt tokens found in the K/V cache", alone):
        assert part in text, (expected, result.stdout)
        text = text[text.index(part) + len(part) :]


def test_an_answer_of_one_token_has_no_time_of_further_tokens(
    specdec: Specdec, engine_dir: Path, type_lines: TypeLines
) -> None:
    type_lines("The dog", "/stats")
    shown = specdec("chat", engine_dir, *FLAGS, "--max-output-len", 1).stdout
    assert re.search(r"1 tokens? in 1 steps?, .*; first token after [\d.,]+ ms; ", shown), shown


def test_input_in_another_encoding_is_named(
    specdec: Specdec, engine_dir: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """Also in the locale `C`, where Python would take the bytes as halves of characters."""
    lines = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8", errors="surrogateescape")
    monkeypatch.setattr("sys.stdin", lines)
    result = specdec("chat", engine_dir, *FLAGS)
    assert result.exit_code == 1
    said(result, "standard input is not utf-8", "0xe9")


def test_a_conversation_is_continued_with_its_keys_and_values(
    specdec: Specdec, engine_dir: Path, type_lines: TypeLines, tmp_path: Path, said: Said
) -> None:
    lines = ("The dog", "had a ball")
    type_lines(*lines, "/stats")
    whole = specdec("chat", engine_dir, *FLAGS).stdout
    shown = ""
    for i, line in enumerate(lines):
        type_lines(line, "/stats")
        kept = ["--continue", "walk", "--kv-cache-dir", tmp_path / "kv", "--kv-cache-disk-size", "100M"]
        result = specdec("chat", engine_dir, *FLAGS, *kept)
        assert result.exit_code == 0, result.stderr
        text, _, stats = result.stdout.partition("\n")[2].partition(f"{NUM_TOKENS} tokens in ")
        shown += text
        found = int(re.findall(r"(\d+) of \d+ prompt tokens found", stats)[0])
        assert (found > 0) == (i > 0)
    said(result.stderr)
    assert whole.partition("\n")[2].startswith(shown)
    (path,) = (tmp_path / "kv" / "chats").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    *messages, last = json.loads(path.read_text())["messages"]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, stop_token_ids=[299], receipt=True)
    with LLM(engine_dir, kv_cache=KVCacheConfig(disk_dir=tmp_path / "kv")) as llm:
        (output,) = llm.chat(messages, params)[0].outputs
        assert output.text == last["content"] and llm.engine.prompt_tokens.num_on_disk > 0
    with LLM(engine_dir) as llm:  # which finds nothing
        assert [one.verdict for one in llm.check_receipts([output.receipt or {}], "tokens")] == ["exact"]
    listed = specdec("cache", "list", "--kv-cache-dir", tmp_path / "kv", "--json").document["kv"]
    assert listed["num_bytes"] > 0 and listed["max_bytes"] == 10**8 and len(listed["engines"]) == 1
    assert specdec("cache", "prune", "--kv-cache-dir", tmp_path / "kv", "--max-size", 0).exit_code == 0
    assert specdec("cache", "list", "--kv-cache-dir", tmp_path / "kv", "--json").document["kv"]["engines"] == []
    for text in ('{"messages": "none"}', '{"messages": ["one"]}', '{"messages": [', "[]", "\0"):
        path.write_text(text)
        result = specdec("chat", engine_dir, *kept)
        assert result.exit_code == 1 and "begin another: `--continue NAME`" in result.stderr
    said(result)
    for flags in (["--continue", "../up"], ["--kv-cache-disk-size", "2G"], ["--kv-cache-disk-size", "much"]):
        result = specdec("chat", engine_dir, *flags)
        assert result.exit_code in (1, 2)
        said(result)
    (tmp_path / "kv" / "kv.sqlite").write_text("hello")
    for command in (["list"], ["prune", "--max-size", 0], ["prune", "--max-size", 0, "--dry-run"]):
        assert specdec("cache", *command, "--kv-cache-dir", tmp_path / "kv").exit_code == 1
    assert (tmp_path / "kv" / "kv.sqlite").read_text() == "hello"
    type_lines("The dog")
    assert specdec("chat", engine_dir, *FLAGS, "--continue").exit_code == 0  # in the cache, by the name `last`


def test_ctrl_c_ends_the_answer_and_not_the_chat(
    specdec: Specdec, engine_dir: Path, type_lines: TypeLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, num_steps = Engine.step, 0

    def interrupted(self: Engine, *arguments: object) -> object:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 4:
            raise KeyboardInterrupt
        return step(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "step", interrupted)
    type_lines("The little dog", "One day", "/stats")
    result = specdec("chat", "--engine-dir", engine_dir, "--max-output-len", NUM_TOKENS, "--end-id", 299)
    assert result.exit_code == 0, result.stderr
    assert " …\n" in result.stdout
    assert f"{NUM_TOKENS} tokens in {NUM_TOKENS} steps" in result.stdout  # of the second answer


def test_conversation_that_has_no_room_is_said_and_can_be_begun_anew(
    specdec: Specdec, engine_dir: Path, type_lines: TypeLines, said: Said
) -> None:
    type_lines("The dog " * 80, "The dog", "/stats", "The dog " * 60)
    result = specdec("chat", "--engine-dir", engine_dir, *FLAGS)
    assert result.exit_code == 1  # a script is to know that lines have no answer
    assert result.stderr.count("error: ") == 2
    said(result, 96, "/reset")
    assert f"{NUM_TOKENS} tokens in" in result.stdout


def test_an_answer_goes_to_its_own_end_or_says_where_it_was_cut(
    specdec: Specdec, engine_dir: Path, type_lines: TypeLines, llama: PreTrainedModel, own: PreTrainedTokenizerFast,
    said: Said,
) -> None:  # fmt: skip
    ids = own.apply_chat_template(
        [{"role": "user", "content": "The dog"}], add_generation_prompt=True, return_dict=False
    )
    room = 160 - len(ids)
    whole = hf_greedy(llama, ids, room, 299)
    type_lines("The dog", "/stats")
    to_the_end = specdec("chat", engine_dir, "--end-id", whole[40])
    assert to_the_end.stderr == "" and f"{whole.index(whole[40]) + 1} tokens in" in to_the_end.stdout
    for flags, cut in (["--max-output-len", 30], "`--max-output-len`"), ([], "`--max-seq-len`"):
        type_lines("The dog", "/stats", "/foo")
        result = specdec("chat", engine_dir, "--end-id", 299, *flags)
        assert f"{flags[1] if flags else room} tokens in" in result.stdout
        assert cut in result.stderr and cut in result.stdout.partition(" tokens in ")[2]
        assert "unknown command: /foo" in result.stdout
        said(result.stderr)


def test_run_takes_texts_and_messages_as_conversations(
    specdec: Specdec, engine_dir: Path, own: PreTrainedTokenizerFast, llama: PreTrainedModel, tmp_path: Path
) -> None:
    messages = [{"role": "system", "content": "the park"}, {"role": "user", "content": "The dog"}]
    (tmp_path / "in.jsonl").write_text(
        json.dumps({"messages": messages}) + "\n" + json.dumps({"prompt": "One day"}) + "\n"
    )
    file = ["--engine-dir", engine_dir, "--input-file", tmp_path / "in.jsonl", *FLAGS, "--json"]
    for flags, second in (([], own("One day")["input_ids"]), (["--apply-chat-template"], None)):
        document = specdec("run", *file, *flags).document
        second = second or own.apply_chat_template(
            [{"role": "user", "content": "One day"}], add_generation_prompt=True, return_dict=False
        )
        prompts = [own.apply_chat_template(messages, add_generation_prompt=True, return_dict=False), second]
        assert [request["prompt_ids"] for request in document["requests"]] == prompts
        assert ids_of(document) == [hf_greedy(llama, prompt, NUM_TOKENS, 299) for prompt in prompts]


def test_the_last_message_is_continued(
    specdec: Specdec, engine_dir: Path, own: PreTrainedTokenizerFast, llama: PreTrainedModel, tmp_path: Path, said: Said
) -> None:
    messages = [{"role": "user", "content": "The dog"}, {"role": "assistant", "content": "had a red"}]
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    flags = ["--engine-dir", engine_dir, "--continue-final-message", *FLAGS]
    document = specdec("run", *flags, "--input-file", tmp_path / "in.jsonl", "--json").document
    prompt = own.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    assert own.decode(prompt).endswith("had a red")
    assert document["requests"][0]["prompt_ids"] == prompt
    assert ids_of(document) == [hf_greedy(llama, prompt, NUM_TOKENS, 299)]
    result = specdec("run", *flags, "--input-text", "The dog")
    assert result.exit_code == 2
    said(result, "`--continue-final-message`")


def test_template_that_fails_is_one_error_of_every_command(
    specdec: Specdec, engine_dir: Path, tmp_path: Path, type_lines: TypeLines
) -> None:
    """`batch` has it as the result of the request."""
    (tmp_path / "own").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(engine_dir / name, tmp_path / "own")
    (tmp_path / "own" / "chat_template.jinja").write_text("{{ 1 / 0 }}")
    template = ["--engine-dir", engine_dir, "--tokenizer-dir", tmp_path / "own"]
    lines = tmp_path / "in.jsonl"
    lines.write_text(json.dumps({"messages": [{"role": "user", "content": "The dog"}]}) + "\n")
    type_lines("The dog")
    wrong = "the chat template fails on the conversation: ZeroDivisionError: division by zero"
    for command in (["chat"], ["run", "The dog", "--apply-chat-template"], ["run", "--input-file", lines]):
        result = specdec(*command, *template)
        assert result.exit_code == 1
        assert result.stderr.startswith(f"error: {wrong}\nhint: ") and len(result.stderr.splitlines()) == 2
    assert specdec("batch", "-i", lines, "-o", tmp_path / "out.jsonl", *template).exit_code == 0
    error = json.loads((tmp_path / "out.jsonl").read_text())["response"]
    assert error["status_code"] == 400 and wrong in error["body"]["error"]["message"]


TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% for m in messages %}"
    "<{{ m['role'] }}>{{ m['content'] }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{% endfor %}"
    "{% endfor %}<assistant>"
)
TOOLS_FILE = """
def grow(by: int) -> str:
    \"\"\"Grow the dog.

    Args:
        by: how much
    \"\"\"
    with open(LOG, "a") as file:
        file.write(f"{by};")
    return f"grown by {by}"


def _hidden() -> None: ...
"""


@pytest.fixture
def with_tools(engine_dir: Path, tmp_path: Path) -> Path:
    """The tiny Llama's engine, whose template knows tools."""
    shutil.copytree(engine_dir, tmp_path / "engine")
    edit_json(tmp_path / "engine" / "tokenizer_config.json", chat_template=TOOL_TEMPLATE)
    record_anew(tmp_path / "engine")
    (tmp_path / "mine.py").write_text(f"LOG = {str(tmp_path / 'log')!r}\n{TOOLS_FILE}")
    return tmp_path


def test_functions_of_a_file_are_called_if_the_user_says_so(
    specdec: Specdec, with_tools: Path, type_lines: TypeLines
) -> None:
    """All that the model can write is a call: it is made when allowed, and what it gave is in the next prompt."""
    call = '<tool_call>\n{"name": "grow", "arguments": {"by": 3}}\n</tool_call>'
    type_lines("Go", "y", "n", "/quit")
    flags = ["--tools", with_tools / "mine.py", "--choice", call]
    result = specdec("chat", "--engine-dir", with_tools / "engine", *flags)
    assert result.exit_code == 0, result.stderr
    assert (with_tools / "log").read_text() == "3;"
    assert result.stdout.count("─ grow ─") == 2 and '"by": 3' in result.stdout and "grown by 3" in result.stdout
    assert "did not allow" in result.stdout


HOSTILE_FILE = """
import sys

async def later() -> str:
    \"\"\"Wait.\"\"\"
    return "waited"

def ending() -> str:
    \"\"\"End.\"\"\"
    sys.exit(3)

def halves() -> str:
    \"\"\"Halve.\"\"\"
    return "a\\ud800b"
"""


@pytest.mark.parametrize(("name", "shown"), [("ending", "error: SystemExit: 3"), ("halves", "a?b")])
def test_whatever_a_function_does_the_conversation_goes_on(
    specdec: Specdec, with_tools: Path, type_lines: TypeLines, name: str, shown: str
) -> None:
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
    (with_tools / "mine.py").write_text(HOSTILE_FILE)
    type_lines("Go", "y", "n", "/quit")
    flags = ["--tools", with_tools / "mine.py", "--choice", call]
    result = specdec("chat", "--engine-dir", with_tools / "engine", *flags)
    assert result.exit_code == 0, result.stderr
    assert shown in result.stdout and "did not allow" in result.stdout


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("def f(a):\n    pass", "f"),
        ("1 / 0", "ZeroDivisionError"),
        ("a = 1", "mine.py"),
        ('def f():\n    """Go."""', "tools"),
        (None, "mine.py"),
    ],
    ids=["undescribed", "failing", "empty", "unknown to the template", "missing"],
)
def test_a_file_of_tools_that_cannot_be_used_is_one_error(
    specdec: Specdec, engine_dir: Path, tmp_path: Path, said: Said, text: str | None, value: str
) -> None:
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    result = specdec("chat", "--engine-dir", engine_dir, "--tools", tmp_path / "mine.py")
    assert result.exit_code == 1
    said(result, value)
