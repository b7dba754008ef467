"""Write tests/data/llamacpp_tokens.json: what llama.cpp makes of texts, by each pre-tokenizer that we know.

    python -m scripts.tools.llamacpp_tokens

It needs `pip install xllamacpp`, which is llama.cpp in a wheel, and takes a minute. Published tokenizers and models are
looked for in ~/.cache/specdec-real or $SPECDEC_REAL_DIR; what is not there keeps the tokens that the data has.
"""

import json
import sys
import tempfile
import urllib.request
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import llamacpp_tokens as files

from runtime.checkpoint.gguf.tokenizer import PRE_TOKENIZERS

BOS, EOS, THINK = "<｜begin▁of▁sentence｜>", "<|im_end|>", "<think>"
SPACES = " " * 5  # a token of a text's own spaces, as Gemma's files have them
TEXTS = [
    "Hello world",
    " Hello world",
    "  Hello  world  ",
    "",
    " ",
    "   ",
    "\n",
    "\n\n\n",
    "\t\tif x:\n\t\t\treturn",
    "a\r\nb\r\n\r\nc",
    "1",
    "12",
    "123",
    "1234",
    "12345678901234567890",
    "3.14159 and 2,718,281",
    "v1.2.3-rc4 0x1F 1e-9",
    "2026-11-25T13:16:32Z",
    "It's I'm you're we've they'll he'd don't",
    "IT'S I'M YOU'RE WE'VE THEY'LL HE'D DON'T",
    "'s 't 're'll' ''",
    "o'clock rock 'n' roll",
    "The quick brown Fox jumps over the LAZY dog.",
    "HTTPServer parseXMLDoc getURLFor iPhone McDonald",
    "naïve café résumé Ünïcode",
    "Größe, Übung, straße; ГОСТ Привет, мир! Ελληνικά ΑΒΓ",
    "汉字和漢字、かな交じり文。カタカナ",
    "한국어 텍스트 123개",
    "日本語2026年11月25日",
    "العربية نص ١٢٣ עברית",
    "हिन\u094dदी में पाठ १२३ বাংলা தமிழ\u0bcd",
    "ภาษาไทย ខ\u17d2មែរ မြန\u103aမာ",
    "e\u0301 a\u0308 n\u0303 (combining)",
    "🙂🙂 👩\u200d👩\u200d👧 🇩🇪 ❤️ emoji",
    "½ ² Ⅳ ① ٣ numbers",
    "€100 £5 ¥99 $1.50 %^&*",
    "a_b-c d/e\\f g|h i~j `k` <l> {m} [n] (o)",
    "def f(x):\n    return {'a': [1, 2.0], \"b\": None}\n",
    "for (int i = 0; i < n; ++i) { x[i] += y[i]; } // sum",
    "SELECT * FROM t WHERE id >= 10 AND name LIKE '%x%';",
    "https://example.com/a?b=c&d=e#f user@example.org",
    "!!! ??? ... --- === ### ***",
    "a,b;c:d.e!f?g",
    "...\n\n---\n\n# Title\n\n- item\n  - item 2\n",
    "tabs\tand\u00a0no-break\u2003spaces\u3000here",
    "line\u2028separator\u0085next\u000bvertical\fform",
    "x  y   z    w     v      u",
    "a\n b\n  c\n   d",
    "trailing spaces   \n   leading",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "========================================",
    "ababababab abcabcabc",
    "\u200bzero\u200dwidth\ufeff",
    "\u0001\u0002 control \u007f",
    "！，。？：；“quotes” ‘single’ «guillemets» — dash … dots",
    f"{BOS}Hello{EOS}\n",
    f"a{EOS}b {EOS} c",
    "<think>\nwell\n</think>\n\nyes",
    "<0x41> <s> </s> <unk>",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐐀𐐨 mathematical and Deseret",
    "I have 3 apples, 12 pears and 4567 plums",
    "end with digits 42",
    "CamelCase snake_case SCREAMING_CASE kebab-case",
]


def byte_level() -> dict[str, Any]:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=[BOS, EOS, THINK], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(_pairs_of_texts(), trainer)
    state = json.loads(bpe.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    types = [3, 3, 4, *[1] * (len(tokens) - 3)]
    return {"tokens": tokens, "types": types, "merges": [" ".join(merge) for merge in state["merges"]]}


def sentencepiece() -> dict[str, Any]:
    special = ["<unk>", "<s>", "</s>", THINK, SPACES, *(f"<0x{byte:02X}>" for byte in range(256))]
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=special, limit_alphabet=150, show_progress=False)
    bpe.train_from_iterator(_pairs_of_texts(), trainer)
    vocabulary = bpe.get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    return {"tokens": tokens, "types": [2, 3, 3, 4, 4, *[6] * 256, *[1] * (len(tokens) - 261)]}


def _pairs_of_texts() -> list[str]:
    """Texts, whole and beside one another, so that pieces of texts occur more than once."""
    return [*TEXTS, *(first + second for first, second in pairwise(TEXTS))]


def llamacpp(path: Path) -> list[list[int]]:
    """The texts' tokens with what the file adds around them, special tokens found in them."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.warmup, params.verbosity = 64, False, 0
    params.port, params.cpuparams.n_threads = 0, 1
    server = xllamacpp.Server(params)
    found = []
    for text in TEXTS:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            found.append(json.loads(answer.read())["tokens"])
    return found


def main() -> None:
    before = json.loads(files.DATA.read_text(encoding="utf-8")) if files.DATA.is_file() else {}
    data = {
        "llama.cpp": f"xllamacpp {version('xllamacpp')}",
        "texts": TEXTS,
        "byte_level": byte_level(),
        "sentencepiece": sentencepiece(),
    }
    files.DATA.write_text(json.dumps(data), encoding="utf-8")
    answers: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        for name in PRE_TOKENIZERS:
            answers[name] = llamacpp(files.write_byte_level(path, name))
            print(name, flush=True)
        for name, prefix in (("spaced", None), ("unspaced", False)):
            answers[name] = llamacpp(files.write_sentencepiece(path, add_space_prefix=prefix))
        answers["gemma4"] = llamacpp(files.write_gemma_4(path))
        real = dict(before.get("real", {}))
        for name, file in files.REAL_FILES.items():
            if (files.REAL / file).is_file():
                real[name] = llamacpp(files.REAL / file)
        for name in files.REAL_TOKENIZERS:
            if (files.REAL / f"tokenizer-{name}").is_dir():
                real[name] = llamacpp(files.write_real(path, name))
                print(name, flush=True)
    ids = [_grouped({name: answer[i] for name, answer in answers.items()}) for i in range(len(TEXTS))]
    files.DATA.write_text(json.dumps(data | {"ids": ids, "real": real}, ensure_ascii=False), encoding="utf-8")


def _grouped(answers: dict[str, list[int]]) -> list[dict[str, Any]]:
    """Each answer once, with the names of those that give it."""
    groups: dict[str, list[str]] = {}
    for name, ids in answers.items():
        groups.setdefault(json.dumps(ids), []).append(name)
    return [{"of": names, "ids": json.loads(ids)} for ids, names in groups.items()]


if __name__ == "__main__":
    main()
