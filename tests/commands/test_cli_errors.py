"""What a user can get wrong, and what each mistake says: one error, its value, a hint, and nothing written."""

import functools
import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Result, Specdec, edit_json, tree
from draft_models import MakeDraftEngineDir
from shared import record_anew, shared_engine
from tiny import make_model
from transformers import PreTrainedTokenizerFast
from typer.main import get_command

from runtime.tokenizer import SAVED
from specdec_cli.app import app

Damage = Callable[[Path], None]
RUN = "run --engine-dir engine --input-text 'The dog' --max-output-len 8 "
SUMMARIZE = "summarize --engine-dir engine --dataset articles.jsonl --test-engine --output-len 4 --max-ite 1 "
CONVERT = "convert --model-dir model --output-dir out "
BUILD = "build --checkpoint-dir ckpt --output-dir out --compiler none --max-input-len 64 --max-seq-len 128 "
BATCH = "batch -i in.jsonl -o out.jsonl --engine-dir engine "
DRAFTS = "--speculative-decoding-mode draft_tokens_external --max-draft-len 4 "


@dataclass(frozen=True)
class Case:
    """In a directory with `model`, `ckpt`, `engine`, `engine-plain` (no drafts), `articles.jsonl`, `traces.jsonl`,
    `notes.txt` and the empty directory `nothing`.

    Of `draft_engines` those are there too that the arguments name.
    """

    arguments: str
    exit_code: int
    words: tuple[str, ...]
    damage: Damage | None = None


def case(arguments: str, exit_code: int, *words: str, damage: Damage | None = None) -> Any:
    shown = arguments.replace(RUN, "run ").replace(SUMMARIZE, "summarize ").replace(CONVERT, "convert ")
    return pytest.param(Case(arguments, exit_code, words, damage), id=f"{shown.replace(BUILD, 'build ')}: {words[0]}")


def wrong_json(name: str, text: str = "{") -> Damage:
    return lambda directory: none_of((directory / name).write_text(text))


def without(name: str) -> Damage:
    return lambda directory: (directory / name).unlink()


def truncated(name: str, share: float = 0.5) -> Damage:
    def cut(directory: Path) -> None:
        data = (directory / name).read_bytes()
        (directory / name).write_bytes(data[: int(len(data) * share)])

    return cut


