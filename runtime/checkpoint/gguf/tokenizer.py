"""The tokenizer that a GGUF file describes. It gives llama.cpp's tokens: the same splits, merges and special tokens.

Files leave out what llama.cpp knows from the name of the pre-tokenizer (`src/llama-vocab.cpp`). A name that is not in
the table here is refused. Imports no torch.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from runtime.checkpoint.gguf.ends import MARKS, USER_DEFINED
from runtime.checkpoint.gguf.reader import TOKENIZER, has_tokenizer, read_gguf, templates_as_one, templates_of
from runtime.util.errors import SpecDecError, SpecDecWarning

_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+" + _SPACES
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+" + _SPACES
_LLAMA3 = _CONTRACTIONS + _WORD + r"|\p{N}{1,3}" + _MARKS
_QWEN2 = _CONTRACTIONS + _WORD + r"|\p{N}" + _MARKS
_MINICPM5 = _CONTRACTIONS + _WORD + r"|\p{N}+" + _MARKS
_LOWER, _UPPER = r"(?:(?=\p{L})[^A-Z])", r"(?:(?=\p{L})[^a-z])"  # llama.cpp knows the case of ASCII's letters only
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+" + _SPACES
_TEKKEN = _CASED % ("", "") + r"|\p{N}" + _SLASHED
_GPT4O = _CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _SLASHED
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+" + _SPACES
)
_CASED_LETTERS = (  # of the alphabets that have capitals, as DeepSeek lists them
    "0041-005A 0061-007A 00B5 00C0-00D6 00D8-00F6 00F8-01BA 01BC-01BF 01C4-0293 0295-02AF 0370-0373 0376 0377 "
    "037B-037D 037F 0386 0388-038A 038C 038E-03A1 03A3-03F5 03F7-0481 048A-052F 0531-0556 10A0-10C5 13A0-13F5 "
    "13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 "
    "1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 "
    "1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E "
    "2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF "
    "FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF "
    "1E900-1E943"
)
_HAN = r"(?:(?!\s)[一-龥ࠀ-一가-\ud7ff])+"  # llama.cpp replaces spaces first


def _class(ranges: str) -> str:
    """Characters between the brackets of an expression, from hexadecimal ranges: `0041-005A 00B5` becomes `A-Zµ`."""
    return "".join("-".join(chr(int(end, 16)) for end in one.split("-")) for one in ranges.split())


@dataclass(frozen=True)
class PreTokenizer:
    """Expressions that split texts before merges, applied one after another, and llama.cpp's further settings."""

    expressions: tuple[str, ...]
    """Expressions whose matches become pieces of a text; the texts between matches become pieces too."""
    ignores_merges: bool = False
    """True if a piece that is itself a token stays whole, without merges."""
    adds_bos: bool = False
    """True if texts begin with the BOS token; a file's own setting comes first."""


_SMOLLM = PreTokenizer((r"\p{N}", _GPT2))
_OF_GPT2 = PreTokenizer((_GPT2,))
_OF_LLAMA3 = PreTokenizer((_LLAMA3,), ignores_merges=True, adds_bos=True)
_OF_QWEN2 = PreTokenizer((_QWEN2,))
_OF_GPT4O = PreTokenizer((_GPT4O,))
_OF_BLOOM = PreTokenizer((_BLOOM,))
_OF_DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3))
_BAILING = PreTokenizer(
    (r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])" + _WORD + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]" + _SPACES,)
)
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": _DEFAULT,
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _OF_LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "grok-2"), _OF_QWEN2),
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4"), _OF_GPT2),
    **dict.fromkeys(("mpt", "olmo", "jais", "trillion", "granite-docling"), _OF_GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _SMOLLM),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _OF_GPT4O),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), _OF_BLOOM),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _OF_DEEPSEEK3),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "tekken": PreTokenizer((_TEKKEN,), ignores_merges=True, adds_bos=True),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", rf"\s?[{_class(_CASED_LETTERS)}]+", r"\s?[!-/:-~！-／：-～‘-‟、-。]+", r"\s+\z", _HAN, r"\p{N}+")
    ),
    "seed-coder": PreTokenizer(
        (_CONTRACTIONS + _WORD + r"|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+" + _SPACES,),
    ),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _MINICPM5), ignores_merges=True),
}
"""Pre-tokenizers by their names in files (`tokenizer.ggml.pre`). Each splits texts as llama.cpp does."""

