"""Mistakes of a user, and what each of them says: one error, its value, a hint, and nothing written."""

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
from command_line import Result, Specdec, edit_json, tree, with_last_values
from draft_models import MakeDraftEngineDir
from sentences import Said
from shared import record_anew, shared_engine
from tiny import make_model
from transformers import PreTrainedTokenizerFast
from typer.main import get_command

from commands.options.spellings import normalize_name
from runtime.checkpoint.config import ENGINE_FORMAT_VERSION
from runtime.checkpoint.tokenizer import SAVED
from runtime.util.errors import SpecDecError
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
    """Command line in a directory with `model`, `ckpt`, `engine`, `engine-plain` (no drafts), `articles.jsonl`,
    `traces.jsonl`, `notes.txt` and the empty directory `nothing`.

    Of `draft_engines` those are there too that the arguments name.
    """

    arguments: str
    exit_code: int
    values: tuple[str, ...]
    """Values that the error quotes; the whole of it is held in tests/sentences."""
    damage: Damage | None = None


def case(arguments: str, exit_code: int, *values: str, damage: Damage | None = None) -> Any:
    shown = arguments.replace(RUN, "run ").replace(SUMMARIZE, "summarize ").replace(CONVERT, "convert ")
    done = f": {damage.__name__}" if damage else ""
    return pytest.param(Case(arguments, exit_code, values, damage), id=f"{shown.replace(BUILD, 'build ')}{done}")


def named(make: Callable[..., Damage]) -> Callable[..., Damage]:
    """Name the damage after the call that makes it, in the names of the cases."""

    def call(*given: Any, **changes: Any) -> Damage:
        made = make(*given, **changes)
        shown = [getattr(value, "__name__", None) or str(value)[:40] for value in given]
        made.__name__ = f"{make.__name__}({', '.join([*shown, *(f'{key}={value}' for key, value in changes.items())])})"
        return made

    return call


@named
def without(name: str) -> Damage:
    return lambda directory: (directory / name).unlink()


@named
def truncated(name: str, share: float = 0.5) -> Damage:
    def cut(directory: Path) -> None:
        data = (directory / name).read_bytes()
        (directory / name).write_bytes(data[: int(len(data) * share)])

    return cut


