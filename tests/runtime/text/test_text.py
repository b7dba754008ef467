"""Stop words against brute force over the whole text, and streamed text against the text that is not streamed."""

from collections.abc import Callable, Sequence

import pytest
from byte_tokenizers import any_byte_level_tokens, byte_fallback, byte_level, texts, words
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strength import examples
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from runtime.core.params import SamplingConfig
from runtime.measure.text_steps import token_texts
from runtime.text.text import StopWords, TextStream, decode, output_text, word_tokens


def generate(tokens: Sequence[int], stops: StopWords | None) -> tuple[list[int], bool]:
    """The output, as the loop commits it: token by token up to the first that ends it."""
    output: list[int] = []
    for token in tokens:
        output.append(token)
        if stops and stops(output, 0):
            return output, True
    return output, False


def generate_by_brute_force(tokens: Sequence[int], stops: StopWords) -> tuple[list[int], bool]:
    for length in range(1, len(tokens) + 1):
        text = stops.tokenizer.decode(tokens[:length], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if any(word in text for word in stops.words):
            return list(tokens[:length]), True
    return list(tokens), False


def stream(
    tokenizer: PreTrainedTokenizerFast, output: list[int], stops: StopWords | None, cuts: Sequence[int]
) -> list[str]:
    """The pieces of text when the output is looked at after each length of `cuts`, and at its end."""
    text_stream = TextStream(tokenizer, stops)
    pieces = [
        text_stream.next_piece(output[:cut], finished=False) for cut in sorted({c for c in cuts if c < len(output)})
    ]
    return [*pieces, text_stream.next_piece(output, finished=True)]


@pytest.mark.parametrize("make_tokenizer", [byte_level, byte_fallback])
@settings(deadline=None, max_examples=examples(150))
@given(text=texts, stop_words=words | st.none(), cuts=st.lists(st.integers(0, 60)))
@example(text="baé", stop_words=["aé"], cuts=[2, 3, 4])
def test_an_output_ends_at_a_stop_word_and_its_pieces_make_the_text(
    make_tokenizer: Callable[[], PreTrainedTokenizerFast], text: str, stop_words: list[str] | None, cuts: list[int]
) -> None:
    """No piece shows a part of a stop word, which the text does not hold."""
    tokenizer = make_tokenizer()
    tokens, stops = tokenizer(text)["input_ids"], StopWords(tuple(stop_words), tokenizer) if stop_words else None
    output, is_stopped = generate(tokens, stops)
    assert (output, is_stopped) == (generate_by_brute_force(tokens, stops) if stops else (tokens, False))
    assert "".join(stream(tokenizer, output, stops, cuts)) == output_text(tokenizer, output, stops)


def sentence_piece() -> PreTrainedTokenizerFast:
    """Words with their space in front, which decoding takes off the first, as Llama 2's does."""
    words = ["▁dog", "▁Max", ".", "▁a", "▁", "d"]
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *words])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def word_pieces() -> PreTrainedTokenizerFast:
    """Tokenizer whose tokens begin with `##` where they continue a word, and have no space in front."""
    words = ["dog", "##s", "max", ".", "a"]
    vocab = {token: i for i, token in enumerate(["[UNK]", "[CLS]", "[SEP]", *words])}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend, cls_token="[CLS]", eos_token="[SEP]")


@pytest.mark.parametrize("make_tokenizer", [byte_level, byte_fallback, sentence_piece, word_pieces])
@settings(deadline=None, max_examples=examples(150))
@given(data=st.data(), cuts=st.lists(st.integers(0, 24)))
def test_prompt_and_output_read_as_decoded_together(
    make_tokenizer: Callable[[], PreTrainedTokenizerFast], data: st.DataObject, cuts: list[int]
) -> None:
    """Read at once, in pieces wherever they are cut, and token by token; a prompt may end within a character."""
    tokenizer = make_tokenizer()
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    num_prompt = data.draw(st.integers(0, len(ids)))
    prompt, output = ids[:num_prompt], ids[num_prompt:]
    together = decode(tokenizer, [*prompt, *output])
    text = output_text(tokenizer, output, None, prompt)
    shown = decode(tokenizer, prompt)
    if together.startswith(shown):
        assert shown + str(text) == together
    assert together.endswith(str(text))
    stream = TextStream(tokenizer, None, prompt)
    pieces = [stream.next_piece(output[:cut], finished=False) for cut in sorted({c for c in cuts if c < len(output)})]
    assert "".join([*pieces, stream.next_piece(output, finished=True)]) == text
    assert "".join(token_texts(tokenizer, output, str(text), prompt)) == text


@pytest.mark.parametrize("word", [" ", "  ", "\n"])
def test_white_space_is_a_word(word: str) -> None:
    """Llama 2's tokenizers show no space at the start of a text, and it is a stop word elsewhere."""
    assert word_tokens(byte_fallback(), "stop", word)


def test_space_in_front_of_an_output_is_kept() -> None:
    tokenizer = sentence_piece()
    dog, named, dot = tokenizer.convert_tokens_to_ids(["▁dog", "▁Max", "."])
    assert output_text(tokenizer, [named, dot], None) == "Max."
    assert output_text(tokenizer, [named, dot], None, [dog]) == " Max."
    assert output_text(tokenizer, [named, dot], StopWords((" Max",), tokenizer), [dog]) == ""
    assert StopWords((" Max",), tokenizer)([dog, named], 1)
    pieces = word_pieces()
    dog, more = pieces.convert_tokens_to_ids(["dog", "##s"])
    assert output_text(pieces, [more, dog], None, [dog]) == "s dog"


@settings(deadline=None, max_examples=examples(200))
@given(any_byte_level_tokens(), words, st.integers(0, 6), st.lists(st.integers(0, 24)))
def test_a_stop_word_ends_an_output_after_its_least_tokens(
    tokens: list[int], stop_words: list[str], least: int, cuts: list[int]
) -> None:
    """Brute force: the first word that ends behind the text of the least tokens; streamed text is the same."""
    tokenizer = byte_level()
    stops = StopWords(tuple(stop_words), tokenizer, SamplingConfig(min_tokens=least))
    output, is_stopped = generate(tokens, stops)
    assert len(output) > least or not is_stopped
    text = output_text(tokenizer, output, stops)
    assert "".join(stream(tokenizer, output, stops, cuts)) == text
    if is_stopped:
        whole = output_text(tokenizer, output, None)
        assert text is not None and whole is not None and whole.startswith(text)
        assert any(whole[len(text) :].startswith(word) for word in stop_words)
