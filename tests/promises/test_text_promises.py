"""Promises between text and tokens, whatever the tokenizer and the text.

- texts: an output ends where its text first holds a stop word; a stream shows what the whole text is, cut there; a
  prompt that is too long keeps its end
- tokenizers and chats: a saved tokenizer is transformers'; it is used while its files are the same; a conversation is
  tokenized as transformers does, with the template's own special tokens and no others
"""

from pathlib import Path
from typing import Any

import pytest
from byte_tokenizers import any_byte_level_tokens, byte_fallback, byte_level, texts, words
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from runtime.checkpoint.tokenizer import SavedTokenizer, find_saved_tokenizer, save_tokenizer
from runtime.text.chat import ChatTemplate
from runtime.text.text import StopWords, TextStream, bad_word_tokens, encode


def with_special_tokens() -> PreTrainedTokenizerFast:
    """A tokenizer as Llama's: a text begins with `<s>` and ends with `</s>`, unless it is said that it does not."""
    import copy

    tokenizer = copy.deepcopy(byte_level())
    ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    assert tokenizer("a")["input_ids"][0] == ids[0][1]
    return tokenizer


# --- texts ---


@given(text=texts, stop_words=words)
def test_text_is_cut_before_the_stop_word_that_comes_first(text: str, stop_words: list[str]) -> None:
    stops = StopWords(tuple(stop_words), byte_level())
    found = stops.find(text)
    cut = text if found is None else text[: found[0]]
    assert text.startswith(cut) and not any(word in cut for word in stop_words)
    ends = [end for end in range(len(text) + 1) if not any(text.startswith(word, end) for word in stop_words)]
    first = next((i for i in range(len(text) + 1) if i not in ends), len(text))
    assert cut == text[:first]
    assert found is None or text[slice(*found)] in stop_words


@given(prompt=any_byte_level_tokens(), tokens=any_byte_level_tokens(), stop_words=words)
def test_a_stream_is_the_text_of_all_tokens_up_to_a_stop_word(
    prompt: list[int], tokens: list[int], stop_words: list[str]
) -> None:
    tokenizer = byte_level()
    stops = StopWords(tuple(stop_words), tokenizer)
    kept: list[int] = []
    for token in tokens:
        kept.append(token)
        whole = tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        has_word = any(word in whole for word in stop_words)
        assert stops([*prompt, *kept], len(prompt)) == has_word
        if has_word:
            break
    stream, shown = TextStream(tokenizer, stops), ""
    for number in range(1, len(kept) + 1):
        shown += stream.next_piece(kept[:number], finished=number == len(kept))
    whole = tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert shown == min((whole[: whole.find(word)] for word in stop_words if word in whole), key=len, default=whole)


@pytest.mark.parametrize("word", ["ab", "é" * 9, "€€€", "🙂🙂🙂"])
@pytest.mark.parametrize("before", ["", "x", "xy ü"])
def test_stop_word_of_any_bytes_is_found_at_its_last_token(word: str, before: str) -> None:
    """Tokens are bytes here, up to four for each character."""
    tokenizer = byte_level()
    stops, tokens = StopWords((word,), tokenizer), tokenizer(before + word)["input_ids"]
    found = [end for end in range(1, len(tokens) + 1) if stops([5, 6, *tokens[:end]], 2)]
    assert found == [len(tokens)]


@given(ids=st.lists(st.integers(0, 20), min_size=1, max_size=12), most=st.none() | st.integers(1, 14))
def test_prompts_keep_their_end_and_are_told_to_be_cut_if_they_are(ids: list[int], most: int | None) -> None:
    kept, is_cut = encode(ids, None, most)
    assert kept == ids[-(most or 99) :] and is_cut == (most is not None and len(ids) > most)
    text = "ab" * len(ids)
    whole = byte_level()(text)["input_ids"]
    saved = SavedTokenizer(byte_level().backend_tokenizer.to_str(), None)
    kept, is_cut = encode(text, saved, most)
    assert kept == whole[-(most or 99) :] and is_cut == (most is not None and len(whole) > most)


@given(bad_words=st.lists(st.sampled_from(["the", "dog", "ab", "é"]), min_size=1, max_size=3))
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_banned_words_are_banned_as_they_begin_a_text_and_after_a_space(make: Any, bad_words: list[str]) -> None:
    tokenizer = make()
    banned = bad_word_tokens(tokenizer, bad_words)
    for word in bad_words:
        for text in (word, f" {word}"):
            assert tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) in banned
    assert len(set(banned)) == len(banned)


# --- tokenizers and chats ---


@pytest.mark.parametrize("make", [byte_level, byte_fallback, with_special_tokens])
@given(text=texts)
def test_saved_tokenizer_is_transformers(make: Any, text: str) -> None:
    tokenizer = make()
    tokenizer.truncation_side = "left"
    saved = SavedTokenizer(tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id)
    for special in (True, False):
        ids = tokenizer(text, add_special_tokens=special)["input_ids"]
        assert saved(text, add_special_tokens=special)["input_ids"] == ids
        assert saved.decode(ids, skip_special_tokens=special) == tokenizer.decode(ids, skip_special_tokens=special)
    assert (
        saved(text, truncation=True, max_length=3)["input_ids"]
        == (tokenizer(text, truncation=True, max_length=3)["input_ids"])
    )
    assert saved(text)["input_ids"] == tokenizer(text)["input_ids"]  # nothing of the truncation stays


def test_saved_tokenizer_is_used_while_its_files_are_the_same(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path, truncation_side="left")
    save_tokenizer(loaded, tmp_path)
    assert find_saved_tokenizer(tmp_path) is not None
    for name in ("tokenizer.json", "tokenizer_config.json"):
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(before + " ")
        assert find_saved_tokenizer(tmp_path) is None
        (tmp_path / name).write_text(before)
        assert find_saved_tokenizer(tmp_path) is not None
    (tmp_path / "special_tokens_map.json").write_text("{}")
    assert find_saved_tokenizer(tmp_path) is None


TEMPLATES = {
    "begins with <s>": "{{ bos_token }}{% for m in messages %}"
    "[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}",
    "has none": "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}",
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("make", [byte_level, with_special_tokens])
def test_conversation_has_the_templates_special_tokens_and_no_others(make: Any, template: str, tmp_path: Path) -> None:
    tokenizer = make()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[template])
    own = AutoTokenizer.from_pretrained(tmp_path)
    chat = ChatTemplate(tmp_path, {"model_type": "llama"})
    for number in range(1, 4):
        messages: Any = [{"role": "user", "content": f"the dog {i} é"} for i in range(number)]
        ids = chat.encode(messages)
        assert ids == own.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        has_own = template != "has none"
        assert ids.count(own.bos_token_id) == has_own and ids.count(own.eos_token_id) == has_own * number
