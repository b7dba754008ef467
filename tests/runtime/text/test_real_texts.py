"""Texts of published tokenizers are the bytes of their tokens, whole, in pieces, and where a stop word ends them."""

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strength import examples
from transformers.convert_slow_tokenizer import bytes_to_unicode

from runtime.checkpoint.tokenizer import SavedTokenizer
from runtime.measure.text_steps import token_texts
from runtime.text.text import StopWords, TextStream, decode, output_text

REAL_DIR = Path(os.environ.get("SPECDEC_REAL_DIR", "~/.cache/specdec-real")).expanduser()
DEMO_DIR = Path(__file__).parents[3] / "runtime" / "demo" / "target"
NAMES = ("llama2", "llama3_1", "qwen3", "gemma3", "gptoss", "deepseek_v3")
LIKE_OTHERS = ("gemma3", "gptoss", "llama3_1")  # of bytes as Llama 2's and Qwen 3's are

SCRIPTS = [
    "សួស្តី​ពិភពលោក", "မင်္ဂလာပါ ကမ္ဘာ", "𠀀𠮷𪚥 龘", "你好世界", "👩‍👩‍👧 🙂", "नमस्ते", "ⵣ ᚠ ꙮ",
    "é ñ ß", "  two  spaces", "def f():\n\treturn 1\n", "The dog.", " ", "\u00a0x", "‹…›",
]  # fmt: skip
texts = st.lists(st.sampled_from(SCRIPTS), min_size=1, max_size=4).map("".join)


@dataclass(frozen=True)
class Real:
    """A tokenizer, and what its file says: the bytes of each token, and whether a text loses its first space."""

    tokenizer: SavedTokenizer
    data: dict[int, bytes]
    drops_space: bool

    @cached_property
    def any(self) -> list[int]:
        return list(self.data)

    @cached_property
    def parts(self) -> list[int]:
        """Tokens with some bytes of a character."""
        return [i for i, data in self.data.items() if data.decode("utf-8", "ignore").encode() != data]

    def text(self, tokens: list[int]) -> str:
        whole = b"".join(self.data.get(token, b"") for token in tokens)
        return (whole.removeprefix(b" ") if self.drops_space else whole).decode("utf-8", "replace")

    def text_after(self, prompt: list[int], output: list[int]) -> str:
        """Text that the output adds; a character of both is the output's, if that completes it."""
        shown, whole = self.text(prompt), self.text([*prompt, *output])
        return whole[len(shown) :] if whole.startswith(shown) else whole[len(shown) - 1 :]


def read(directory: Path) -> Real:
    state = (directory / "tokenizer.json").read_text(encoding="utf-8")
    file = json.loads(state)
    vocabulary: dict[str, int] = file["model"]["vocab"]
    is_byte_level = file["decoder"]["type"] == "ByteLevel"
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}

    def bytes_of(token: str) -> bytes:
        if is_byte_level:
            return bytes(byte_of[character] for character in token)
        if token.startswith("<0x"):
            return bytes([int(token[1:-1], 16)])
        return token.replace("▁", " ").encode()

    added = {one["id"]: one for one in file["added_tokens"]}
    data = {i: bytes_of(token) for token, i in vocabulary.items() if i not in added}
    for i, one in added.items():
        data[i] = b"" if one["special"] else one["content"].replace("\u2581", "▁" if is_byte_level else " ").encode()
    strips = any(step["type"] == "Strip" for step in file["decoder"].get("decoders", []))
    return Real(SavedTokenizer(state, None), data, strips)


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(name, marks=pytest.mark.slow if name in LIKE_OTHERS else ()) for name in NAMES),
        "the shipped one",
    ],
)
def real(request: pytest.FixtureRequest) -> Iterator[Real]:
    directory = DEMO_DIR if request.param == "the shipped one" else REAL_DIR / f"tokenizer-{request.param}"
    if not directory.is_dir():
        pytest.skip(f"this tokenizer is absent: {directory}")
    yield read(directory)


def pieces_of(real: Real, prompt: list[int], output: list[int], stops: StopWords | None = None) -> str:
    """Token by token."""
    stream = TextStream(real.tokenizer, stops, prompt)
    return "".join(stream.next_piece(output[:n], finished=n == len(output)) for n in range(1, len(output) + 1))


def ids_of(real: Real, text: str) -> list[int]:
    return list(real.tokenizer(text)["input_ids"])


@pytest.mark.one_in(3)
@settings(deadline=None, max_examples=examples(60), derandomize=True)
@given(text=texts, prompt=texts, cut=st.integers(0, 40))
def test_no_text_is_lost_after_any_prompt(real: Real, text: str, prompt: str, cut: int) -> None:
    """Texts come as whole characters, as `tokenizers` decodes them, and where prompt or output end within one."""
    before, output = ids_of(real, prompt), real.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert decode(real.tokenizer, before) == real.tokenizer.decode(before, skip_special_tokens=True)
    for first, then in ((before, output), ([*before, *output[:cut]], output[cut:]), (before, output[: max(cut, 1)])):
        expected = real.text_after(first, list(then))
        assert output_text(real.tokenizer, list(then), None, first) == expected
        assert pieces_of(real, first, list(then)) == expected
        assert "".join(token_texts(real.tokenizer, list(then), expected, first)) == expected


@settings(deadline=None, max_examples=examples(60), derandomize=True)
@given(seed=st.integers(0, 2**32), num_prompt=st.integers(0, 12), num_output=st.integers(1, 24))
def test_any_tokens_read_alike_whole_and_in_pieces(real: Real, seed: int, num_prompt: int, num_output: int) -> None:
    """Half of them with bytes of a character only."""
    rng = random.Random(seed)
    tokens = [rng.choice(real.parts if rng.random() < 0.5 else real.any) for _ in range(num_prompt + num_output)]
    prompt, output = tokens[:num_prompt], tokens[num_prompt:]
    expected = real.text_after(prompt, output)
    assert output_text(real.tokenizer, output, None, prompt) == expected == pieces_of(real, prompt, output)


@settings(deadline=None, max_examples=examples(60), derandomize=True)
@given(data=st.data(), text=texts, prompt=texts)
def test_a_stop_word_ends_a_text_where_its_bytes_are_complete(
    real: Real, data: st.DataObject, text: str, prompt: str
) -> None:
    before, output = ids_of(real, prompt), list(real.tokenizer(text, add_special_tokens=False)["input_ids"])
    start = data.draw(st.integers(0, len(text) - 1))
    stops = StopWords((text[start : start + data.draw(st.integers(1, 6))],), real.tokenizer)
    (word,) = stops.words
    ends = [n for n in range(1, len(output) + 1) if word in real.text_after(before, output[:n])]
    stopped = [n for n in range(1, len(output) + 1) if stops([*before, *output[:n]], len(before))]
    assert stopped[:1] == ends[:1]
    if ends:
        whole = real.text_after(before, output[: ends[0]])
        assert output_text(real.tokenizer, output[: ends[0]], stops, before) == whole[: whole.index(word)]
        assert pieces_of(real, before, output[: ends[0]], stops) == whole[: whole.index(word)]