def flipped(name: str) -> Damage:
    """One bit of the file's middle."""

    def flip(directory: Path) -> None:
        data = bytearray((directory / name).read_bytes())
        data[len(data) // 2] ^= 1
        (directory / name).write_bytes(data)

    return flip


def edited(name: str, **changes: Any) -> Damage:
    return lambda directory: edit_json(directory / name, **changes)


def file(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda directory: none_of((directory / name).write_bytes(data))


def moved(source: str, target: str) -> Damage:
    return lambda directory: none_of((directory / source).rename(directory / target))


def index(content: str) -> Damage:
    """In the place of the one file of weights, beside which an index does not count."""

    def replace(directory: Path) -> None:
        (directory / "model/model.safetensors").rename(directory / "model/model-00001-of-00001.safetensors")
        (directory / "model/model.safetensors.index.json").write_text(content)

    return replace


def foreign_weights(name: str) -> Damage:
    """Weights of a model with fewer layers."""

    def replace(directory: Path) -> None:
        make_model("llama", num_hidden_layers=1, vocab_size=300).save_pretrained(directory / "other")
        shutil.move(directory / "other" / "model.safetensors", directory / name)
        shutil.rmtree(directory / "other")

    return replace


def recorded(damage: Damage) -> Damage:
    """The same of a checkpoint that was converted so."""

    def both(directory: Path) -> None:
        damage(directory)
        record_anew(directory / "ckpt")

    return both


def no_tokenizer(directory: Path) -> None:
    for path in [*directory.glob("engine/tokenizer*"), directory / "engine" / SAVED]:
        path.unlink()
    record_anew(directory / "engine")


def swap_two_ids(tokenizer_file: Path) -> None:
    """As many tokens of the same names, two of which have changed places."""
    data = json.loads(tokenizer_file.read_text())
    vocabulary = data["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    tokenizer_file.write_text(json.dumps(data))


def swapped_and_recorded(directory: Path) -> None:
    """A draft model that was built with another tokenizer."""
    swap_two_ids(directory / "draft" / "tokenizer.json")
    record_anew(directory / "draft")


def wrong_size(config_file: Path) -> None:
    data = json.loads(config_file.read_text())
    data["files"][0]["num_bytes"] = -1
    config_file.write_text(json.dumps(data))


def by_hand(name: str, **changes: Any) -> Damage:
    """The file as somebody edits it: an engine's no longer says what was built."""

    def edit(directory: Path) -> None:
        recorded = json.loads((directory / name).read_text()).get("config_digest")
        edit_json(directory / name, **changes)
        data = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(data | ({"config_digest": recorded} if recorded else {})))

    return edit


def gguf_only(directory: Path) -> None:
    (directory / "gguf").mkdir()
    (directory / "gguf" / "m.gguf").write_text("GGUF")


def two_ggufs(directory: Path) -> None:
    gguf_only(directory)
    (directory / "gguf" / "n.gguf").write_text("GGUF")


def none_of(value: object) -> None:
    """For a lambda that has nothing to return."""


def array(directory: Path) -> None:
    np.save(directory / "ids.npy", np.array([[0.5]]))


def hot(directory: Path) -> None:
    file("in.jsonl", '{"prompt": "The dog"}\n')(directory)
    file("engine/generation_config.json", '{"temperature": "hot"}')(directory)


WRONG_CONFIG = [
    case(RUN + "--ngram-config [10]", 2, "does not have 2 to 3 entries: [10]", "[10,2,[0]]"),
    case(RUN + "--ngram-config [0,2,[0]]", 2, "max_draft_len", "at least 1: 0"),
    case(RUN + "--ngram-config [10,0,[0]]", 2, "max_matching_ngram_size", "at least 1: 0"),
    case(RUN + "--ngram-config [10,2,[]]", 2, "device_list", "must name a device: []"),
    case(RUN + "--ngram-config [10,2,[3]]", 2, "no such device", ": 3"),
    case(RUN + "--ngram-config abc", 2, "is not a list: abc"),
    case(SUMMARIZE + "--ngram-config abc", 2, "is not a list: abc"),
    case(SUMMARIZE + "--ngram-config [10,2,[3]]", 2, "no such device", ": 3"),
    case(RUN + "--ngram-config [11,2,[0]]", 1, "at most 10 tokens", ": 11", "--max-draft-len 11"),
    case(SUMMARIZE + "--ngram-config [11,2,[0]]", 1, "at most 10 tokens", ": 11"),
    case(
        RUN.replace("engine ", "engine-plain ") + "--ngram-config [4,2,[0]]",
        1,
        "built without drafts",
        ": 4",
        "--speculative-decoding-mode draft_tokens_external",
    ),
    case(RUN + "--suffix-config abc", 2, "`--suffix-config` is not a list: abc", "[10,[0]]"),
    case(SUMMARIZE + "--suffix-config [10,2,[0]]", 2, "2 entries: [10,2,[0]]"),
    case(RUN + "--suffix-config [10,[3]]", 2, "no such device", ": 3"),
    case(RUN + "--suffix-config [11,[0]]", 1, "at most 10 tokens", ": 11"),
    case(RUN + "--ngram-config [4,2,[0]] --ngram-ranking best", 2, "oldest, leftmost, recent, frequent"),
    case(SUMMARIZE + "--ngram-config [4,2,[0]] --ngram-ranking best", 2, "oldest, leftmost, recent, frequent"),
    case(RUN + "--ngram-config [4,2,[0]] --ngram-pool shared", 2, "private, public"),
    case(RUN + "--ngram-config [4,2,[0]] --min-matching-ngram-size 0", 2, "min-matching-ngram-size"),
    case(RUN + "--ngram-config [4,2,[0]] --min-matching-ngram-size 3", 2, "exceeds the longest, 2: 3"),
    case(RUN + "--ngram-config [4,2,[0]] --ngram-corpus none", 1, "there is no such corpus: none", "corpus create"),
    case(SUMMARIZE + "--ngram-config [4,2,[0]] --ngram-corpus none", 1, "there is no such corpus: none"),
    case(RUN + "--ngram-config [4,2,[0]] --ngram-corpus articles.jsonl", 1, "not a corpus", ": articles.jsonl"),
    case(RUN + "--ngram-ranking recent", 2, "`--ngram-ranking` is for n-gram lookup: recent", "`--ngram-config`"),
    case(
        SUMMARIZE + "--ngram-pool public",
        2,
        "`--ngram-pool` is for n-gram lookup or suffix matching: public",
        "`--ngram-config`",
    ),
    case(RUN + "--suffix-config [4,[0]] --ngram-corpus c", 2, "`--ngram-corpus` is for n-gram lookup: c"),
    case(
        RUN + "--spec-decode-algo DRAFT_TARGET --draft-engine-dir none --ngram-ranking recent",
        2,
        "`--ngram-ranking` is for n-gram lookup: recent",
        "`--spec-decode-algo NGRAM`",
    ),
    case(RUN + "--ngram-config [4,2,[0]] --suffix-config [4,[0]]", 2, "together", "`--drafters auto`"),
    case(
        RUN + "--drafters ngram,eagle", 2, "no drafter of specdec's: eagle", "ngram, suffix, draft-target, self, custom"
    ),
    case(SUMMARIZE + "--drafters ngram", 2, "names ngram, which needs `--ngram-config`: ngram", "[10,2,[0]]"),
    case(RUN + "--spec-decode-algo NGRAM --drafters ngram", 2, "`--spec-decode-algo` and `--drafters`"),
    case(RUN + "--spec-decode-algo SUFFIX --suffix-config [4,[0]]", 2, "`--spec-decode-algo` and `--suffix-config`"),
    case(RUN + "--spec-decode-algo SUFFIX --max-matching-ngram-size 2", 2, "is for `--spec-decode-algo NGRAM`: 2"),
    case(RUN + "--no-kv-cache-enable-block-reuse", 2, "needs block reuse"),
    case(SUMMARIZE + "--no-kv-cache-enable-block-reuse", 2, "needs block reuse"),
    case(
        RUN + "--kv-cache-enable-block-reuse --disable-kv-cache-reuse",
        2,
        "`--kv-cache-enable-block-reuse` and `--disable-kv-cache-reuse` cannot be given together",
    ),
    case(
        RUN + "--no-kv-cache-enable-block-reuse --kv-cache-enable-block-reuse --max-matching-ngram-size 2",
        2,
        "`--kv-cache-enable-block-reuse` and `--no-kv-cache-enable-block-reuse` cannot be given together",
    ),
    case(RUN + "--num-beams 2", 2, "beam search is not supported", "2"),
    case(RUN + "--use-py-session", 2, "`--use-py-session`"),
    case(RUN + "--streaming --json", 2, "`--streaming` and `--json`"),
    case(RUN + "--streaming-interval 3", 2, "`--streaming-interval` needs `--streaming`: 3"),
    case(RUN + "--spec-decode-algo MEDUSA", 2, "no algorithm of specdec's: MEDUSA", "NGRAM, SUFFIX, DRAFT_TARGET"),
    case(
        RUN + "--spec-decode-algo NGRAM --ngram-config [4,2,[0]]",
        2,
        "`--spec-decode-algo` and `--ngram-config` cannot be given together",
    ),
    case(RUN + "--ngram-config 4,2 --spec-decode-max-draft-len 3", 2, "needs `--spec-decode-algo`: 3"),
    case(RUN + "--ngram-config 4,2 --mode both", 2, "`--mode` must be one of orchestrator, leader: both"),
    case(RUN + "--spec-decode-algo NGRAM --drafter my:make", 2, "`--spec-decode-algo` and `--drafter`"),
    case(
        RUN + "--spec-decode-algo NGRAM --draft-engine-dir draft", 2, "needs `--spec-decode-algo DRAFT_TARGET`: draft"
    ),
    case(RUN + "--spec-decode-algo DRAFT_TARGET", 2, "needs a draft model", "`--draft-model-dir`"),
    case(
        RUN + "--spec-decode-algo DRAFT_TARGET --draft-model-dir model --draft-engine-dir draft",
        2,
        "`--draft-model-dir` and `--draft-engine-dir` cannot be given together",
    ),
    case(
        RUN + "--spec-decode-algo DRAFT_TARGET --draft-engine-dir none --max-matching-ngram-size 2",
        2,
        "`--max-matching-ngram-size` is for `--spec-decode-algo NGRAM`: 2",
    ),
    case(RUN + "--spec-decode-max-draft-len 4", 2, "needs `--spec-decode-algo`: 4", "`--spec-decode-algo NGRAM`"),
    case(RUN + "--spec-decode-algo NGRAM --spec-decode-max-draft-len 0", 2, "spec-decode-max-draft-len"),
    case(RUN + "--spec-decode-algo NGRAM --spec-decode-max-draft-len 11", 1, "drafts of at most 10 tokens", ": 11"),
    case(RUN + "--spec-decode-algo NGRAM --max-matching-ngram-size 0", 2, "max-matching-ngram-size"),
    case(RUN + "--spec-decode-algo DRAFT_TARGET --draft-engine-dir none", 1, "draft engine: engine directory does not"),
    case(RUN + "--max-num-tokens 0", 2, "max-num-tokens"),
    case(RUN + "--model-dir model", 2, "`--model-dir` and `--engine-dir` cannot be given together: model"),
    case(RUN + "--no-cache", 2, "`--no-cache` is for engines made of `--model-dir`"),
    case(RUN + "--max-seq-len 64", 2, "`--max-seq-len` is for engines made of `--model-dir`: 64"),
    case(RUN + "--dtype bfloat16", 2, "`--dtype` is for engines made of `--model-dir`: bfloat16"),
    case("run --model-dir ./none --input-text a", 1, "model directory does not exist: ./none"),
    case("run --model-dir model --max-seq-len 100000 --input-text a", 1, "max_seq_len exceeds", "--max-seq-len"),
    case("run --model-dir ckpt --input-text a", 1, "specdec wrote, not a Hugging Face model"),
    case("run --model-dir model --check-lossless --input-text a", 2, "there is no drafter"),
    case(RUN + "--end-id 300", 1, "vocabulary of 300: 300"),
    case(RUN + "--max-output-len 0", 2, "max-output-len"),
    case(RUN + "--max-output-len many", 2, "max-output-len"),
    case(RUN + "--ngram_konfig x", 2, "--ngram-konfig"),
    case("runn", 2, "runn"),
    case("summarize --engine-dir engine", 2, "nothing to test"),
    case("summarize --engine-dir engine --test-hf", 2, "`--hf-model-dir`"),
    case("summarize --engine-dir engine --test-hf --hf-model-dir model --check-accuracy", 2, "`--check-accuracy`"),
    case(SUMMARIZE + "--batch-size 5", 1, "max_batch_size 4: 5"),
    case(SUMMARIZE + "--batch-size 5 --spec-decode-algo NGRAM --mode orchestrator", 1, "4: 5", "`--mode leader`"),
    case(SUMMARIZE + "--spec-decode-algo MEDUSA", 2, "no algorithm of specdec's: MEDUSA"),
    case(SUMMARIZE + "--spec-decode-algo DRAFT_TARGET", 2, "needs a draft model", "`--draft-model-dir`"),
    case(SUMMARIZE + "--spec-decode-algo NGRAM --ngram-config 4,2", 2, "cannot be given together", "choose one"),
    case(SUMMARIZE + "--model-dir model", 2, "`--model-dir` and `--engine-dir` cannot be given together"),
    case(SUMMARIZE + "--no-cache", 2, "`--no-cache` is for engines made of `--model-dir`"),
    case(SUMMARIZE + "--mode orchestrator --disable-kv-cache-reuse", 2, "needs block reuse", "`--mode leader`"),
    case(SUMMARIZE + "--num-workers 2", 2, "`--num-workers` is for Ray's workers: 2"),
    case(SUMMARIZE + "--eval-task chess", 2, "chess"),
    case(BUILD + "--speculative-decoding-mode draft_tokens_external", 2, "needs a draft length"),
    case(BUILD + "--max-draft-len 4", 2, "`--max-draft-len 4` needs a mode"),
    case(BUILD + DRAFTS + "--use-paged-context-fmha disable", 2, "--use-paged-context-fmha disable"),
    case(BUILD + "--speculative-decoding-mode medusa", 2, "medusa"),
    case(BUILD + "--tokens-per-block 24", 2, "power of two: 24"),
    case(BUILD + "--max-seq-len 64", 1, "no room for output", ": 64"),
    case(BUILD + "--max-seq-len 257", 1, "256 positions", ": 257", "`--max-seq-len 256`"),
    case(BUILD + "--device tpu", 2, "tpu"),
    case(CONVERT + "--dtype int8", 2, "int8"),
    case(CONVERT + "--tp-size 0", 2, "`--tp-size` must be at least 1: 0"),
    case(CONVERT + "--tp-size 3", 1, "3 devices do not divide 4 attention heads: llama"),
]

NO_INPUT = RUN.replace("--input-text 'The dog' ", "")
LONG = "x" * 97
PROMPTS = [
    case(NO_INPUT, 2, "no prompt given"),
    case(NO_INPUT + "--input-text ''", 1, "is empty: ''"),
    case(NO_INPUT + "--input-text '  '", 1, "prompt 1 is empty"),
    case(
        NO_INPUT + f"--input-text {LONG}", 1, "max_input_len 96: 97 tokens", "`--max-input-length`",
        "`specdec build --max-input-len`, or with `--model-dir` give a larger `--max-seq-len`",
    ),
    case(
        RUN + "--max-output-len 159", 1, "exceed the engine's 160 tokens", "+ 159",
        "`--max-output-len`, or build with a larger `specdec build --max-seq-len`, or with `--model-dir`",
    ),
    case(NO_INPUT + "--input-file none.txt", 1, "No such file", "none.txt"),
    case(
        NO_INPUT + "--input-file in.pdf", 2, "unknown kind of input file: in.pdf", "`.txt`", damage=file("in.pdf", "x")
    ),
    case(NO_INPUT + "--input-file in.txt", 1, "not UTF-8", "line 2", "in.txt", damage=file("in.txt", b"a\n\xff\n")),
    case(NO_INPUT + "--input-file in.txt", 1, "the file is empty: in.txt", damage=file("in.txt", "")),
    case(NO_INPUT + "--input-file in.csv", 1, "row 2, column 2", "'x'", damage=file("in.csv", "3,4\n3,x\n")),
    case(NO_INPUT + "--input-file in.csv", 1, "vocabulary of 300: 300", damage=file("in.csv", "3,300\n")),
    case(NO_INPUT + "--input-file in.jsonl", 1, "not JSON at line 1", damage=file("in.jsonl", "{")),
    case(
        NO_INPUT + "--input-file in.jsonl", 1, "line 1 needs `prompt`, `prompt_ids` or `messages`",
        damage=file("in.jsonl", '{"text": "a"}'),
    ),
    case(NO_INPUT + "--input-file in.npy", 1, "not a NumPy array", damage=file("in.npy", "abc")),
    case(NO_INPUT + "--input-file ids.npy", 1, "must be integers", damage=array),
    case(RUN + "--input-file in.txt", 2, "both a prompt and `--input-file`", damage=file("in.txt", "a")),
    case(RUN + "--max-tokens-in-paged-kv-cache 4", 1, "K/V cache of 4 tokens is too small"),
    case(RUN + "--max-tokens-in-paged-kv-cache 8 --streaming", 1, "K/V cache of 8 tokens is too small"),
    case(SUMMARIZE + "--max-tokens-in-paged-kv-cache 4", 1, "K/V cache of 4 tokens is too small"),
    case(RUN + "--max-tokens-in-paged-kv-cache 0", 2, "max-tokens-in-paged-kv-cache"),
    case(RUN + "--tokenizer-dir none", 1, "tokenizer directory does not exist: none"),
    case(RUN + "--tokenizer-dir empty", 1, "no usable tokenizer in: empty", damage=lambda d: (d / "empty").mkdir()),
    case(RUN + "--output-csv none/ids.csv", 1, "none/ids.csv"),
    case(RUN + "--output-csv engine", 1, "engine"),
    case(RUN + "--output-npy /proc/ids.npy", 1, "/proc/ids.npy"),
    case(RUN + "--output-traces none/t.jsonl", 1, "cannot write the file", "none/t.jsonl"),
    case(RUN + "--output-traces engine", 1, "cannot write the file", "engine"),
    case(RUN + "--output-traces engine/t.jsonl", 2, "the output would replace what is read: engine/t.jsonl"),
    case(RUN + "--output-traces ids.csv --output-csv ids.csv", 2, "two outputs have the same file: ids.csv"),
    case(SUMMARIZE + "--output-traces none/t.jsonl", 1, "cannot write the file", "none/t.jsonl"),
    case(SUMMARIZE + "--output-traces articles.jsonl", 2, "would replace what is read: articles.jsonl"),
    case(SUMMARIZE + "--output-traces page --report page", 2, "two outputs have the same file: page"),
    case(SUMMARIZE + "--output-traces o/hf.out --output-dir o", 2, "two outputs have the same file: o/hf.out"),
    case(SUMMARIZE + "--output-traces o/o/t.jsonl --output-dir o", 1, "cannot write the file", "o/o/t.jsonl"),
    case(
        SUMMARIZE + "--report my.html --ngram-config [4,2,[0]] --ngram-corpus my.html", 2,
        "would replace what is read: my.html", damage=file("my.html", ""),
    ),
    case(SUMMARIZE + "--output-traces ckpt/t --tokenizer-dir ckpt", 2, "would replace what is read: ckpt/t"),
    case(RUN + "--output-csv ckpt/ids.csv --tokenizer-dir ckpt", 2, "would replace what is read: ckpt/ids.csv"),
    case(
        SUMMARIZE.replace("--test-engine", "--test-hf --hf-model-dir model") + "--output-traces t.jsonl", 2,
        "`--output-traces` writes the engine's outputs", "`--test-engine`",
    ),
    case(RUN + "--output-logits-npy none/x.npy", 1, "none/x_generation.npy"),
    case(RUN + "--output-logits-npy /proc/x.npy", 1, "/proc/x_generation.npy"),
    case(RUN + "--output-logits-npy ''", 2, "`--output-logits-npy` has an empty value: ''"),
    case(RUN + "--output-logits-npy .", 1, "cannot write the file"),
    case(RUN + "--output-logits-npy /", 1, "cannot write the file"),
    case(
        RUN + "--output-generation-logits", 1, "(Is a directory): logits_generation.npy",
        damage=lambda d: (d / "logits_generation.npy").mkdir(),
    ),
    case(SUMMARIZE + "--output-dir articles.jsonl", 1, "(Not a directory): articles.jsonl"),
    case(SUMMARIZE + "--output-dir articles.jsonl/out", 1, "(Not a directory): articles.jsonl/out"),
    case(SUMMARIZE + "--output-dir /proc/out", 1, "/proc/out"),
]  # fmt: skip

NGRAM = "--ngram-config [4,2,[0]] "
OWN = "--drafter custom_drafters:LastOccurrence "
CONFIG = "--draft-target-model-config [4,[0],[0],False] "


def drafting(engine: str, config: str = "[4,[0],[0],False]") -> str:
    return f"--draft-engine-dir {engine} --draft-target-model-config {config} "


DRAFTERS = [
    case(RUN + "--draft-engine-dir draft", 2, "`--draft-engine-dir` needs `--draft-target-model-config`: draft"),
    case(SUMMARIZE + "--draft-engine-dir draft", 2, "`--draft-engine-dir` needs `--draft-target-model-config`: draft"),
    case(RUN + CONFIG, 2, "needs the draft model's engine: [4,[0],[0],False]", "`--draft-engine-dir` names it"),
    case(SUMMARIZE + CONFIG, 2, "needs the draft model's engine: [4,[0],[0],False]"),
    case(RUN + NGRAM + drafting("draft"), 2, "`--ngram-config` and `--draft-target-model-config` cannot be given"),
    case(RUN + NGRAM + OWN, 2, "`--ngram-config` and `--drafter` cannot be given together", "choose one drafter"),
    case(RUN + OWN + drafting("draft"), 2, "`--draft-target-model-config` and `--drafter` cannot be given together"),
    case(RUN + OWN + "--draft-engine-dir draft", 2, "`--draft-engine-dir` needs `--draft-target-model-config`"),
    case(
        SUMMARIZE + NGRAM + OWN + drafting("draft"), 2,
        "`--ngram-config` and `--draft-target-model-config` and `--drafter` cannot be given together",
    ),
    case(RUN + drafting("draft", "abc"), 2, "`--draft-target-model-config` is not a list: abc"),
    case(RUN + drafting("draft", "[[0],[0],4,False,1]"), 2, "does not have 1 to 4 entries", "[4,[0],[0],False]"),
    case(RUN + drafting("draft", "[0,[0],[0],True]"), 2, "draft_len in", "at least 1: 0"),
    case(RUN + drafting("draft", "[4,[],[0],True]"), 2, "draft_device_list in", "must name a device: []"),
    case(RUN + drafting("draft", "[4,[0],[0,1],True]"), 2, "as long as the engine's tp_size 1: it has 2, [0, 1]"),
    case(RUN + drafting("draft", "[4,[0],[0],0]"), 2, "use_logits in", "True or False: 0"),
    case(SUMMARIZE + drafting("draft", "[4,[0],[0],0]"), 2, "use_logits in", "True or False: 0"),
    case(RUN + drafting("draft", "[4,[7],[0],True]"), 2, "draft engine: there is no such ", ": 7"),
    case(RUN + drafting("draft", "[4,[0],[7],True]"), 2, "there is no such ", ": 7"),
    case(SUMMARIZE + drafting("draft", "[4,[7],[0],True]"), 2, "draft engine: there is no such ", ": 7"),
    case(RUN + drafting("draft", "[11,[0],[0],True]"), 1, "at most 10 tokens", ": 11", "--max-draft-len 11"),
    case(
        RUN.replace("engine ", "engine-plain ") + drafting("draft"), 1, "built without drafts", ": 4",
        "--speculative-decoding-mode draft_tokens_external",
    ),
    case(RUN.replace("engine ", "engine-plain ") + OWN, 1, "built without drafts", "--max-draft-len 10"),
    case(RUN + drafting("none"), 1, "engine directory does not exist: none", "`specdec build`"),
    case(SUMMARIZE + drafting("none"), 1, "engine directory does not exist: none", "`specdec build`"),
    case(RUN + drafting("ckpt"), 1, "not an engine directory: ckpt", "`specdec build`"),
    case(RUN + drafting("model"), 1, "not an engine directory: model"),
    case(RUN + drafting("draft"), 1, "file is missing: draft/config.json", damage=without("draft/config.json")),
    case(RUN + drafting("draft"), 1, "draft/config.json` is not valid JSON", damage=truncated("draft/config.json")),
    case(
        RUN + drafting("draft"), 1, "file is missing: draft/rank0.safetensors",
        damage=without("draft/rank0.safetensors"),
    ),
    case(
        RUN + drafting("draft"), 1, "draft engine: ", "draft/rank0.safetensors` has changed since the engine was built",
        damage=truncated("draft/rank0.safetensors"),
    ),
    case(
        RUN + drafting("draft"), 1, "draft engine: `draft` was built for another torch: it needs 1.13.0",
        damage=edited("draft/config.json", environment__torch="1.13.0"),
    ),
    case(
        RUN + drafting("draft"), 1, "draft/tokenizer.json` has changed", damage=truncated("draft/tokenizer.json")
    ),
    case(
        RUN + drafting("draft-other"), 1, "different tokenizers: 280 tokens in draft-other, 300 in engine",
        "use a draft model with the target's own tokenizer",
    ),
    case(SUMMARIZE + drafting("draft-other"), 1, "different tokenizers: 280 tokens in draft-other, 300 in engine"),
    case(
        RUN + drafting("draft"), 1, "different tokenizers: 300 tokens in draft, 300 in engine",
        "2 of the draft's differ",
        damage=swapped_and_recorded,
    ),
    case(
        RUN + drafting("draft-bare-280"), 1, "different vocabularies", "280 ids in draft-bare-280, 300 in engine",
        "share a tokenizer",
    ),
    case(
        RUN + drafting("draft-short"), 1, "draft engine: prompt and output of request 0 exceed the engine's 9 tokens",
        "+ 8", "`--max-seq-len`",
    ),
    case(RUN + drafting("draft-short") + "--streaming", 1, "draft engine: ", "exceed the engine's 9 tokens"),
    case(RUN + drafting("draft-narrow"), 1, "draft engine: prompt of request 0 is longer", "max_input_len 1"),
    case(
        SUMMARIZE + drafting("draft-narrow"), 1, "draft engine: prompt of line 3 of articles.jsonl is longer",
        "max_input_len 1",
    ),
    case(RUN + drafting("draft") + "--max-tokens-in-paged-kv-cache 4", 1, "K/V cache of 4 tokens is too small"),
    case(
        RUN + drafting("draft-blocks") + "--max-output-len 9 --max-tokens-in-paged-kv-cache 9", 1,
        "draft engine: K/V cache of 9 tokens is too small for request 0",
    ),
    case(RUN + OWN.replace(":", "."), 2, "not of the form module:factory: custom_drafters.LastOccurrence"),
    case(SUMMARIZE + "--drafter abc", 2, "not of the form module:factory: abc"),
    case(RUN + "--drafter no_such_module:make", 1, "cannot import the drafter's module", ": no_such_module"),
    case(SUMMARIZE + "--drafter custom_drafters:NOT_CALLABLE", 1, "nothing that can be called"),
    case(SUMMARIZE + "--drafter custom_drafters:Raises", 1, "`custom_drafters:Raises` failed: KeyError"),
]  # fmt: skip


def without_x(directory: Path) -> None:
    """A tokenizer that makes nothing of an x."""
    normalizer = {"type": "Replace", "pattern": {"String": "x"}, "content": ""}
    edit_json(directory / "engine" / "tokenizer.json", normalizer=normalizer)
    record_anew(directory / "engine")


SAMPLING = [
    case(RUN + "--temperature -1", 2, "temperature must be at least 0: -1", "0 is greedy"),
    case(RUN + "--temperature nan", 2, "temperature must be at least 0: nan"),
    case(RUN + "--temperature inf", 2, "temperature must be at least 0: inf"),
    case(RUN + "--temperature warm", 2, "--temperature"),
    case(RUN + "--top-k -1", 2, "top_k must be at least 0: -1", "0 is the whole vocabulary"),
    case(RUN + "--top-k 1.5", 2, "--top-k"),
    case(RUN + "--top-k 301", 1, "`--top-k` exceeds the vocabulary of 300: 301"),
    case(SUMMARIZE + "--top-k 301", 1, "`--top-k` exceeds the vocabulary of 300: 301"),
    case(RUN + "--top-p 1.5", 2, "top_p must be between 0 and 1: 1.5"),
    case(RUN + "--top-p -0.1", 2, "top_p must be between 0 and 1: -0.1"),
    case(RUN + "--top-p nan", 2, "top_p must be between 0 and 1: nan"),
    case(RUN + "--min-p 2", 2, "min_p must be between 0 and 1: 2.0"),
    case(RUN + "--min-p nan", 2, "min_p must be between 0 and 1: nan"),
    case(RUN + "--repetition-penalty 0", 2, "repetition_penalty must be more than 0: 0.0"),
    case(RUN + "--repetition-penalty -1.2", 2, "repetition_penalty must be more than 0: -1.2"),
    case(RUN + "--repetition-penalty nan", 2, "repetition_penalty must be more than 0: nan"),
    case(RUN + "--presence-penalty -1", 2, "presence_penalty must be at least 0: -1.0"),
    case(RUN + "--frequency-penalty -0.5", 2, "frequency_penalty must be at least 0: -0.5"),
    case(RUN + "--no-repeat-ngram-size -1", 2, "no_repeat_ngram_size must be at least 0: -1"),
    case(SUMMARIZE + "--temperature -1", 2, "temperature must be at least 0: -1"),
    case(SUMMARIZE + "--top-p 1.5", 2, "top_p must be between 0 and 1: 1.5"),
    case(SUMMARIZE + "--repetition-penalty 0", 2, "repetition_penalty must be more than 0: 0.0"),
    case(RUN + "--random-seed x", 2, "--random-seed"),
    case(RUN + "--num-return-sequences 0", 2, "--num-return-sequences"),
    case(RUN + "--stop-words ''", 2, "`--stop-words` has a word of no letters: ''"),
    case(RUN + "--stop-words a --stop-words ''", 2, "`--stop-words` has a word of no letters: ''"),
    case(RUN + "--bad-words ''", 2, "`--bad-words` has a word of no letters: ''"),
    case(SUMMARIZE + "--stop-words ''", 2, "`--stop-words` has a word of no letters: ''"),
    case(RUN + "--stop-words '</s>'", 2, "`--stop-words` has a word that the tokenizer makes nothing of: '</s>'"),
    case(RUN + "--bad-words '<pad>'", 2, "`--bad-words` has a word that the tokenizer makes nothing of: '<pad>'"),
    case(
        RUN + "--stop-words x", 2, "`--stop-words` has a word that the tokenizer makes nothing of: 'x'",
        damage=without_x,
    ),
    case(RUN + "--stop-words a", 1, "the engine has none", "`--tokenizer-dir`", damage=no_tokenizer),
    case(RUN + "--bad-words a", 1, "the engine has none", "`--tokenizer-dir`", damage=no_tokenizer),
    case(RUN + "--no-repeat-ngram-size 1 --temperature 0 --top-k 301", 1, "`--top-k` exceeds"),
    case(RUN + "--check-lossless", 2, "`--check-lossless` compares a drafter with none", "--ngram-config"),
    case(SUMMARIZE + "--check-lossless", 2, "`--check-lossless` compares a drafter with none"),
    case(
        SUMMARIZE.replace("--test-engine", "--test-hf --hf-model-dir model") + NGRAM + "--check-lossless", 2,
        "`--check-lossless` checks the engine", "`--test-engine`",
    ),
    case(RUN + drafting("draft") + "--streaming --json", 2, "`--streaming` and `--json`"),
]  # fmt: skip

MODELS = [
    case(CONVERT.replace(" model", " none/model"), 1, "none/model"),
    case(CONVERT.replace(" model", " nobody/nothing"), 1, "cannot be reached for: nobody/nothing", "demo-draft"),
    case(CONVERT.replace(" model", " articles.jsonl"), 1, "articles.jsonl"),
    case(CONVERT.replace(" model", " 'no such: model'"), 1, "does not exist: no such: model"),
    case(CONVERT, 1, "file is missing: model/config.json", damage=without("model/config.json")),
    case(CONVERT, 1, "model/config.json` is not valid JSON", damage=truncated("model/config.json")),
    case(CONVERT, 1, "model/config.json` is not a JSON object", damage=wrong_json("model/config.json", "[]")),
    case(CONVERT, 1, "names no `model_type`", damage=edited("model/config.json", model_type=None)),
    case(CONVERT, 1, "model type: martian", damage=edited("model/config.json", model_type="martian")),
    case(CONVERT, 1, "llama", damage=edited("model/config.json", num_attention_heads=0)),
    case(CONVERT, 1, "llama", damage=edited("model/config.json", hidden_size=-32)),
    case(CONVERT, 1, "encoder-decoder", damage=edited("model/config.json", model_type="t5")),
    case(CONVERT, 1, "file is missing: model/model.safetensors", damage=without("model/model.safetensors")),
    case(CONVERT, 1, "model/model.safetensors` is damaged", damage=truncated("model/model.safetensors")),
    case(CONVERT, 1, "model/model.safetensors` is damaged", damage=file("model/model.safetensors", "")),
    case(
        CONVERT, 1, "weights are pickled", "model/pytorch_model.bin", "save_pretrained",
        damage=moved("model/model.safetensors", "model/pytorch_model.bin"),
    ),
    case(CONVERT, 1, "`weight_map`", damage=index('{"weight_map": 5}')),
    case(CONVERT, 1, "`weight_map`", damage=index('{"weight_map": {"a": 5}}')),
    case(
        CONVERT, 1, "file is missing: model/lost.safetensors",
        damage=index('{"weight_map": {"a": "lost.safetensors"}}'),
    ),
    case(CONVERT.replace(" out ", " engine "), 1, "not empty: engine", "`--force`"),
    case(CONVERT.replace(" out ", " model ") + "--force", 1, "something other than a checkpoint or engine: model"),
    case(CONVERT.replace(" out ", " articles.jsonl "), 1, "not a directory: articles.jsonl"),
    case(CONVERT.replace(" out ", " /proc/out "), 1, "/proc/"),
    case("convert --output-dir out", 2, "--model-dir"),
    case("convert --model-dir model", 2, "--output-dir"),
]  # fmt: skip

CHECKPOINTS = [
    case(BUILD.replace(" ckpt", " none"), 1, "checkpoint directory does not exist: none", "`specdec convert`"),
    case(BUILD.replace(" ckpt", " model"), 1, "is a Hugging Face model", "`specdec convert --model-dir model`"),
    case(BUILD.replace(" ckpt", " engine"), 1, "is an engine directory, not a checkpoint: engine"),
    case(BUILD, 1, "file is missing: ckpt/config.json", damage=without("ckpt/config.json")),
    case(BUILD, 1, "ckpt/config.json` is not valid JSON", damage=truncated("ckpt/config.json")),
    case(BUILD, 1, "lacks the key: dtype", damage=edited("ckpt/config.json", dtype=None)),
    case(BUILD, 1, "dtype", "'int3'", damage=edited("ckpt/config.json", dtype="int3")),
    case(BUILD, 1, "cannot read", ": 99", damage=edited("ckpt/config.json", format_version=99)),
    case(BUILD, 1, "unknown key: colour", damage=edited("ckpt/config.json", colour="red")),
    case(BUILD, 1, "names no `model_type`", damage=edited("ckpt/config.json", pretrained_config={})),
    case(BUILD, 1, "file is missing: ckpt/rank0.safetensors", damage=without("ckpt/rank0.safetensors")),
    case(BUILD, 1, "ckpt/rank0.safetensors` has changed since", damage=truncated("ckpt/rank0.safetensors")),
    case(BUILD, 1, "ckpt/rank0.safetensors` lacks", damage=recorded(foreign_weights("ckpt/rank0.safetensors"))),
    case(BUILD, 1, "wrong shape", damage=edited("ckpt/config.json", pretrained_config__intermediate_size=64)),
    case(BUILD.replace(" out ", " engine "), 1, "not empty: engine", "`--force`"),
    case(BUILD.replace(" out ", " model ") + "--force", 1, "something other than a checkpoint or engine: model"),
    case("build --output-dir out", 2, "--checkpoint-dir"),
]

ENGINES = [
    case(RUN.replace(" engine ", " none "), 1, "engine directory does not exist: none", "`specdec build`"),
    case(RUN.replace(" engine ", " ckpt "), 1, "not an engine directory: ckpt", "`specdec build`"),
    case(RUN.replace(" engine ", " model "), 1, "not an engine directory: model"),
    case(SUMMARIZE.replace(" engine ", " none "), 1, "engine directory does not exist: none"),
    case(RUN, 1, "file is missing: engine/config.json", damage=without("engine/config.json")),
    case(RUN, 1, "engine/config.json` is not valid JSON", damage=truncated("engine/config.json")),
    case(RUN, 1, "lacks the key: vocab_size", damage=edited("engine/config.json", vocab_size=None)),
    case(RUN, 1, "build_config", "'x'", damage=edited("engine/config.json", build_config__max_batch_size="x")),
    case(RUN, 1, "model_type", damage=edited("engine/config.json", pretrained_config={})),
    case(RUN, 1, "martian", damage=edited("engine/config.json", pretrained_config__model_type="martian")),
    case(RUN, 1, "file is missing: engine/rank0.safetensors", damage=without("engine/rank0.safetensors")),
    case(
        RUN, 1, "engine/rank0.safetensors` has changed since the engine was built: ", "written with",
        "`specdec build` again", damage=truncated("engine/rank0.safetensors"),
    ),
    case(RUN, 1, "rank0.safetensors` has changed", damage=foreign_weights("engine/rank0.safetensors")),
    case(RUN, 1, "rank0.safetensors` has changed", ": SHA-256 ", damage=flipped("engine/rank0.safetensors")),
    case(RUN, 1, "engine/tokenizer.json` has changed", damage=truncated("engine/tokenizer.json")),
    case(
        RUN, 1, "engine/tokenizer.json` has changed", "written with",
        damage=lambda d: swap_two_ids(d / "engine" / "tokenizer.json"),
    ),
    case(RUN, 1, "file is missing: engine/tokenizer.json", damage=without("engine/tokenizer.json")),
    case(RUN, 1, "saved_tokenizer.json` has changed", damage=flipped("engine/saved_tokenizer.json")),
    case(RUN, 1, "no record of the file: rank0.safetensors", damage=edited("engine/config.json", files=[])),
    case(RUN, 1, "files: num_bytes` is 0 or more", damage=lambda d: wrong_size(d / "engine" / "config.json")),
    case(RUN, 1, "generation_config.json` is not valid JSON", damage=truncated("engine/generation_config.json")),
    case(RUN, 1, "has no tokenizer", damage=no_tokenizer),
    case(RUN + "--streaming", 1, "has no tokenizer", damage=no_tokenizer),
    case(
        "summarize --engine-dir engine --dataset articles.jsonl --test-hf --hf-model-dir model", 1,
        "transformers cannot load", damage=without("model/model.safetensors"),
    ),
    case(
        "summarize --engine-dir engine --dataset articles.jsonl --test-hf --hf-model-dir demo", 1, "another model",
        "engine's 300",
    ),
    case(SUMMARIZE.replace("articles", "none"), 1, "none.jsonl"),
    case(SUMMARIZE.replace("articles.jsonl", "nobody/nothing"), 1, "nobody/nothing", "`demo`"),
]  # fmt: skip


CHAT = "chat --engine-dir engine "
TUNE = "tune --engine-dir engine --input-text 'The dog' --max-output-len 4 "
REPLAY = "tune --traces traces.jsonl "
CREATE = "corpus create --output new.corpus --tokenizer-dir model "
MODEL = "run --model-dir model --input-text a "
EMPTY = "has an empty value: ''"

EMPTY_VALUES = [
    case("run --engine-dir '' --input-text a", 2, "`--engine-dir` " + EMPTY),
    case("run --model-dir '' --input-text a", 2, "`--model-dir` " + EMPTY),
    case("run --engine-dir engine --input-file ''", 2, "`--input-file` " + EMPTY),
    case(RUN + "--tokenizer-dir=", 2, "`--tokenizer-dir` " + EMPTY),
    case(RUN + "--output-csv ''", 2, "`--output-csv` " + EMPTY),
    case(RUN + "--report ''", 2, "`--report` " + EMPTY),
    case(RUN + "--profile ''", 2, "`--profile` " + EMPTY),
    case(RUN + "--ngram-config ''", 2, "`--ngram-config` " + EMPTY),
    case(RUN + "--drafter ''", 2, "`--drafter` " + EMPTY),
    case(RUN + "--drafters ''", 2, "`--drafters` " + EMPTY),
    case(RUN + "--spec-decode-algo ''", 2, "`--spec-decode-algo` " + EMPTY),
    case(SUMMARIZE + "--dataset ''", 2, "`--dataset` " + EMPTY),
    case(SUMMARIZE + "--output-dir ''", 2, "`--output-dir` " + EMPTY),
    case(SUMMARIZE + "--text-column ''", 2, "`--text-column` " + EMPTY),
    case(SUMMARIZE + "--test-hf --hf-model-dir ''", 2, "`--hf-model-dir` " + EMPTY),
    case("convert --model-dir '' --output-dir out", 2, "`--model-dir` " + EMPTY),
    case("convert --model-dir model --output-dir ''", 2, "`--output-dir` " + EMPTY),
    case("build --checkpoint-dir '' --output-dir out", 2, "`--checkpoint-dir` " + EMPTY),
    case("compare '' b.json", 2, "an argument " + EMPTY),
    case("corpus stats ''", 2, "an argument " + EMPTY),
    case("corpus merge --output new.corpus '' ''", 2, "an argument " + EMPTY),
    case(REPLAY + "--output ''", 2, "`--output` " + EMPTY),
    case("run --engine-dir engine a ''", 1, "prompt 2 is empty: ''"),
]

PLACES = [
    case(CONVERT.replace(" out ", " /dev/null/x "), 1, "(Not a directory): /dev/null/x"),
    case(CONVERT.replace(" out ", " /dev/null "), 1, "not a directory: /dev/null"),
    case(CONVERT.replace(" out ", " articles.jsonl/x "), 1, "(Not a directory): articles.jsonl/x"),
    case(CONVERT.replace(" model", " x.gguf"), 1, "GGUF file does not exist: x.gguf", "check the path"),
    case(CONVERT.replace(" model", " nothing"), 1, "file is missing: nothing/config.json"),
    case(CONVERT.replace(" model", " gguf"), 1, "`gguf/m.gguf` is damaged: it ends within", damage=gguf_only),
    case(CONVERT.replace(" model", " gguf"), 1, "several GGUF files: m.gguf, n.gguf", "gguf/m.gguf", damage=two_ggufs),
    case("chat --model-dir gguf", 1, "several GGUF files: m.gguf, n.gguf", damage=two_ggufs),
    case(CONVERT.replace(" model", " gguf/m.gguf"), 1, "`gguf/m.gguf` is damaged: it ends within", damage=gguf_only),
    case(SUMMARIZE + "--test-hf --hf-model-dir gguf/m.gguf", 1, "`gguf/m.gguf` is damaged", damage=gguf_only),
    case(CONVERT + "--weight-only-precision int8", 2, "needs `--use-weight-only`", "`--qformat int8`"),
    case(CONVERT + "--use-weight-only --qformat int4", 2, "and `--qformat int4` say the same twice"),
    case(CONVERT + "--qformat int4 --group-size 48", 2, "`--group-size` is 32, 64, 128 or -1: 48"),
    case(CONVERT + "--group-size 64", 2, "`--group-size` needs weights to round", "`--qformat int4`"),
    case(CONVERT + "--quantize-lm-head", 2, "`--quantize-lm-head` needs weights to round"),
    case(CONVERT + "--activations int8", 1, "activations are rounded where weights are integers", "round the weights"),
    case(CONVERT + "--qformat fp8 --activations int8", 2, "needs weights that are integers: --qformat fp8"),
    case(CONVERT + "--qformat nvfp4", 2, "`--qformat` must be one of", ": nvfp4"),
    case(BUILD + "--quality-text none", 1, "(No such file or directory): none"),
    case(BUILD + "--quality-text notes.txt", 1, "does not know the model that it was rounded from", "`--quality-text`"),
    case(SUMMARIZE + "--rouge1-max-loss 1", 2, "`--rouge1-max-loss 1` needs `--check-accuracy`"),
    case(SUMMARIZE + "--check-accuracy --rouge1-max-loss 1", 2, "compares with Hugging Face", "`--test-hf`"),
    case(CONVERT.replace(" model", " engine"), 1, "specdec wrote, not a Hugging Face model: engine"),
    case(CONVERT.replace(" model", " http://x/y"), 1, "does not exist: http://x/y", "shipped names"),
    case(BUILD.replace(" out ", " /dev/null/x "), 1, "(Not a directory): /dev/null/x"),
    case(BUILD.replace(" out ", " notes.txt "), 1, "not a directory: notes.txt"),
    case(BUILD.replace(" out ", " ckpt ") + "--force", 1, "the input is in the output directory"),
    case(BUILD.replace(" ckpt", " nothing"), 1, "file is missing: nothing/config.json"),
    case(BUILD.replace(" ckpt", " notes.txt"), 1, "checkpoint directory does not exist: notes.txt"),
    case("run --model-dir x.gguf --input-text a", 1, "GGUF file does not exist: x.gguf"),
    case("run --model-dir model/config.json --input-text a", 1, "is a file, not a directory: model/config.json"),
    case("run --model-dir nothere --input-text a", 1, "no directory of this name, and the hub cannot be reached"),
    case("run --model-dir nothing --input-text a", 1, "file is missing: nothing/config.json"),
    case("run --engine-dir notes.txt --input-text a", 1, "engine directory is not a directory: notes.txt"),
    case(MODEL + "--spec-decode-algo DRAFT_TARGET --draft-model-dir ./none", 1, "draft engine: model directory does"),
    case(RUN + "--tokenizer-dir notes.txt", 1, "tokenizer directory does not exist: notes.txt"),
    case(RUN + "--profile none", 1, "(No such file or directory): none"),
    case(RUN + "--profile nothing", 1, "(Is a directory): nothing"),
    case(RUN + "--profile notes.txt", 1, "not JSON at line 1", "notes.txt"),
    case(RUN + "--profile engine/config.json", 1, "not a profile: engine/config.json", "specdec tune"),
    case(RUN + "--ngram-config 4,2 --ngram-corpus nothing", 1, "a corpus is a file, and this is a directory: nothing"),
    case(RUN + "--report r.pdf", 2, "`--report` writes HTML: r.pdf", "`--report r.html`"),
    case(SUMMARIZE + "--report r.pdf", 2, "`--report` writes HTML: r.pdf"),
    case(RUN + "--report nothing", 1, "(Is a directory): nothing"),
    case(RUN + "--report engine/r.html", 2, "would replace what is read: engine/r.html"),
    case(RUN + "--output-traces notes.txt/x", 1, "(Not a directory): notes.txt/x"),
    case(RUN + "--output-npy engine/x.npy", 2, "would replace what is read: engine/x.npy"),
    case(NO_INPUT + "--input-file nothing", 2, "unknown kind of input file: nothing"),
    case(NO_INPUT + "--input-file model/model.safetensors", 2, "unknown kind of input file"),
    case(NO_INPUT + "--input-file articles.jsonl", 1, "line 1 needs `prompt`, `prompt_ids` or `messages`"),
    case(NO_INPUT + "--input-file in.txt", 1, "(Is a directory): in.txt", damage=lambda d: (d / "in.txt").mkdir()),
    case(SUMMARIZE + "--output-dir /dev/null/x", 1, "(Not a directory): /dev/null/x"),
    case(SUMMARIZE + "--output-dir engine/out", 2, "`--output-dir` is in a directory that is read: engine/out"),
    case(SUMMARIZE + "--test-hf --hf-model-dir x.gguf", 1, "GGUF file does not exist: x.gguf"),
    case(SUMMARIZE + "--test-hf --hf-model-dir ./none", 1, "model directory does not exist: ./none"),
    case(SUMMARIZE + "--dataset nothing", 1, "doesn't contain any data files", ": nothing"),
    case(SUMMARIZE + "--dataset notes.txt", 1, "unknown kind of dataset file: notes.txt", "`.parquet`"),
    case(SUMMARIZE + "--dataset 'a b/c d'", 1, "not a hub id: a b/c d"),
    case(SUMMARIZE + "--dataset none.csv", 1, "(No such file or directory): none.csv"),
    case(SUMMARIZE + "--dataset d.parquet", 1, "not a Parquet file: d.parquet", damage=file("d.parquet", "x" * 99)),
    case(
        SUMMARIZE + "--dataset d.parquet", 1, "Parquet file is cut short: d.parquet",
        damage=file("d.parquet", "PAR1" + "x" * 99),
    ),
    case(SUMMARIZE + "--dataset d.parquet", 1, "not a Parquet file: d.parquet", damage=file("d.parquet", "")),
    case(SUMMARIZE + "--dataset model/config.json", 1, "one JSON object over several lines", ": model/config.json"),
    case(SUMMARIZE + "--dataset-dir nothing", 2, "says where a hub dataset is, and this is none: articles.jsonl"),
    case("chat --engine-dir none", 1, "engine directory does not exist: none"),
    case("chat --engine-dir model", 1, "not an engine directory: model"),
    case("chat --model-dir ./none", 1, "model directory does not exist: ./none"),
    case(CHAT + "--tokenizer-dir none", 1, "tokenizer directory does not exist: none"),
    case(CHAT, 1, "the tokenizer has no chat template: engine"),
    case("tune --engine-dir none --input-text a", 1, "engine directory does not exist: none"),
    case("tune --engine-dir engine-plain --input-text a", 1, "built without drafts", "specdec build"),
    case("tune --traces none", 1, "(No such file or directory): none"),
    case("tune --traces notes.txt", 1, "not JSON at line 1", ": notes.txt"),
    case("tune --traces articles.jsonl", 1, "needs either `prompt` or `prompt_ids`"),
    case(TUNE + "--output engine/p.json", 2, "would replace what is read: engine/p.json"),
    case(TUNE + "--tokenizer-dir nothing", 1, "no usable tokenizer in: nothing"),
    case("compare nothing nothing", 1, "(Is a directory): nothing"),
    case("compare none.json none.json", 1, "(No such file or directory): none.json"),
    case("compare articles.jsonl articles.jsonl", 1, "not JSON at line 2", "articles.jsonl"),
    case("compare model/config.json model/config.json", 1, "not a document of specdec: model/config.json"),
    case("compare model/model.safetensors notes.txt", 1, "not UTF-8 text", "model/model.safetensors"),
    case("compare a.json a.json", 1, "the file is empty: a.json", damage=file("a.json", "")),
    case("compare a.json a.json", 1, "not a document of specdec", damage=file("a.json", "[]")),
    case(
        "compare a.json a.json", 1, "the schema version is 1, and this specdec reads 2",
        damage=file("a.json", '{"command": "run", "schema_version": 1}'),
    ),
    case(
        "compare a.json a.json", 1, "not as its schema says, at $", "a.json",
        damage=file("a.json", '{"command": "run", "schema_version": 2}'),
    ),
    case(
        "compare a.json a.json", 1, "but of `tune`: a.json",
        damage=file("a.json", '{"command": "tune", "schema_version": 2}'),
    ),
    case(CREATE, 2, "made of traces or text"),
    case(CREATE + "--text none.txt", 1, "(No such file or directory): none.txt"),
    case(CREATE + "--text nothing", 2, "unknown kind of text file: nothing"),
    case(CREATE + "--traces nothing", 1, "(Is a directory): nothing"),
    case(CREATE + "--traces notes.txt", 1, "not JSON at line 1", ": notes.txt"),
    case(CREATE + "--text articles.jsonl", 1, "line 1 of articles.jsonl has no `text`"),
    case(CREATE + "--text notes.txt --output notes.txt", 2, "would replace what is read: notes.txt"),
    case(CREATE + "--text notes.txt --output articles.jsonl --force", 1, "something other than a corpus"),
    case(CREATE.replace("model", "none") + "--text notes.txt", 1, "tokenizer directory does not exist: none"),
    case(CREATE.replace("model", "nothing") + "--text notes.txt", 1, "no usable tokenizer in: nothing"),
    case("corpus merge --output new.corpus notes.txt", 2, "nothing to merge it with: notes.txt"),
    case("corpus merge --output new.corpus notes.txt ./notes.txt", 2, "name one file twice: notes.txt", "each once"),
    case("corpus merge --output new.corpus notes.txt articles.jsonl", 1, "not a corpus", ": notes.txt"),
    case("corpus stats nothing", 1, "a corpus is a file, and this is a directory: nothing"),
    case("corpus stats none", 1, "there is no such corpus: none"),
    case("corpus stats model/model.safetensors", 1, "not a corpus: model/model.safetensors"),
]  # fmt: skip

NUMBERS = [
    case(RUN + "--max-output-len -1", 2, "`--max-output-len` must be at least 1: -1"),
    case(RUN + "--max-output-len 1.5", 2, "`--max-output-len` must be a whole number: 1.5"),
    case(RUN + f"--max-output-len {10**22}", 1, f"+ {10**22}"),
    case(RUN + "--max-input-length 0", 2, "`--max-input-length` must be at least 1: 0"),
    case(RUN + "--streaming-interval 0", 2, "`--streaming-interval` must be at least 1: 0"),
    case(RUN + "--logprobs -1 --json", 2, "`--logprobs` must be at least 0: -1"),
    case(RUN + "--logprobs 3", 2, "`--logprobs` is for the JSON document: 3", "`--json`"),
    case(RUN + "--logprobs 301 --json", 1, "more tokens than the vocabulary of 300 has: 301"),
    case(RUN + "--num-return-sequences 1000000000", 2, "must be at most 1024: 1000000000"),
    case(RUN + "--max-num-tokens -1", 2, "`--max-num-tokens` must be at least 1: -1"),
    case(RUN + "--kv-cache-free-gpu-memory-fraction 1.5", 2, "must be at most 1.0: 1.5"),
    case(RUN + "--kv-cache-free-gpu-memory-fraction -1", 2, "must be at least 0.0: -1"),
    case(RUN + "--kv-cache-free-gpu-memory-fraction nan", 2, "kv-cache-free-gpu-memory-fraction"),
    case(RUN + f"--max-tokens-in-paged-kv-cache {10**14}", 1, "free", "`--max-tokens-in-paged-kv-cache`"),
    case(RUN + "--frequency-penalty nan", 2, "frequency_penalty must be at least 0: nan"),
    case(RUN + "--presence-penalty inf", 2, "presence_penalty must be at least 0: inf"),
    case(RUN + "--no-repeat-ngram-size x", 2, "`--no-repeat-ngram-size` must be a whole number: x"),
    case(RUN + "--end-id -1", 2, "`--end-id` must be at least 0: -1"),
    case(RUN + "--num-beams x", 2, "`--num-beams` must be a whole number: x"),
    case(RUN + "--stats all", 2, "must be one of summary, detailed, none: all"),
    case(RUN + "--draft-len-mode never --ngram-config 4,2", 2, "must be one of fixed, auto: never"),
    case(RUN + "--draft-len-mode auto", 2, "`--draft-len-mode auto` needs a drafter"),
    case(RUN + "--ngram-config 4.5,2", 2, "whole number of at least 1: 4.5"),
    case(RUN + "--ngram-config True,2", 2, "whole number of at least 1: True"),
    case(RUN + "--ngram-config 4,2,0", 2, "must name a device: 0"),
    case(RUN + "--ngram-config 4,2,[-1]", 2, "must hold device numbers: [-1]"),
    case(RUN + "--ngram-config 4,2,[0,1]", 2, "as long as the engine's tp_size 1: it has 2, [0, 1]"),
    case(RUN + "--ngram-config 4,2,[4,5,6,7]", 2, "tp_size 1: it has 4, [4, 5, 6, 7]", "name 1 device"),
    case(RUN + drafting("draft", "[4,[0,1],[0],True]"), 2, "tp_size 1: it has 2, [0, 1]"),
    case(RUN + "--ngram-config {1:2}", 2, "does not have 2 to 3 entries: {1:2}"),
    case(RUN + "--ngram-config [4,2,[0]", 2, "is not a list: [4,2,[0]"),
    case(RUN + "--suffix-config 0", 2, "whole number of at least 1: 0"),
    case(RUN + "--suffix-config [4,[]]", 2, "must name a device: []"),
    case(RUN + "--spec-decode-algo NGRAM --max-matching-ngram-size x", 2, "must be a whole number: x"),
    case(RUN + "--max-batch-size 4", 2, "`--max-batch-size` is for engines made of `--model-dir`: 4"),
    case(MODEL + "--max-batch-size 0", 2, "`--max-batch-size` must be at least 1: 0"),
    case(MODEL + "--max-batch-size 100000", 2, "`--max-batch-size` must be at most 1024: 100000"),
    case(MODEL + "--max-seq-len 1", 2, "`--max-seq-len` must be at least 2: 1"),
    case(MODEL + f"--max-seq-len {2**30}", 1, "max_seq_len exceeds the 256 positions"),
    case(MODEL + "--dtype int4", 2, "must be one of auto, float32, float16, bfloat16: int4"),
    case(MODEL + "--ngram-config 300,2", 2, "engines take drafts of at most 256 tokens: 300"),
    case(MODEL + "--spec-decode-algo NGRAM --spec-decode-max-draft-len 300", 2, "must be at most 256: 300"),
    case(CHAT + "--max-output-len 0", 2, "`--max-output-len` must be at least 1: 0"),
    case(CHAT + "--random-seed x", 2, "`--random-seed` must be a whole number: x"),
    case(CHAT + "--ngram-config 11,2", 1, "at most 10 tokens", ": 11"),
    case(SUMMARIZE + "--batch-size 0", 2, "`--batch-size` must be at least 1: 0"),
    case(SUMMARIZE + "--max-ite 0", 2, "`--max-ite` must be at least 1: 0"),
    case(SUMMARIZE + "--output-len 0", 2, "`--output-len` must be at least 1: 0"),
    case(SUMMARIZE + "--output-len 160", 1, "no room for a prompt in the engine's 160 tokens: 160"),
    case(SUMMARIZE + "--rouge1-threshold 101", 2, "`--rouge1-threshold` must be at most 100.0: 101"),
    case(SUMMARIZE + "--rouge1-threshold nan", 2, "rouge1-threshold"),
    case(SUMMARIZE + "--max-input-length 0", 2, "`--max-input-length` must be at least 1: 0"),
    case(SUMMARIZE + "--random-seed -5", 2, "`--random-seed` must be at least 0: -5"),
    case(SUMMARIZE + "--max-tokens-in-paged-kv-cache 0", 2, "must be at least 1: 0"),
    case(BUILD + "--max-batch-size 0", 2, "`--max-batch-size` must be at least 1: 0"),
    case(BUILD + "--max-batch-size 1025", 2, "`--max-batch-size` must be at most 1024: 1025"),
    case(BUILD + "--max-input-len 0", 2, "`--max-input-len` must be at least 1: 0"),
    case(BUILD + "--max-input-len 128", 1, "no room for output in max_seq_len 128: 128"),
    case(BUILD + "--max-seq-len 1", 2, "`--max-seq-len` must be at least 2: 1"),
    case(BUILD + "--max-draft-len -1", 2, "`--max-draft-len` must be at least 0: -1"),
    case(BUILD + "--max-draft-len 257", 2, "`--max-draft-len` must be at most 256: 257"),
    case(BUILD + "--tokens-per-block 0", 2, "`--tokens-per-block` must be at least 1: 0"),
    case(BUILD + "--tokens-per-block 2048", 2, "`--tokens-per-block` must be at most 1024: 2048"),
    case(BUILD + "--compiler gcc", 2, "must be one of aot, torch-compile, none: gcc"),
    case(BUILD + "--use-paged-context-fmha maybe", 2, "must be one of enable, disable: maybe"),
    case(CONVERT + "--pp-size 2", 2, "--pp-size 2"),
    case(CONVERT + "--tp-size x", 2, "`--tp-size` must be a whole number: x"),
    case(TUNE + "--batch-size 5", 1, "max_batch_size 4: 5"),
    case(TUNE + "--batch-size 0", 2, "`--batch-size` must be at least 1: 0"),
    case(TUNE + "--max-draft-len 0", 2, "`--max-draft-len` must be at least 1: 0"),
    case(TUNE + "--max-draft-len 11", 1, "at most 10 tokens", ": 11"),
    case(TUNE + "--num-live-prompts 0", 2, "`--num-live-prompts` must be at least 1: 0"),
    case(TUNE + "--max-output-len 500", 1, "none of the 1 requests fits", "2 + 500"),
    case(TUNE + "--end-id 300", 1, "`--end-id` is outside the vocabulary of 300: 300"),
    case(TUNE + "--ngram-config 11,2", 1, "at most 10 tokens", ": 11"),
    case(TUNE + "--ngram-config 4,2 --max-draft-len 5", 2, "exceeds the drafter's own, 4: 5"),
    case(TUNE + "--ngram-pool both", 2, "must be one of private, public: both"),
    *[
        case("tune --traces t.jsonl", 1, *words, damage=file("t.jsonl", line))
        for line, words in (
            ('{"prompt_ids": [], "output_ids": [1]}', ("`prompt_ids` on line 1 of t.jsonl holds no token id",)),
            ('{"prompt_ids": [1], "output_ids": []}', ("`output_ids` on line 1 of t.jsonl holds no token id",)),
            ('{"prompt_ids": [-1], "output_ids": [1]}', ("not a token id, -1", "line 1 of t.jsonl")),
            ('{"prompt_ids": [1.5], "output_ids": [1]}', ("not a token id, 1.5", "line 1 of t.jsonl")),
            ('{"prompt": "a", "output": "b"}', ("no tokenizer for a text", "`--tokenizer-dir`")),
        )
    ],
]  # fmt: skip

TOGETHER = [
    case("run --help-me", 2, "no such option: --help-me", "perhaps `--help`"),
    case("corpus nonsense", 2, "no such command `nonsense`"),
    case("compare a.json", 2, "missing: `B.json`"),
    case("compare a.json b.json c.json", 2, "unexpected extra argument"),
    case("corpus stats a b", 2, "unexpected extra argument"),
    case("build --checkpoint-dir ckpt --output-dir out extra", 2, "unexpected extra argument"),
    case(RUN + "another --input-file notes.txt", 2, "both a prompt and `--input-file`"),
    case(RUN + "--show-tokens --streaming", 2, "`--show-tokens`", "choose one"),
    case(RUN + "--show-tokens --json", 2, "`--show-tokens` marks outputs for people", "JSON"),
    case(RUN + "--show-tokens --quiet", 2, "`--show-tokens` marks outputs for people", "the result only"),
    case(RUN + "--mode orchestrator --disable-kv-cache-reuse", 2, "`--disable-kv-cache-reuse`", "`--mode leader`"),
    case(RUN + "--apply-chat-template", 1, "the tokenizer has no chat template: engine"),
    case(RUN + "--profile p --ngram-config 4,2", 2, "`--ngram-config` and `--profile` both say how to draft: p"),
    case(RUN + "--drafters ngram,ngram --ngram-config 4,2", 2, "names ngram twice"),
    case(RUN + "--drafters ngram --suffix-config 4", 2, "does not name suffix: ngram"),
    case(RUN + "--drafter os:nothing", 1, "nothing that can be called: os:nothing", "…"),
    case(RUN + "--drafter os:getcwd", 1, "`os:getcwd` gives is no drafter"),
    case(RUN + "--ngram-config 4,2 --draft-model-dir model", 2, "needs `--spec-decode-algo DRAFT_TARGET`: model"),
    case(CHAT + "--num-return-sequences 2", 2, "a chat has one answer: `--num-return-sequences 2`"),
    case(CHAT + "--model-dir model", 2, "`--model-dir` and `--engine-dir` cannot be given together"),
    case(CHAT + "--json", 2, "no such option: --json"),
    case(CHAT + "hello", 2, "unexpected extra argument"),
    case(CHAT + "--num-beams 3", 2, "beam search is not supported: `--num-beams 3`"),
    case(SUMMARIZE + "--text-column id --reference-column id", 2, "name one column: id"),
    case(SUMMARIZE + "--reference-column none", 1, "no column `none`", "`--reference-column`"),
    case(SUMMARIZE + "--eval-task question", 1, "no text column", "`--text-column`"),
    case(SUMMARIZE + "--streaming", 2, "no such option: --streaming"),
    case(SUMMARIZE + "--model-dir model", 2, "`--model-dir` and `--engine-dir` cannot be given together"),
    case(BUILD + "--dtype float16", 2, "no such option: --dtype"),
    case("tune", 2, "nothing to tune for", "`--engine-dir`"),
    case("tune --engine-dir engine", 2, "nothing to tune on", "`--input-file`"),
    case(TUNE + "--traces traces.jsonl", 2, "`--input-text` cannot be given with `--traces`"),
    case(TUNE + "--input-file notes.txt", 2, "both a prompt and `--input-file`"),
    case(TUNE + "--ngram-config 4,2 --suffix-config 4", 2, "`--ngram-config` and `--suffix-config` cannot"),
    case(TUNE + "--ngram-ranking recent", 2, "`--ngram-ranking` is for n-gram lookup: recent"),
    case(TUNE + "--temperature 1", 2, "no such option: --temperature"),
    case(REPLAY + "--output p.json", 2, "`--output` needs `--engine-dir`: p.json"),
    case(REPLAY + "--batch-size 2", 2, "`--batch-size` needs `--engine-dir`: 2"),
    case(REPLAY + "--max-output-len 4", 2, "`--max-output-len` cannot be given with `--traces`"),
    case("corpus merge notes.txt articles.jsonl", 2, "missing: `--output`"),
    case("corpus create --output c --text notes.txt", 2, "missing: `--tokenizer-dir`"),
]

CHANGED = "engine/config.json` has changed since the engine was built: digest "
HAND_EDITED = [
    *[
        case(RUN, 1, CHANGED, "`specdec build` again", damage=by_hand("engine/config.json", **change))
        for change in (
            {"build_config__tokens_per_block": 24}, {"build_config__max_input_len": 100000}, {"layers": []},
            {"layers": [{"num_kv_heads": 7, "key_head_dim": 8, "value_head_dim": 8, "sliding_window": None}]},
            {"vocab_size": 301}, {"dtype": "float16"},
            {"pretrained_config__num_hidden_layers": 1}, {"pretrained_config__vocab_size": 5},
        )
    ],
    *[
        case(RUN, 1, *words, damage=by_hand("engine/config.json", **change))
        for change, *words in (
            ({"build_config__max_batch_size": -1}, "max_batch_size` is 1 to 1,024, and not: -1"),
            ({"build_config__max_seq_len": 10**12}, "max_seq_len` is 2 to 16,777,472, and not: "),
            ({"build_config__max_draft_len": 9999}, "max_draft_len` is 0 to 256, and not: 9999"),
            ({"build_config__tokens_per_block": 0}, "tokens_per_block` is 1 to 1,024, and not: 0"),
            ({"build_config__compiler": "gcc"}, "compiler` has a value it cannot have: 'gcc'"),
            ({"build_config__compiler": "aot"}, "no record of the file: rank0.pt2"),
            ({"mapping__tp_size": 2}, "split over devices", "`specdec build` again"),
            ({"mapping": {"world_size": 2, "tp_size": 2, "rank": 0}}, "no record of the file: rank1.safetensors"),
            ({"build_config": []}, "build_config` is not a JSON object: list"),
            ({"vocab_size": -5}, "vocab_size` is 1 or more, and not: -5"),
            ({"format_version": 4}, "format this version cannot read (it reads 10): 4"),
            ({"environment": None}, "lacks the key: environment"),
            ({"environment__device": "tpu"}, "device` has a value it cannot have: 'tpu'"),
            ({"logits_check__tolerance": -1}, "tolerance` is 0 or more, and not: -1"),
            ({"step_costs": 5}, "step_costs` has a value it cannot have: 5"),
            ({"host_s": -1}, "host_s` is 0 or more, and not: -1"),
            ({"files": "x"}, "files` has a value it cannot have: 'x'"),
            ({"pretrained_config": []}, "pretrained_config` has a value it cannot have: []"),
        )
    ],
    case(RUN, 1, "is not valid JSON", damage=file("engine/config.json", b"\x00\xff")),
    case(RUN, 1, "is not a JSON object: NoneType", damage=file("engine/config.json", "null")),
    case(
        RUN, 1, "`eos_token_id` of the model is no token id: 'x'",
        damage=file("engine/generation_config.json", '{"eos_token_id": "x"}'),
    ),
    case(
        RUN, 1, "`eos_token_id` of the model is no token id: -1",
        damage=file("engine/generation_config.json", '{"eos_token_id": [2, -1]}'),
    ),
    case(
        RUN, 1, "`eos_token_id` of the model is no token id: [1]",
        damage=file("engine/generation_config.json", '{"eos_token_id": [[1]]}'),
    ),
    case(
        RUN, 1, "`eos_token_id` of the model is no token id: None",
        damage=file("engine/generation_config.json", '{"eos_token_id": [1, null]}'),
    ),
    *[
        case(command, 1, f"{place}/{name}", *words, damage=file(f"{place}/{name}", content))
        for command, place in ((CONVERT, "model"), (BUILD, "ckpt"))
        for name, content, *words in (
            ("generation_config.json", "", "is not valid JSON"),
            ("generation_config.json", '{"eos', "is not valid JSON"),
            ("generation_config.json", "[]", "is not a JSON object: list"),
            ("generation_config.json", '{"eos_token_id": [null]}', "is no token id: None"),
            ("generation_config.json", '{"temperature": "hot"}', "`temperature` of the model is no number: 'hot'"),
            ("generation_config.json", '{"top_p": NaN}', "`top_p` of the model is no number: nan"),
        )
    ],
    *[
        case(CONVERT, 1, f"model/{name}` is not valid JSON", damage=file(f"model/{name}", content))
        for name, content in (("tokenizer.json", ""), ("tokenizer_config.json", "{"), ("added_tokens.json", "\0"))
    ],
    case(BATCH, 1, "`temperature` of the model is no number: 'hot'", damage=hot),
    *[
        case(BUILD, 1, *words, damage=edited("ckpt/config.json", **change))
        for change, *words in (
            ({"dtype": 5}, "dtype` has a value it cannot have: 5"),
            ({"quantization": "int8"}, "quantization` is not a JSON object: str"),
            ({"mapping__tp_size": 2}, "split over devices", "`specdec convert` again"),
            ({"mapping": {"world_size": 2, "tp_size": 2, "rank": 0}}, "no record of the file: rank1.safetensors"),
            ({"pretrained_config__num_attention_heads": 3}, "not a valid llama config", "(3)"),
            ({"pretrained_config__max_position_embeddings": 0}, "so many positions: 0"),
            ({"pretrained_config__max_position_embeddings": "x"}, "not a valid llama config", "'x'"),
        )
    ],
    case(
        BUILD, 1, "ckpt/config.json` has changed since the model was converted: digest ", "`specdec convert` again",
        damage=by_hand("ckpt/config.json", dtype="float16"),
    ),
    case(BUILD, 1, "ckpt/tokenizer.json` has changed since", ": SHA-256 ", damage=flipped("ckpt/tokenizer.json")),
    case(BUILD, 1, "no record of the file: rank0.safetensors", damage=edited("ckpt/config.json", files=[])),
    case("verify", 2, "missing", "PATH"),
    case("verify none", 1, "there is no such file or directory: none"),
    case("verify nothing", 1, "file is missing: nothing/config.json"),
    case("verify notes.txt", 1, "neither a corpus, a profile nor traces", ": notes.txt"),
    case("verify model", 1, "neither an engine, a checkpoint", damage=edited("model/config.json", model_type=None)),
    case("verify engine", 1, "engine/config.json` is not valid JSON", damage=truncated("engine/config.json")),
    case("verify /dev/null", 1, "neither a file nor a directory: /dev/null"),
    case("verify engine ckpt", 2, "unexpected extra argument"),
    case(BUILD, 1, "ckpt/rank0.safetensors` is damaged", damage=recorded(file("ckpt/rank0.safetensors", ""))),
    case(BUILD, 1, "ckpt/rank0.safetensors` is damaged", damage=recorded(file("ckpt/rank0.safetensors", "x" * 5000))),
    *[
        case(CONVERT, 1, *words, damage=by_hand("model/config.json", **change))
        for change, *words in (
            ({"num_hidden_layers": 0}, "the model has no layers: llama"),
            ({"num_hidden_layers": "x"}, "not a valid llama config", "'x'"),
            ({"vocab_size": 299}, "config.json and weights are of two models"),
            ({"hidden_size": 33}, "not a valid llama config"),
            ({"num_key_value_heads": 3}, "config.json and weights are of two models"),
            ({"hidden_act": "nope"}, "'nope'"),
            ({"max_position_embeddings": -1}, "so many positions: -1"),
            ({"quantization_config": {"bits": 4}}, "weights quantized by a method that it does not name are not read"),
            ({"model_type": ["llama"]}, "does not know this model type: ['llama']"),
            ({"eos_token_id": "x"}, "not a valid llama config"),
        )
    ],
    case(CONVERT, 1, "index.json` is not valid JSON", damage=index("{")),
    case(CONVERT, 1, "index.json` is not a JSON object: list", damage=index("[]")),
]  # fmt: skip


@pytest.fixture(scope="session")
def plain_engine_dir(llama_dir: Path, shared: Path) -> Path:
    return shared_engine(shared / "engines", llama_dir, max_draft_len=0, speculative_decoding_mode="none")


@pytest.fixture
def directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama_dir: Path, llama_checkpoint_dir: Path,
    llama_uncompiled_dir: Path, plain_engine_dir: Path, articles: Path,
) -> Path:  # fmt: skip
    """The current directory: copies that a test may damage."""
    work_dir = tmp_path / "work"
    sources = {"model": llama_dir, "ckpt": llama_checkpoint_dir, "engine": llama_uncompiled_dir}
    for name, source in (sources | {"engine-plain": plain_engine_dir}).items():
        shutil.copytree(source, work_dir / name)
    shutil.copy(articles, work_dir)
    (work_dir / "nothing").mkdir()
    (work_dir / "notes.txt").write_text("The little dog had a red ball.\n")
    (work_dir / "traces.jsonl").write_text('{"prompt_ids": [5, 6], "output_ids": [8, 9, 8, 9]}\n' * 4)
    monkeypatch.chdir(work_dir)
    return work_dir


@pytest.fixture(scope="session")
def draft_engines(
    make_draft_engine_dir: MakeDraftEngineDir, equal_draft_engine_dir: Path, tokenizer: PreTrainedTokenizerFast,
    other_tokenizer: PreTrainedTokenizerFast,
) -> dict[str, Path]:  # fmt: skip
    def make(own_tokenizer: PreTrainedTokenizerFast | None, vocab_size: int, **build: object) -> Path:
        return make_draft_engine_dir(make_model("llama", vocab_size=vocab_size), own_tokenizer, **build)

    return {
        "draft": equal_draft_engine_dir,
        "draft-other": make(other_tokenizer, 280),
        "draft-bare-280": make(None, 280),
        "draft-short": make(tokenizer, 300, max_input_len=8, max_seq_len=9),
        "draft-narrow": make(tokenizer, 300, max_input_len=1),
        "draft-blocks": make(tokenizer, 300, tokens_per_block=1),
    }


def assert_one_clear_error(result: Result, exit_code: int, words: tuple[str, ...]) -> None:
    plain = " ".join(result.stderr.split())
    assert result.exit_code == exit_code, result.stderr
    assert result.stdout == ""
    for word in words:
        assert word in plain, result.stderr
    assert "Traceback" not in plain
    assert plain.count("error: ") == 1, result.stderr
    assert plain.count("hint: ") == 1, result.stderr


def flags_of_others(hint: str, arguments: list[str]) -> set[str]:
    """Flags that a hint names and the command has not; those of other commands stand behind the command's name."""
    flags = flags_of_commands().get(arguments[1] if arguments[0] == "corpus" else arguments[0], set())
    named = {found.split("=")[0] for found in re.findall(r"`--([a-z][a-z=-]*)", hint)}
    return named - flags - {"help"}


@functools.cache
def flags_of_commands() -> dict[str, set[str]]:
    """By Typer's own account."""
    top: Any = get_command(app)
    commands = top.commands | top.commands["corpus"].commands
    return {
        name: {option.removeprefix("--") for parameter in command.params for option in parameter.opts}
        for name, command in commands.items()
    }


CASES = [
    *WRONG_CONFIG, *PROMPTS, *DRAFTERS, *SAMPLING, *MODELS, *CHECKPOINTS, *ENGINES,
    *EMPTY_VALUES, *PLACES, *NUMBERS, *TOGETHER, *HAND_EDITED,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_mistake_is_one_clear_error_and_leaves_nothing(
    case: Case, specdec: Specdec, directory: Path, draft_engines: dict[str, Path]
) -> None:
    arguments = shlex.split(case.arguments)
    for name in draft_engines.keys() & set(arguments):
        shutil.copytree(draft_engines[name], directory / name)
    if case.damage:
        case.damage(directory)
    before = tree(directory)
    result = specdec(*arguments)
    assert_one_clear_error(result, case.exit_code, case.words)
    assert flags_of_others(result.stderr.partition("hint: ")[2], arguments) == set()
    assert tree(directory) == before


@pytest.mark.parametrize(
    "command", [RUN, SUMMARIZE, CONVERT, BUILD, RUN + drafting("draft"), SUMMARIZE + drafting("draft"), RUN + OWN]
)
def test_the_table_starts_from_commands_that_work(
    command: str, specdec: Specdec, directory: Path, equal_draft_engine_dir: Path
) -> None:
    shutil.copytree(equal_draft_engine_dir, directory / "draft")
    assert specdec(*shlex.split(command)).exit_code == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("torch", "1.13.0"), ("capability", "x86_64 AVX9000"), ("transformers", "4.0.0"), ("device", "cuda")],
)
@pytest.mark.parametrize("engine", ["engine", pytest.param("engine-plain", marks=pytest.mark.slow)])
def test_engine_for_another_machine_names_both_and_the_command_that_rebuilds_it(
    specdec: Specdec, directory: Path, name: str, value: str, engine: str
) -> None:
    """The command, with the checkpoint put in, makes an engine that runs."""
    if name == "device" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    (directory / engine).rename(directory / "the engine")
    config_file = directory / "the engine" / "config.json"
    built = json.loads(config_file.read_text())
    here = built["environment"][name]
    edit_json(config_file, **{f"environment__{name}": value})
    arguments = ["run", "--engine-dir", "the engine", "--input-text", "The dog", "--max-output-len", 4]
    result = specdec(*arguments)
    assert_one_clear_error(result, 1, ("the engine", value, here, "specdec build"))
    (hint,) = re.findall(r"hint: .*?: specdec (.*)", result.stderr)
    rebuild = shlex.split(hint)
    assert rebuild[rebuild.index("--checkpoint-dir") + 1] == "CKPT"
    assert specdec(*[{"CKPT": "ckpt"}.get(word, word) for word in rebuild]).exit_code == 0
    rebuilt = json.loads(config_file.read_text())
    assert rebuilt["build_config"] == built["build_config"]
    assert specdec(*arguments).exit_code == 0