@named
def flipped(name: str) -> Damage:
    """One bit of the file's middle."""

    def flip(directory: Path) -> None:
        data = bytearray((directory / name).read_bytes())
        data[len(data) // 2] ^= 1
        (directory / name).write_bytes(data)

    return flip


@named
def edited(name: str, **changes: Any) -> Damage:
    return lambda directory: edit_json(directory / name, **changes)


@named
def file(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda directory: none_of((directory / name).write_bytes(data))


@named
def moved(source: str, target: str) -> Damage:
    return lambda directory: none_of((directory / source).rename(directory / target))


@named
def index(content: str) -> Damage:
    """Write an index, without the one file of weights, beside which it does not count."""

    def replace(directory: Path) -> None:
        (directory / "model/model.safetensors").rename(directory / "model/model-00001-of-00001.safetensors")
        (directory / "model/model.safetensors.index.json").write_text(content)

    return replace


@named
def foreign_weights(name: str) -> Damage:
    """Weights of a model with fewer layers."""

    def replace(directory: Path) -> None:
        make_model("llama", num_hidden_layers=1, vocab_size=300).save_pretrained(directory / "other")
        shutil.move(directory / "other" / "model.safetensors", directory / name)
        shutil.rmtree(directory / "other")

    return replace


@named
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
    """Make a tokenizer with as many tokens of the same names, two of which have changed places."""
    data = json.loads(tokenizer_file.read_text())
    vocabulary = data["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    tokenizer_file.write_text(json.dumps(data))


def swapped_and_recorded(directory: Path) -> None:
    """A draft model that was built with another tokenizer."""
    swap_two_ids(directory / "draft" / "tokenizer.json")
    record_anew(directory / "draft")


@named
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


@named
def parallel_draft(mask: object) -> Damage:
    """The model again, as a parallel draft model with this mask token."""

    def copy(directory: Path) -> None:
        shutil.copytree(directory / "model", directory / "other")
        edit_json(directory / "other" / "config.json", pard_token=mask)

    return copy


def none_of(value: object) -> None:
    """Return nothing, for a lambda."""


def array(directory: Path) -> None:
    np.save(directory / "ids.npy", np.array([[0.5]]))


def hot(directory: Path) -> None:
    file("in.jsonl", '{"prompt": "The dog"}\n')(directory)
    file("engine/generation_config.json", '{"temperature": "hot"}')(directory)


WRONG_CONFIG = [
    case(
        RUN.replace("engine ", "engine-plain ") + "--ngram-config [4,2,[0]]", 1, "4",
        "--speculative-decoding-mode", "draft_tokens_external",
    ),
    case(
        RUN + "--spec-decode-algo DRAFT_TARGET --draft-engine-dir none --ngram-ranking recent", 2,
        "`--ngram-ranking`", "recent", "`--spec-decode-algo NGRAM`",
    ),
    case(RUN + "--num-beams 2", 2, "2"),
    case(RUN + "--use-py-session", 2, "`--use-py-session`"),
    case(RUN + "--streaming --json", 2, "`--streaming`", "`--json`"),
    case(RUN + "--streaming-interval 3", 2, "`--streaming-interval`", "`--streaming`", "3"),
    case(RUN + "--ngram-config 4,2 --mode both", 2, "`--mode`", "both"),
    case(
        RUN + "--spec-decode-algo DRAFT_TARGET --draft-model-dir model --draft-engine-dir draft", 2,
        "`--draft-model-dir`", "`--draft-engine-dir`",
    ),
    case("summarize --engine-dir engine --test-hf", 2, "`--hf-model-dir`"),
    case("summarize --engine-dir engine --test-hf --hf-model-dir model --check-accuracy", 2, "`--check-accuracy`"),
    case(SUMMARIZE + "--batch-size 5 --spec-decode-algo NGRAM --mode orchestrator", 1, "4", "5", "`--mode leader`"),
    case(SUMMARIZE + "--num-workers 2", 2, "`--num-workers`", "2"),
    case(BUILD + "--speculative-decoding-mode draft_tokens_external --max-draft-len 0", 2),
    case(BUILD + "--max-draft-len 4 --speculative-decoding-mode none", 2, "`--max-draft-len 4`", "none"),
    case(BUILD + DRAFTS + "--use-paged-context-fmha disable", 2, "--use-paged-context-fmha"),
    case(BUILD + "--max-seq-len 257", 1, "256", "257", "`--max-seq-len 256`"),
    case(CONVERT + "--tp-size 3", 1, "3", "4", "llama"),
]  # fmt: skip

NO_INPUT = RUN.replace("--input-text 'The dog' ", "")
LONG = "x" * 97
PROMPTS = [
    case(
        NO_INPUT + f"--input-text {LONG}", 1, "max_input_len", "96", "97", "`--max-input-length 96`",
        "`specdec build --max-input-len 97 --max-seq-len 160`", "`--model-dir`", "`--max-seq-len 160`",
    ),
    case(NO_INPUT + f"--input-text {LONG * 4}", 1, "256 positions", "388", "`--max-input-length 96`"),
    case(RUN + "--max-output-len 300", 1, "256 positions", "300", "`--max-output-len`"),
    case(RUN + "--max-output-len 160", 1, "160 tokens", "`--max-output-len`", "`specdec build --max-seq-len`"),
    case(
        RUN + "--max-output-len 159", 1, "160", "159",
        "`--max-output-len`", "158", "`specdec build --max-seq-len`", "161",
    ),
    case(RUN + "--output-npy /proc/ids.npy", 1, "/proc/ids.npy"),
    case(RUN + "--output-traces engine/t.jsonl", 2, "engine/t.jsonl"),
    case(RUN + "--output-traces ids.csv --output-csv ids.csv", 2, "ids.csv"),
    case(SUMMARIZE + "--output-traces articles.jsonl", 2, "articles.jsonl"),
    case(
        SUMMARIZE + "--report my.html --ngram-config [4,2,[0]] --ngram-corpus my.html", 2,
        "my.html", damage=file("my.html", ""),
    ),
    case(SUMMARIZE + "--output-traces ckpt/t --tokenizer-dir ckpt", 2, "ckpt/t"),
    case(
        SUMMARIZE.replace("--test-engine", "--test-hf --hf-model-dir model") + "--output-traces t.jsonl", 2,
        "`--output-traces`", "`--test-engine`",
    ),
    case(RUN + "--output-logits-npy none/x.npy", 1, "none/x_generation.npy"),
    case(RUN + "--output-logits-npy ''", 2, "`--output-logits-npy`", "''"),
    case(
        RUN + "--output-generation-logits", 1, "logits_generation.npy",
        damage=lambda d: (d / "logits_generation.npy").mkdir(),
    ),
]  # fmt: skip

NGRAM = "--ngram-config [4,2,[0]] "
OWN = "--drafter custom_drafters:LastOccurrence "
CONFIG = "--draft-target-model-config [4,[0],[0],False] "


def drafting(engine: str, config: str = "[4,[0],[0],False]") -> str:
    return f"--draft-engine-dir {engine} --draft-target-model-config {config} "


DRAFTERS = [
    *[
        case(f"{command} --compiler none --num-speculative-tokens 4", 2, "4", "`--spec-decode-algo AUTO`")
        for command in ("run model a", "summarize model --test-engine --dataset articles.jsonl")
    ],
    case("run model a --ngram-pool owner", 2, "`--ngram-pool`", "owner", "`--spec-decode-algo AUTO`"),
    case("run model 'a b' --mtp-config 3", 2, "`--mtp-config`", "model", "`--spec-decode-algo AUTO`"),
    case("run model a --ngram-pol private", 2, "`--ngram-pool`", "`specdec run --help-all`"),
    case("run ''", 2, "''", "`specdec run demo`"),
    case("run model 'a b' --eagle-config 3", 2, "`--eagle-config`", "3", "`--draft-model-dir`"),
    case("run model a --quantization int4 --self-draft int4 --spec-decode-algo SELF", 1, "4 bits", "`--self-draft`"),
    case(RUN + "--ngram-config [300,2]", 2, "`--ngram-config`", "256", "300"),
    case("run model a --max-model-len 9999 --compiler none", 1, "`--max-model-len`", "9999", "256"),
    case("run model a --max_tokens many", 2, "`--max_tokens`", "many"),
    case("tune model --compare-activations --input-text a", 2, "`--compare-activations`"),
    case(
        "run model a --draft-model-dir other --spec-decode-algo PARD", 1, "`pard_token`", "'x'", "other",
        damage=parallel_draft("x"),
    ),
    case(RUN + "--draft-engine-dir draft", 2, "`--draft-engine-dir`", "--draft-target-model-config", "draft"),
    case(RUN + CONFIG, 2, "[4,[0],[0],False]", "`--draft-engine-dir`"),
    case(RUN + drafting("draft", "[4,[0],[0,1],True]"), 2, "tp_size", "1", "2", "[0, 1]"),
    case(RUN + drafting("draft", "[11,[0],[0],True]"), 1, "10", "11", "--max-draft-len"),
    case(RUN + drafting("ckpt"), 1, "ckpt", "`specdec build`"),
    case(RUN + drafting("draft"), 1, "draft/rank0.safetensors", damage=truncated("draft/rank0.safetensors")),
    case(
        RUN + drafting("draft"), 1, "`draft`", "1.13.0",
        damage=edited("draft/config.json", environment__torch="1.13.0"),
    ),
    case(RUN + drafting("draft-other", "[4,[0],[0],True]"), 1, "280", "300"),
    case(RUN + drafting("draft", "[4,[0],[0],True]"), 1, "300", "2", damage=swapped_and_recorded),
    case(RUN + drafting("draft-bare-280"), 1, "280", "draft-bare-280", "300"),
    case(RUN + drafting("draft-short"), 1, "0", "9", "8", "`specdec build --max-seq-len`"),
    case(RUN + drafting("draft-blocks") + "--max-output-len 9 --max-tokens-in-paged-kv-cache 9", 1, "9", "0"),
]  # fmt: skip


def without_x(directory: Path) -> None:
    """A tokenizer that makes nothing of an x."""
    normalizer = {"type": "Replace", "pattern": {"String": "x"}, "content": ""}
    edit_json(directory / "engine" / "tokenizer.json", normalizer=normalizer)
    record_anew(directory / "engine")


SAMPLING = [
    case(RUN + "--temperature warm", 2, "`--temperature`", "warm"),
    case(RUN + "--show-tokens --quiet", 2, "`--show-tokens`"),
    case(RUN + "--top-k 301", 1, "`--top-k`", "300", "301"),
    case(RUN + "--end-id 300", 1, "`--end-id`", "300"),
    case(RUN + "--stop-words ''", 2, "`--stop-words`", "''"),
    case(RUN + "--bad-words '<pad>'", 2, "`--bad-words`", "'<pad>'"),
    case(RUN + "--stop-words x", 2, "`--stop-words`", "'x'", damage=without_x),
    case(RUN + "--stop-words a", 1, "`--tokenizer-dir`", damage=no_tokenizer),
    case(RUN + "--check-lossless", 2, "`--check-lossless`", "--ngram-config"),
    case(
        SUMMARIZE.replace("--test-engine", "--test-hf --hf-model-dir model") + NGRAM + "--check-lossless", 2,
        "`--check-lossless`", "`--test-engine`",
    ),
]  # fmt: skip

MODELS = [
    case(CONVERT.replace(" model", " nobody/nothing"), 1, "nobody/nothing", "demo-draft"),
    case(CONVERT.replace(" model", " 'no such: model'"), 1, "model"),
    case(CONVERT, 1, "model/config.json", damage=truncated("model/config.json")),
    case(CONVERT, 1, "`model_type`", damage=edited("model/config.json", model_type=None)),
    case(CONVERT, 1, "martian", damage=edited("model/config.json", model_type="martian")),
    case(CONVERT, 1, "encoder-decoder", damage=edited("model/config.json", model_type="t5")),
    case(CONVERT, 1, "model/model.safetensors", damage=without("model/model.safetensors")),
    case(CONVERT, 1, "model/model.safetensors", damage=file("model/model.safetensors", "")),
    case(
        CONVERT, 1, "model/pytorch_model.bin", "save_pretrained",
        damage=moved("model/model.safetensors", "model/pytorch_model.bin"),
    ),
    case(CONVERT, 1, "model/lost.safetensors", damage=index('{"weight_map": {"a": "lost.safetensors"}}')),
    case(CONVERT.replace(" out ", " engine "), 1, "engine", "`--force`"),
]  # fmt: skip

CHECKPOINTS = [
    case("run --model-dir engine --input-text a", 1, "`specdec run engine`"),
    case(BUILD.replace(" ckpt", " model"), 1, "`specdec convert --model-dir model`"),
    case(BUILD, 1, "dtype", damage=edited("ckpt/config.json", dtype=None)),
    case(BUILD, 1, "ckpt/rank0.safetensors", damage=truncated("ckpt/rank0.safetensors")),
    case(BUILD, 1, "ckpt/rank0.safetensors", "lacks", damage=recorded(foreign_weights("ckpt/rank0.safetensors"))),
    case(BUILD, 1, damage=edited("ckpt/config.json", pretrained_config__intermediate_size=64)),
]

ENGINES = [
    case(RUN, 1, "model_type", damage=edited("engine/config.json", pretrained_config={})),
    case(RUN, 1, "engine/rank0.safetensors", "`specdec build`", damage=truncated("engine/rank0.safetensors")),
    case(RUN, 1, "rank0.safetensors", damage=foreign_weights("engine/rank0.safetensors")),
    case(RUN, 1, "rank0.safetensors", "SHA-256", damage=flipped("engine/rank0.safetensors")),
    case(RUN, 1, "engine/tokenizer.json", damage=truncated("engine/tokenizer.json")),
    case(RUN, 1, "engine/tokenizer.json", damage=lambda d: swap_two_ids(d / "engine" / "tokenizer.json")),
    case(RUN, 1, "saved_tokenizer.json", damage=flipped("engine/saved_tokenizer.json")),
    case(RUN, 1, "rank0.safetensors", damage=edited("engine/config.json", files=[])),
    case(RUN, 1, damage=no_tokenizer),
    case(
        "summarize --engine-dir engine --dataset articles.jsonl --test-hf --hf-model-dir model", 1,
        damage=without("model/model.safetensors"),
    ),
    case("summarize --engine-dir engine --dataset articles.jsonl --test-hf --hf-model-dir demo", 1, "300"),
]  # fmt: skip


CHAT = "chat --engine-dir engine "
TUNE = "tune --engine-dir engine --input-text 'The dog' --max-output-len 4 "

EMPTY_VALUES = [
    case("run --engine-dir '' --input-text a", 2, "`--engine-dir`", "''"),
    case("corpus merge --output new.corpus '' ''", 2, "''"),
    case("run --engine-dir engine a ''", 1, "2", "''"),
]

PLACES = [
    case("build model --quantization int4", 2, "--quantization", "`specdec convert --quantization`"),
    case("build ckpt", 2, "ckpt", "`specdec build --checkpoint-dir ckpt`"),
    case("build model", 2, "model", "`--checkpoint-dir`", "`specdec convert model`"),
    case("convert model --max-seq-len 64", 2, "--max-seq-len", "`specdec build --max-seq-len`"),
    case("check receipts.jsonl", 1, "`specdec check receipts.jsonl demo`", damage=file("receipts.jsonl", "{}")),
    case("regress --traces traces.jsonl", 1, "`specdec regress demo`"),
    case("dmeo a", 2, "`dmeo`", "`specdec run demo`"),
    case("./modl a", 2, "`./modl`", "`specdec run ./model`"),
    case("model a", 2, "`model`", "`specdec run model`"),
    case("rnu model a", 2, "`rnu`", "`run`"),
    case("run model a --system-message b", 2, "--system-message"),
    case("run ./modl a", 1, "modl", "`./model`"),
    case(CONVERT.replace(" model", " x.gguf"), 1, "x.gguf"),
    case(CONVERT.replace(" model", " gguf"), 1, "`gguf/m.gguf`", damage=gguf_only),
    case(CONVERT.replace(" model", " gguf"), 1, "m.gguf, n.gguf", "gguf/m.gguf", damage=two_ggufs),
    case(SUMMARIZE + "--test-hf --hf-model-dir gguf/m.gguf", 1, "`gguf/m.gguf`", damage=gguf_only),
    case(CONVERT + "--use-weight-only --qformat int4_wo", 2, "`--qformat int4`"),
    case(CONVERT + "--qformat int4 --group-size 48", 2, "`--group-size`", "32", "64", "128", "-1", "48"),
    case(CONVERT + "--activations int8", 1),
    case(BUILD + DRAFTS + "--self-draft int4 --self-draft-group-size 0", 2, "0", "64"),
    case(BUILD + "--quality-text notes.txt", 1, "`--quality-text`"),
    case(SUMMARIZE + "--rouge1-max-loss 1", 2, "`--rouge1-max-loss 1`", "`--check-accuracy`"),
    case(CONVERT.replace(" model", " http://x/y"), 1, "http://x/y"),
    case("run --model-dir model/config.json --input-text a", 1, "model/config.json"),
    case(RUN + "--profile engine/config.json", 1, "engine/config.json"),
    case(RUN + "--report r.pdf", 2, "`--report`", "r.pdf", "`--report r.html`"),
    case(SUMMARIZE + "--output-dir engine/out", 2, "`--output-dir`", "engine/out"),
    case(SUMMARIZE + "--dataset-dir nothing", 2, "articles.jsonl"),
    case("chat --model-dir model", 1, "line 1", damage=file("model/chat_template.jinja", "{{ messages | backwards }}")),
    case(CHAT, 1, "engine"),
    case("tune --engine-dir engine-plain --input-text a", 1),
]  # fmt: skip

NUMBERS = [
    case(RUN + "--max-output-len -1", 2, "`--max-output-len`", "1", "-1"),
    case(RUN + f"--max-output-len {10**22}", 1, f"{10**22}"),
    case(RUN + "--logprobs 3", 2, "`--logprobs`", "3", "`--json`"),
    case(RUN + "--logprobs 301 --json", 1, "300", "301"),
    case(RUN + "--num-return-sequences 1000000000", 2, "1024", "1000000000"),
    case(RUN + "--kv-cache-free-gpu-memory-fraction 1.5", 2, "1.0", "1.5"),
    case(RUN + f"--max-tokens-in-paged-kv-cache {10**14}", 1, "free", "`--max-tokens-in-paged-kv-cache`"),
    case(BUILD + "--max-input-len 128", 1, "max_seq_len", "128"),
    case(CONVERT + "--pp-size 2", 2, "--pp-size", "2"),
    case(TUNE + "--max-output-len 500", 1, "1", "2", "500"),
]  # fmt: skip

TOGETHER = [
    case("corpus nonsense", 2, "`nonsense`"),
    case("compare a.json", 2, "`B.json`"),
    case(RUN + "another --input-file notes.txt", 2, "`--input-file`"),
    case(RUN + "--show-tokens --json", 2, "`--show-tokens`", "JSON"),
    case(RUN + "--ngram-config 4,2 --draft-model-dir model", 2, "`--spec-decode-algo DRAFT_TARGET`", "model"),
    case(CHAT + "--num-return-sequences 2", 2, "`--num-return-sequences 2`"),
    case(SUMMARIZE + "--eval-task question", 1, "`--text-column`"),
    case(BUILD + "--dtype float16", 2, "--dtype"),
]

HAND_EDITED = [
    *[
        case(RUN, 1, "engine/config.json", "`specdec build`", damage=by_hand("engine/config.json", **change))
        for change in (
            {"layers": []}, {"dtype": "float16"}, {"pretrained_config__vocab_size": 5},
        )
    ],
    *[
        case(RUN, 1, *words, damage=by_hand("engine/config.json", **change))
        for change, *words in (
            ({"build_config__max_batch_size": -1}, "max_batch_size", "1", "-1"),
            ({"build_config__compiler": "aot"}, "rank0.pt2"),
            ({"mapping__tp_size": 2}, "`specdec build`"),
            ({"mapping": {"world_size": 2, "tp_size": 2, "rank": 0}}, "rank1.safetensors"),
            ({"format_version": 4}, str(ENGINE_FORMAT_VERSION), "4"),
            ({"pretrained_config": []}, "pretrained_config", "[]"),
        )
    ],
    case(RUN, 1, damage=file("engine/config.json", b"\x00\xff")),
    case(RUN, 1, "`eos_token_id`", "'x'", damage=file("engine/generation_config.json", '{"eos_token_id": "x"}')),
    *[
        case(command, 1, f"{place}/{name}", *words, damage=file(f"{place}/{name}", content))
        for command, place in ((CONVERT, "model"), (BUILD, "ckpt"))
        for name, content, *words in (
            ("generation_config.json", "[]", "list"),
            ("generation_config.json", '{"top_p": NaN}', "`top_p`", "nan"),
        )
    ],
    *[
        case(CONVERT, 1, f"model/{name}", damage=file(f"model/{name}", content))
        for name, content in (("tokenizer.json", ""), ("tokenizer_config.json", "{"), ("added_tokens.json", "\0"))
    ],
    case(BATCH, 1, "`temperature`", "'hot'", damage=hot),
    *[
        case(BUILD, 1, *words, damage=edited("ckpt/config.json", **change))
        for change, *words in (
            ({"quantization": "int8"}, "quantization", "str"),
            ({"mapping__tp_size": 2}, "`specdec convert`"),
            ({"mapping": {"world_size": 2, "tp_size": 2, "rank": 0}}, "rank1.safetensors"),
            ({"pretrained_config__num_attention_heads": 3}, "(3)"),
        )
    ],
    case(
        BUILD, 1, "ckpt/config.json", "digest", "`specdec convert`",
        damage=by_hand("ckpt/config.json", dtype="float16"),
    ),
    case(BUILD, 1, "ckpt/tokenizer.json", "SHA-256", damage=flipped("ckpt/tokenizer.json")),
    case(BUILD, 1, "rank0.safetensors", damage=edited("ckpt/config.json", files=[])),
    case("verify model", 1, damage=edited("model/config.json", model_type=None)),
    case("verify /dev/null", 1, "/dev/null"),
    case(BUILD, 1, "ckpt/rank0.safetensors", damage=recorded(file("ckpt/rank0.safetensors", "x" * 5000))),
    *[
        case(CONVERT, 1, *words, damage=by_hand("model/config.json", **change))
        for change, *words in (
            ({"vocab_size": 299}, "config.json"),
            ({"hidden_act": "nope"}, "'nope'"),
            ({"model_type": ["llama"]}, "['llama']"),
        )
    ],
    case(CONVERT, 1, "index.json", damage=index("{")),
]  # fmt: skip


@pytest.fixture(scope="session")
def plain_engine_dir(llama_dir: Path, shared: Path) -> Path:
    return shared_engine(shared / "engines", llama_dir, max_draft_len=0, speculative_decoding_mode="none")


@pytest.fixture(scope="session")
def place(
    tmp_path_factory: pytest.TempPathFactory, llama_dir: Path, llama_checkpoint_dir: Path, llama_uncompiled_dir: Path,
    plain_engine_dir: Path, articles: Path,
) -> Path:  # fmt: skip
    """Copies of what commands take, in a directory that none of them may change."""
    made = tmp_path_factory.mktemp("place") / "cwd"
    sources = {"model": llama_dir, "ckpt": llama_checkpoint_dir, "engine": llama_uncompiled_dir}
    for name, source in (sources | {"engine-plain": plain_engine_dir}).items():
        shutil.copytree(source, made / name)
    shutil.copy(articles, made)
    (made / "nothing").mkdir()
    (made / "notes.txt").write_text("The little dog had a red ball.\n")
    (made / "traces.jsonl").write_text('{"prompt_ids": [5, 6], "output_ids": [8, 9, 8, 9]}\n' * 4)
    return made


@pytest.fixture
def directory(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: copies that a test may damage."""
    shutil.copytree(place, tmp_path / "cwd")
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "cwd"


@pytest.fixture(scope="session")
def untouched(place: Path, draft_engines: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for tests that damage nothing, with all the draft engines."""
    shutil.copytree(place, made := tmp_path_factory.mktemp("untouched") / "cwd")
    for name, source in draft_engines.items():
        shutil.copytree(source, made / name)
    return made


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
        "draft-blocks": make(tokenizer, 300, tokens_per_block=1),
    }


def assert_one_clear_error(result: Result, exit_code: int, words: tuple[str, ...] = ()) -> None:
    plain = " ".join(result.stderr.split())
    for word in words:
        assert word in plain, result.stderr
    assert result.exit_code == exit_code, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in plain
    assert plain.count("error: ") == 1, result.stderr
    assert plain.count("hint: ") == 1, result.stderr


def flags_of_others(hint: str, arguments: list[str]) -> set[str]:
    """Flags that a hint names and the command has not; those of other commands stand behind the command's name."""
    flags = flags_of_commands().get(arguments[1] if arguments[0] == "corpus" else arguments[0], set())
    found = re.findall(r"`--([a-z][a-z=-]*)", hint)
    named = {normalize_name(one.split("=")[0], arguments[0]) for one in found}  # or as it was typed
    return named - flags - {"help"}


@functools.cache
def flags_of_commands() -> dict[str, set[str]]:
    """Commands by Typer's own account."""
    top: Any = get_command(app)
    commands = top.commands | top.commands["corpus"].commands
    return {
        name: {option.removeprefix("--") for parameter in command.params for option in parameter.opts}
        for name, command in commands.items()
    }


def with_another_config(directory: Path) -> None:
    (directory / "nothing" / "config.json").write_text("{}")


OTHER_KINDS = [
    case("build --checkpoint-dir engine --output-dir out", 1, "engine"),
    case("build --checkpoint-dir none --output-dir out", 1, "none"),
    case("run --engine-dir nothing --input-text a", 1, "nothing", damage=with_another_config),
    case("run --engine-dir ckpt --input-text a", 1, "ckpt"),
    case("tune --engine-dir engine --input-text a --batch-size 99", 1, "99"),
    case("tune --engine-dir engine --input-text a --max-draft-len 11", 1, "11"),
]

CASES = [
    *OTHER_KINDS, *WRONG_CONFIG, *PROMPTS, *DRAFTERS, *SAMPLING, *MODELS, *CHECKPOINTS, *ENGINES,
    *EMPTY_VALUES, *PLACES, *NUMBERS, *TOGETHER, *HAND_EDITED,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_mistake_is_one_clear_error_and_leaves_nothing(
    case: Case, specdec: Specdec, untouched: Path, draft_engines: dict[str, Path], request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch, said: Said,
) -> None:  # fmt: skip
    arguments = with_last_values(shlex.split(case.arguments))
    directory = untouched
    if case.damage:
        directory = request.getfixturevalue("directory")
        for name in draft_engines.keys() & set(arguments):
            shutil.copytree(draft_engines[name], directory / name)
        case.damage(directory)
    monkeypatch.chdir(directory)
    before = tree(directory)
    result = specdec(*arguments)
    assert_one_clear_error(result, case.exit_code)
    said(result, *case.values)
    assert flags_of_others(result.stderr.partition("hint: ")[2], arguments) == set()
    assert tree(directory) == before


def test_the_table_starts_from_commands_that_work(
    specdec: Specdec, directory: Path, equal_draft_engine_dir: Path
) -> None:
    shutil.copytree(equal_draft_engine_dir, directory / "draft")
    for command in (CONVERT, BUILD.replace(" out ", " built "), SUMMARIZE + drafting("draft"), RUN + OWN):
        assert specdec(*shlex.split(command)).exit_code == 0


@pytest.mark.parametrize(("name", "value"), [("torch", "1.13.0"), ("device", "cuda")])
def test_engine_for_another_machine_names_both_and_the_command_that_rebuilds_it(
    specdec: Specdec, directory: Path, name: str, value: str, said: Said
) -> None:
    """The command, with the checkpoint put in, makes an engine that runs."""
    if name == "device" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    (directory / "engine").rename(directory / "the engine")
    config_file = directory / "the engine" / "config.json"
    built = json.loads(config_file.read_text())
    here = built["environment"][name]
    edit_json(config_file, **{f"environment__{name}": value})
    arguments = ["run", "--engine-dir", "the engine", "--input-text", "The dog", "--max-output-len", 4]
    result = specdec(*arguments)
    assert_one_clear_error(result, 1)
    said(result, "`the engine`", value, here, varying=(here, torch.backends.cpu.get_cpu_capability()))
    (hint,) = re.findall(r"hint: .*?: specdec (.*)", result.stderr)
    rebuild = shlex.split(hint)
    assert rebuild[rebuild.index("--checkpoint-dir") + 1] == "CKPT"
    assert specdec(*[{"CKPT": "ckpt"}.get(word, word) for word in rebuild]).exit_code == 0
    rebuilt = json.loads(config_file.read_text())
    assert rebuilt["build_config"] == built["build_config"]
    assert specdec(*arguments).exit_code == 0


def test_damaged_compiled_step_is_one_clear_error(
    specdec: Specdec, llama_engine_dir: Path, tmp_path: Path, said: Said
) -> None:
    shutil.copytree(llama_engine_dir, tmp_path / "engine")
    truncated("rank0.pt2")(tmp_path / "engine")
    result = specdec("run", "--engine-dir", tmp_path / "engine", "--input-text", "The dog", "--max-output-len", 2)
    assert_one_clear_error(result, 1)
    said(result, "rank0.pt2", "`specdec build`")


def test_ids_beyond_the_vocabulary_come_from_a_foreign_tokenizer_too(
    specdec: Specdec, make_draft_engine_dir: MakeDraftEngineDir, tokenizer: PreTrainedTokenizerFast, said: Said
) -> None:
    engine_dir = make_draft_engine_dir(make_model("llama", vocab_size=100), tokenizer)
    arguments = ["--engine-dir", engine_dir, "--input-text", "The dog", "--max-output-len", 8]
    result = specdec("run", *arguments)
    assert_one_clear_error(result, 1)
    said(result, 100)


def test_tokenizer_that_panics_says_one_sentence(specdec: Specdec, directory: Path, said: Said) -> None:
    """Rust's own lines, which the library writes past Python, are not shown."""
    shutil.copytree(directory / "model", directory / "other")
    state = json.loads((directory / "other" / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, state["pre_tokenizer"]]}
    (directory / "other" / "tokenizer.json").write_text(json.dumps(state))
    flags = ["--engine-dir", "engine", "--tokenizer-dir", "other", "--max-output-len", 2]
    result = specdec("run", *flags, "--input-text", "x" * 64)
    assert result.exit_code == 1 and [line.split()[0] for line in result.stderr.splitlines()] == ["error:", "hint:"]
    said(result, "retry-limit-in-match")
    assert specdec("run", *flags, "--input-text", "The dog").exit_code == 0


def test_kv_cache_that_is_too_small_is_found_before_the_first_token(
    specdec: Specdec, directory: Path, said: Said
) -> None:
    """Its first steps would fit: 2 blocks hold the prompt, not all of the output."""
    arguments = shlex.split(RUN.replace("--max-output-len 8", "--max-output-len 60"))
    arguments += ["--max-tokens-in-paged-kv-cache", "24", "--streaming"]
    result = specdec(*arguments, "--streaming-interval", 1, "--end-id", 0)
    assert_one_clear_error(result, 1)
    said(result, 24)


def test_draft_engine_that_is_too_short_for_the_last_prompt_is_found_before_the_first_token(
    specdec: Specdec, directory: Path, draft_engines: dict[str, Path], said: Said
) -> None:
    """The first four prompts, which fill a batch, would have been answered."""
    prompts = [argument for text in [*"abcd", "abcdefgh"] for argument in ("--input-text", text)]
    drafter = shlex.split(drafting(str(draft_engines["draft-short"])))
    arguments = ["run", "--engine-dir", "engine", *prompts, *drafter, "--streaming", "--max-output-len"]
    assert specdec(*arguments, 1).exit_code == 0
    result = specdec(*arguments, 2)
    assert_one_clear_error(result, 1)
    said(result, 4, 9, "8 + 2")


def test_tracebacks_are_shown_with_debug_only(
    specdec: Specdec, directory: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    arguments = ["run", "--engine-dir", "none", "--input-text", "x"]
    assert "Traceback" not in specdec(*arguments).stderr
    monkeypatch.setenv("SPECDEC_DEBUG", "")
    with pytest.raises(SpecDecError) as error:
        specdec("--debug", *arguments)
    said(error, "none")
