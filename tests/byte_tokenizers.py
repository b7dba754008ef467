"""Tokenizers whose tokens may be parts of characters, of two kinds and trained ones, and texts and tokens for them."""

from functools import cache

from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = ["ab", "aé", "é", "€€", "b a", "\n", "🙂b", "the dog"]
SPECIALS = ["<pad>", "<s>", "</s>"]


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Tokens are bytes (as GPT-2 writes them) and a few words."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *letters, "ab", "th", "the", "Ġd", "Ġdo", "Ġdog"])}
    merges = [("a", "b"), ("t", "h"), ("th", "e"), ("Ġ", "d"), ("Ġd", "o"), ("Ġdo", "g")]
    bpe = Tokenizer(models.BPE(vocab, merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def trained_on(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on a text, with all bytes: every text round-trips."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """Tokens are characters, with bytes for those it lacks, and a space in front that decoding drops (Llama 2)."""
    letters = [*"abdeghot\n", "▁", "ab", "▁d"]
    vocab = {token: i for i, token in enumerate([*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *letters])}
    bpe = Tokenizer(models.BPE(vocab, [("a", "b"), ("▁", "d")], byte_fallback=True, unk_token="<s>", fuse_unk=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


texts = st.lists(st.sampled_from(["a", "b", " ", "é", "€", "🙂", "\n", "the dog"]), max_size=12).map("".join)
words = st.lists(st.sampled_from(WORDS), min_size=1, max_size=3, unique=True)


@st.composite
def any_byte_level_tokens(draw: st.DrawFn) -> list[int]:
    """Ids of bytes that need not be UTF-8, of words, and of special tokens."""
    tokenizer = byte_level()
    ids = {*range(len(SPECIALS)), *tokenizer("ab the dogé€🙂\n")["input_ids"]}
    ids |= set(tokenizer.convert_tokens_to_ids(["a", "b", "t", "h", "e", "Ġ"]))
    return draw(st.lists(st.sampled_from(sorted(ids)), max_size=24))


def backtracking() -> PreTrainedTokenizerFast:
    """Splits texts by an expression that takes 2^n steps for n times `x`: the package that matches it gives up, and
    panics."""
    tokenizer = byte_level()
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    split = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