@pytest.mark.parametrize("damage", [truncated("rank0.pt2"), file("rank0.pt2", ""), file("rank0.pt2", "x" * 5000)])
def test_damaged_compiled_step_is_one_clear_error(
    specdec: Specdec, llama_engine_dir: Path, tmp_path: Path, damage: Damage
) -> None:
    shutil.copytree(llama_engine_dir, tmp_path / "engine")
    damage(tmp_path / "engine")
    result = specdec("run", "--engine-dir", tmp_path / "engine", "--input-text", "The dog", "--max-output-len", 2)
    assert_one_clear_error(result, 1, ("rank0.pt2` has changed since the engine was built", "`specdec build`"))


def test_ids_beyond_the_vocabulary_come_from_a_foreign_tokenizer_too(
    specdec: Specdec, make_draft_engine_dir: MakeDraftEngineDir, tokenizer: PreTrainedTokenizerFast
) -> None:
    engine_dir = make_draft_engine_dir(make_model("llama", vocab_size=100), tokenizer)
    arguments = ["--engine-dir", engine_dir, "--input-text", "The dog", "--max-output-len", 8]
    assert_one_clear_error(specdec("run", *arguments), 1, ("outside the vocabulary of 100",))


def test_kv_cache_that_is_too_small_is_found_before_the_first_token(specdec: Specdec, directory: Path) -> None:
    """Its first steps would fit: 2 blocks hold the prompt, not all of the output."""
    arguments = [*shlex.split(RUN), "--max-output-len", "60", "--max-tokens-in-paged-kv-cache", "24", "--streaming"]
    result = specdec(*arguments, "--streaming-interval", 1, "--end-id", 0)
    assert_one_clear_error(result, 1, ("K/V cache of 24 tokens is too small",))


def test_draft_engine_that_is_too_short_for_the_last_prompt_is_found_before_the_first_token(
    specdec: Specdec, directory: Path, draft_engines: dict[str, Path]
) -> None:
    """The first four prompts, which fill a batch, would have been answered."""
    prompts = [argument for text in [*"abcd", "abcdefgh"] for argument in ("--input-text", text)]
    drafter = shlex.split(drafting(str(draft_engines["draft-short"])))
    arguments = ["run", "--engine-dir", "engine", *prompts, *drafter, "--streaming", "--max-output-len"]
    assert specdec(*arguments, 1).exit_code == 0
    result = specdec(*arguments, 2)
    assert_one_clear_error(
        result, 1, ("draft engine: prompt and output of request 4 exceed the engine's 9 tokens: 8 + 2",)
    )


def test_tracebacks_are_shown_with_debug_only(
    specdec: Specdec, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["run", "--engine-dir", "none", "--input-text", "x"]
    assert "Traceback" not in specdec(*arguments).stderr
    monkeypatch.setenv("SPECDEC_DEBUG", "")
    with pytest.raises(Exception, match="engine directory does not exist: none"):
        specdec("--debug", *arguments)