_ASSUMED = "default"
_UNKNOWN, _CONTROL = 2, 3  # `tokenizer.ggml.token_type`
_BYTE_LEVEL, _SENTENCEPIECE, _GEMMA_4 = "gpt2", "llama", "gemma4"
_DEFAULT_IDS = {  # if the file has none
    _BYTE_LEVEL: {"bos": 11, "eos": 11},
    _SENTENCEPIECE: {"bos": 1, "eos": 2, "unknown": 0},
    _GEMMA_4: {},
}
_KEEP_SPACES_AFTER = {"<unk>", "<s>", "<|endoftext|>"}
"""Special tokens of Phi-3 that do not take the white space after them."""
_USED = {
    "model", "pre", "tokens", "scores", "token_type", "merges", "bos_token_id", "eos_token_id", "eot_token_id",
    "eom_token_id", "unknown_token_id", "padding_token_id", "add_bos_token", "add_eos_token", "add_space_prefix",
}  # fmt: skip
_IRRELEVANT = {  # for models that continue texts
    "seperator_token_id", "separator_token_id", "cls_token_id", "mask_token_id", "add_sep_token", "prefix_token_id",
    "suffix_token_id", "middle_token_id", "fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id",
    "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id", "token_type_count", "remove_extra_whitespaces",
    "precompiled_charsmap",
}  # fmt: skip


def make_gguf_tokenizer(path: Path) -> Any:
    """transformers' tokenizer for a GGUF file; SpecDecError if it is not known how llama.cpp reads the file."""
    from transformers import PreTrainedTokenizerFast

    said, templates = _read(path), templates_of(read_gguf(path).metadata)
    if not said.says_pre:
        warnings.warn(
            f"the file does not say how its tokenizer splits texts (`{TOKENIZER}pre`), and `{_ASSUMED}` is assumed, as "
            f"by llama.cpp: {path}",
            SpecDecWarning,
            stacklevel=3,
        )
    try:
        backend, special = _make(said)
        template = templates_as_one(templates)
        return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)  # type: ignore[no-untyped-call]
    except SpecDecError:
        raise
    except Exception as error:  # the tokenizers package raises nothing narrower
        raise SpecDecError(f"`{path}` describes no tokenizer: {error}", hint=_OTHER) from None


def check_gguf_tokenizer(path: Path) -> None:
    """SpecDecError for a GGUF file without a tokenizer, or if it is not known how llama.cpp reads the file."""
    if not has_tokenizer(path):
        raise SpecDecError(f"the file has no tokenizer: {path}", hint=_OTHER)
    _read(path)


def _read(path: Path) -> "_Said":
    metadata = read_gguf(path).metadata
    said = {key.removeprefix(TOKENIZER): value for key, value in metadata.items() if key.startswith(TOKENIZER)}
    unknown = sorted(set(said) - _USED - _IRRELEVANT)
    if unknown:
        raise SpecDecError(f"unknown tokenizer key, `{TOKENIZER}{unknown[0]}`: {path}", hint=_OTHER)
    return _Said(said, path, is_phi_3=_is_phi_3(metadata))


def _is_phi_3(metadata: Mapping[str, Any]) -> bool:
    """True for a Phi-3 file. Its special tokens take in the white space behind them, and no key of the file says so.

    llama.cpp looks for `phi-3` and `phi3` in the name, and misses the `Phi 3 Mini` that its converter writes. A file
    with the architecture `phi3` and SentencePiece's tokens is Phi-3 too; Phi-4 has this architecture with byte-level
    tokens.
    """
    name = str(metadata.get("general.name", "")).lower()
    is_sentencepiece = metadata.get(f"{TOKENIZER}model") == _SENTENCEPIECE
    return "phi-3" in name or "phi3" in name or (metadata.get("general.architecture") == "phi3" and is_sentencepiece)


_OTHER = "name the tokenizer of the model that the GGUF file was made from, or give token ids"


class _Said:
    """The tokenizer's metadata in a file. Each value is checked when it is read."""

    def __init__(self, said: Mapping[str, Any], path: Path, *, is_phi_3: bool) -> None:
        self._said, self.path, self._is_phi_3 = said, path, is_phi_3
        self.model = str(said.get("model"))
        if self.model not in _DEFAULT_IDS:
            raise SpecDecError(f"tokenizers of this kind are not read, `{self.model}`: {path}", hint=_OTHER)
        self.pre = str(said.get("pre", _ASSUMED))
        self.says_pre = "pre" in said or self.model != _BYTE_LEVEL
        if self.model == _BYTE_LEVEL and self.pre not in PRE_TOKENIZERS:
            raise SpecDecError(f"this pre-tokenizer of llama.cpp's is not known, `{self.pre}`: {path}", hint=_OTHER)
        self.tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(self.values("tokens", str))]
        self.vocabulary = {token: i for i, token in enumerate(self.tokens)}
        if len(self.vocabulary) < len(self.tokens):
            raise SpecDecError(f"two tokens of the file have the same text: {path}", hint=_OTHER)

    def values(self, name: str, kind: type) -> list[Any]:
        found = self._said.get(name, [])
        if not isinstance(found, list) or not all(isinstance(value, kind) for value in found):
            raise SpecDecError(f"`{TOKENIZER}{name}` is not a list of the right type: {self.path}", hint=_OTHER)
        return found

    def flag(self, name: str, default: bool) -> bool:
        value = self._said.get(name, default)
        if not isinstance(value, bool):
            raise SpecDecError(f"`{TOKENIZER}{name}` is neither true nor false: {self.path}", hint=_OTHER)
        return value

    def token_id(self, name: str) -> int | None:
        """The id under this key. If it is missing or outside the vocabulary: llama.cpp's default for this kind of
        tokenizer, or None if the vocabulary lacks the default too.
        """
        default = _DEFAULT_IDS[self.model].get(name)
        for i in (self._said.get(f"{name}_token_id"), default):
            if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < len(self.tokens):
                return i
        return None

    def added_tokens(self) -> Iterator[AddedToken]:
        """Tokens that are looked for in a text before it is split."""
        types = self.values("token_type", int)
        for i, token in enumerate(self.tokens):
            kind = types[i] if i < len(types) else 1
            if token in MARKS or kind in (_UNKNOWN, _CONTROL, USER_DEFINED):
                yield AddedToken(
                    token,
                    normalized=False,
                    special=kind != USER_DEFINED,
                    rstrip=self._is_phi_3 and token not in _KEEP_SPACES_AFTER,
                )


