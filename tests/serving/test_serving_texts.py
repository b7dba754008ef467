"""Places of tokens in a text, their bytes, and which of them a stop word cut off: whole and streamed alike."""

from pathlib import Path
from typing import Any

import pytest
from byte_tokenizers import backtracking, byte_fallback
from serving_models import PROMPT, TEMPLATE, MakeServed, Served

from runtime.checkpoint.tokenizer import Tokenizer

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def in_bytes_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose tokens are mostly single bytes, with Llama 2's space in front."""
    directory = tmp_path_factory.mktemp("bytes") / "tokenizer"
    byte_fallback().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def in_bytes(make_served: MakeServed, in_bytes_dir: Path) -> Served:
    return make_served(None, tokenizer_dir=in_bytes_dir)


def bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    name = str(tokenizer.convert_ids_to_tokens(token) or "")
    if name in ("<pad>", "<s>", "</s>"):
        return b""
    return bytes([int(name[1:-1], 16)]) if name.startswith("<0x") else name.replace("▁", " ").encode()


def streamed(served: Served, **body: Any) -> tuple[str, dict[str, list[Any]]]:
    choices = [chunk["choices"][0] for chunk in served.stream(**body)]
    told = [choice["logprobs"] for choice in choices]
    return "".join(choice["text"] for choice in choices), {
        name: [value for one in told for value in one[name]] for name in told[0]
    }


@pytest.mark.parametrize("text", ["the dog a", "a🙂é\n€b", "é"])
def test_offsets_are_where_the_text_of_a_token_begins(in_bytes: Served, text: str) -> None:
    """Offsets are in the text that is answered, prompt and output; a token within a character is where that is."""
    body = GREEDY | {"prompt": text, "logprobs": 1, "echo": True}
    choice = in_bytes.complete(**body)["choices"][0]
    tokenizer, tokens = in_bytes.llm.tokenizer, in_bytes.llm.encode(text)[0]
    beginnings = [b"".join(bytes_of(tokenizer, token) for token in tokens[:i]) for i in range(len(tokens) + 1)]
    expected = [len(data.removeprefix(b" ").decode("utf-8", "ignore")) for data in beginnings]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[: len(tokens) + 1] == expected
    assert choice["text"].startswith(text) and expected[-1] == len(text)
    assert offsets == sorted(offsets) and offsets[-1] <= len(choice["text"])
    assert streamed(in_bytes, **body) == (choice["text"], choice["logprobs"])


def test_names_of_byte_tokens_are_their_bytes(in_bytes: Served) -> None:
    """Completions have no `bytes`: two tokens that are parts of characters have two names, in OpenAI's form."""
    found = in_bytes.complete(**GREEDY | {"prompt": "é", "logprobs": 5, "echo": True})["choices"][0]["logprobs"]
    tokens = in_bytes.llm.encode("é")[0]
    name = [bytes_of(in_bytes.llm.tokenizer, token) for token in tokens].index(b"\xc3")
    assert found["tokens"][name : name + 2] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert any(sum(name.startswith("bytes:") for name in top) > 1 for top in found["top_logprobs"][1:])


def test_of_what_a_stop_word_cut_off_nothing_is_told(served: Served) -> None:
    body = GREEDY | {"prompt": PROMPT, "logprobs": 2}
    full = served.complete(**body)["choices"][0]
    for start in (5, 12, 13, 14, 15):
        word = full["text"][start : start + 4]
        cut = full["text"].index(word)
        found = served.complete(**body, stop=[word, "never there"])
        choice = found["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (full["text"][:cut], "stop")
        offsets = full["logprobs"]["text_offset"]
        assert found["usage"]["completion_tokens"] == sum(offset < cut + len(word) for offset in offsets)
        num_kept = sum(offset < cut for offset in offsets)
        assert choice["logprobs"] == {name: values[:num_kept] for name, values in full["logprobs"].items()}
        assert streamed(served, **body, stop=word) == (choice["text"], choice["logprobs"])


def test_a_text_on_which_the_tokenizer_panics_is_refused_and_the_next_one_answered(
    make_served: MakeServed, tmp_path: Path
) -> None:
    backtracking().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    served = make_served(None, tokenizer_dir=tmp_path / "tokenizer")
    text = "x" * 200
    for path, body in {
        "/v1/completions": {"prompt": text},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/tokenize": {"prompt": text},
    }.items():
        refused = served.post(path, **body)
        assert refused.status_code == 400 and "retry-limit-in-match" in refused.json()["error"]["message"]
    assert served.complete(prompt="the dog", max_tokens=2)["choices"]