def _make(said: _Said) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer, and the texts of special tokens by their roles in transformers, such as `eos_token`."""
    tokenizer, adds_bos = _MAKE[said.model](said)
    added = list(said.added_tokens())
    tokenizer.add_tokens(added)
    if around := _added_around(said, adds_bos):
        tokenizer.post_processor = around
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    found = {names[name]: said.tokens[i] for name in names if (i := said.token_id(name)) is not None}
    special = {token.content for token in added if token.special}
    return tokenizer, {name: token for name, token in found.items() if token in special}


def _added_around(said: _Said, adds_bos: bool) -> processors.TemplateProcessing | None:
    """Postprocessor that adds a BOS token before a text or an EOS token after it; None if the file wants neither."""
    pieces = {"bos": said.flag("add_bos_token", adds_bos), "$A": True, "eos": said.flag("add_eos_token", False)}
    template, special = [name for name, is_there in pieces.items() if is_there], []
    for name in template:
        if name != "$A":
            if (i := said.token_id(name)) is None:
                raise SpecDecError(
                    f"`{TOKENIZER}add_{name}_token` is true, and the file names no such token: {said.path}", hint=_OTHER
                )
            special.append({"id": name, "ids": [i], "tokens": [said.tokens[i]]})
    return processors.TemplateProcessing(single=template, special_tokens=special) if special else None


def _byte_level(said: _Said) -> tuple[Tokenizer, bool]:
    """Byte-level BPE; True beside it if texts begin with a BOS token, unless the file says otherwise."""
    known = PRE_TOKENIZERS[said.pre]
    tokenizer = Tokenizer(models.BPE(vocab=said.vocabulary, merges=_merges(said), ignore_merges=known.ignores_merges))
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in known.expressions]
    bytes_of_pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_of_pieces])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, known.adds_bos


def _merges(said: _Said) -> list[tuple[str, str]]:
    merges = said.values("merges", str)
    if not merges:
        raise SpecDecError(f"the file has no `{TOKENIZER}merges`: {said.path}", hint=_OTHER)
    return [_pair(merge) for merge in merges]


def _pair(merge: str) -> tuple[str, str]:
    """The two tokens of a merge, such as `th` and `e` from "th e"; the first may begin with a space."""
    first, _, second = merge[1:].partition(" ")
    return merge[:1] + first, second


def _sentencepiece(said: _Said) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE, which merges the pair of the best score first. Texts begin with a BOS token."""
    scores = said.values("scores", float)
    if len(scores) < len(said.tokens):
        raise SpecDecError(f"the file has no score for each of its tokens: {said.path}", hint=_OTHER)
    unknown = said.token_id("unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=said.vocabulary,
            merges=merges_by_score(said.tokens, scores),
            unk_token=None if unknown is None else said.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    back: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if said.flag("add_space_prefix", True):  # before a text, and behind each special token
        spaces.insert(0, normalizers.Prepend("▁"))
        back.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer, True


def _gemma_4(said: _Said) -> tuple[Tokenizer, bool]:
    """SentencePiece's tokens with listed merges, within lines or newlines. Texts begin with a BOS token."""
    tokenizer = Tokenizer(models.BPE(vocab=said.vocabulary, merges=_merges(said), byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer, True


_MAKE = {_BYTE_LEVEL: _byte_level, _SENTENCEPIECE: _sentencepiece, _GEMMA_4: _gemma_4}


def merges_by_score(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that form a token, ordered by the formed token's score, the best first. Of the pairs of a
    token, the pair with the longest first half comes first.
    """
    vocabulary = set(tokens)
    merges = []
    for i in sorted(range(len(tokens)), key=lambda i: -scores[i]):
        token = tokens[i]
        for at in range(len(token) - 1, 0, -1):
            if token[:at] in vocabulary and token[at:] in vocabulary:
                merges.append((token[:at], token[at:]))
    return merges
