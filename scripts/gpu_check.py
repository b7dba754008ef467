"""Check of a GPU in one command of at most nine minutes: a table, and a report that grows as parts end.

    python -m scripts.gpu_check [--output DIR] [--install]

It starts from the root of a copy of the tree, and needs no installation of specdec. On a bare machine with Python 3.11:

    python3 -m venv .venv && .venv/bin/python -m scripts.gpu_check --install

Where torch is there already, `python3 -m venv --system-site-packages .venv` keeps it: `--install` asks pip for the
packages of pyproject.toml that are missing, and for torch only where there is none. The time of pip is counted.

Each part is a process of its own with a limit, so that a crash or a hang is a row of the table, in order of worth. A
part that does not fit into what is left of `--budget-s` is named as not run. Before each part and after it report.json
and report.txt are written into `--output` ($OUT, or gpu-report): a run that is killed leaves all that has ended.

`--device cpu --scale tiny` runs the same parts without a GPU, as the tests do. Tokens have to be Hugging Face's in
float32; whether logits have the same bits with drafts and in batches is reported, and no part fails by it.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
_LEAST_S = 5.0
"""A part is not begun with less than this, or less than half of its limit, left."""
_MODULES = {"rouge-score": "rouge_score", "huggingface-hub": "huggingface_hub", "prompt_toolkit": "prompt_toolkit"}
Status = Literal["passed", "failed", "ended by a signal", "over its time", "not run", "running"]
Values = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Arguments of all parts. `work` is a directory for models and engines, which is removed at the end."""

    device: str
    scale: str
    work: Path


@dataclass
class Row:
    """Result of a part: `values` are what it measured, `said` the end of what it wrote where it failed."""

    part: str
    status: Status
    wall_s: float = 0.0
    values: Values = field(default_factory=dict)
    said: str = ""


@dataclass(frozen=True)
class Part:
    """A function of this module that a child runs, with at most `limit_s` seconds."""

    run: Callable[[Setting], Values]
    limit_s: float


def machine(setting: Setting) -> Values:
    """Versions, the device, and the parts of torch that are missing."""
    import torch
    import transformers

    found: Values = {"python": platform.python_version(), "torch": torch.__version__}
    found |= {"transformers": transformers.__version__, "cuda": torch.version.cuda}
    if setting.device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        free, whole = torch.cuda.mem_get_info()
        found |= {"gpu": torch.cuda.get_device_name(), "capability": f"{major}.{minor}", "bfloat16": major >= 8}
        found |= {"memory_bytes": whole, "free_bytes": free}
    return found


def demo(setting: Setting) -> Values:
    """The shipped demo in float32 with `none`: Hugging Face's tokens, and the same logits with drafts."""
    return _compare(setting, _demo_dir(), "float32")


def one_b(setting: Setting) -> Values:
    """A model of Llama-3.2-1B's shape in bfloat16 with random weights: the same tokens and logits with drafts."""
    return _compare(setting, _random_llama(setting), "bfloat16", has_reference=False)


def batches(setting: Setting) -> Values:
    """Four prompts of the demo at once have the tokens that each has by itself; whether their logits have its bits."""
    with _engine(setting, _demo_dir(), "float32") as engine:
        alone = [_answer(engine, [prompt])[0] for prompt in _prompts()]
        engine.clear_cache()
        beside = _answer(engine, _prompts())
    _expect([tokens for tokens, _ in beside] == [tokens for tokens, _ in alone], "a batch has other tokens")
    return {"same_bits": _same_bits(beside, alone)}


def two_engines(setting: Setting) -> Values:
    """Two engines answer in one process, and one that is opened after both were closed has the first one's memory."""
    with _engine(setting, _demo_dir(), "float32", fraction=0.3) as first:
        expected, num_tokens = _answer(first, _prompts()), first.num_cache_tokens
        with _engine(setting, _demo_dir(), "float32", fraction=0.3) as second:
            _expect(_answer(second, _prompts())[0][0] == expected[0][0], "the second engine has other tokens")
            _expect(_answer(first, _prompts())[0][0] == expected[0][0], "the first has others beside the second")
    with _engine(setting, _demo_dir(), "float32", fraction=0.3) as third:
        share = third.num_cache_tokens / num_tokens
    _expect(share > 0.9, f"closed engines leave the next one {share:.2f} of the first one's cache")
    return {"cache_tokens": num_tokens, "share_for_the_next": share}


def memory(setting: Setting) -> Values:
    """A K/V cache larger than the memory is one sentence, in Python and on the command line."""
    from runtime.engine.engine import Engine, KVCacheConfig
    from runtime.util.errors import SpecDecError

    with _engine(setting, _demo_dir(), "float32") as engine:
        directory = engine.directory
    assert directory is not None
    try:
        Engine.open(directory, kv_cache=KVCacheConfig(max_tokens=10**12, free_gpu_memory_fraction=1.0)).close()
        is_told, said = setting.device == "cuda", "it was made as large as fits"  # there the memory is the limit
    except SpecDecError as error:
        is_told, said = True, error.message
    _expect(is_told, "a cache larger than the memory was opened")
    command = [sys.executable, "-m", "specdec_cli", "run", "--engine-dir", str(directory), "hello"]
    command += ["--max-new-tokens", "4", "--kv-cache-free-gpu-memory-fraction", "0.0000001"]
    command += ["--max-tokens-in-paged-kv-cache", str(10**12)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    _expect("Traceback" not in ended.stderr, ended.stderr[-500:])
    _expect(ended.returncode == 1, f"the command ended with {ended.returncode}")
    return {"said": said, "command_said": ended.stderr.strip().splitlines()[-2:]}


def times(setting: Setting) -> Values:
    """Tokens per second beside Hugging Face's `generate`, plain and with prompt lookup, in turns."""
    import torch
    from transformers import AutoModelForCausalLM

    from runtime.drafters.ngram import NgramLookup

    model_dir, length = _random_llama(setting), 64 if setting.scale == "full" else 8
    prompt = _prompts()[0]
    tokens = torch.tensor([prompt], device=setting.device)
    found: dict[str, list[float]] = {}
    loaded: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    model: Any = loaded.to(setting.device).eval()
    with _engine(setting, model_dir, "bfloat16", fraction=0.3) as engine:

        def theirs(**options: Any) -> None:
            mask = torch.ones_like(tokens)
            model.generate(
                tokens, attention_mask=mask, max_new_tokens=length, min_new_tokens=length, do_sample=False,
                pad_token_id=0, **options,
            )  # fmt: skip

        def ours(drafter: Any) -> None:
            engine.clear_cache()
            _answer(engine, [prompt], drafter, length)

        calls = {
            "transformers": theirs,
            "transformers, prompt lookup": lambda: theirs(prompt_lookup_num_tokens=10),
            "specdec": lambda: ours(None),
            "specdec, n-gram lookup": lambda: ours(NgramLookup(2)),
        }
        for turn in range(4):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                if turn > 0:  # the first makes what later ones find
                    found.setdefault(name, []).append(length / (time.perf_counter() - start))
    return {"tokens_per_second": {name: sorted(rates)[len(rates) // 2] for name, rates in found.items()}}


PARTS = {
    "machine": Part(machine, 40),
    "demo": Part(demo, 90),
    "1b": Part(one_b, 120),
    "batches": Part(batches, 60),
    "two-engines": Part(two_engines, 60),
    "memory": Part(memory, 60),
    "times": Part(times, 120),
}
"""Parts in order of worth: the last ones are left out first."""


def _expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise SystemExit(otherwise)


def _compare(setting: Setting, model_dir: Path, dtype: str, *, has_reference: bool = True) -> Values:
    """Check tokens with n-gram drafts against those without, and these against Hugging Face's."""
    from runtime.drafters.ngram import NgramLookup

    with _engine(setting, model_dir, dtype) as engine:
        plain = [_answer(engine, [prompt])[0] for prompt in _prompts()]
        engine.clear_cache()
        drafted = [_answer(engine, [prompt], NgramLookup(2))[0] for prompt in _prompts()]
    same = sum(one[0] == other[0] for one, other in zip(plain, drafted, strict=True))
    found: Values = {"outputs": len(plain), "same_with_drafts": same, "same_bits": _same_bits(plain, drafted)}
    if has_reference:
        expected = _hugging_face(setting, model_dir)
        found["as_transformers"] = sum(one[0] == other for one, other in zip(plain, expected, strict=True))
        _expect(found["as_transformers"] == len(plain), f"other tokens than Hugging Face's: {found}")
        _expect(same == len(plain), f"other tokens with drafts: {found}")
    return found


def _prompts() -> list[list[int]]:
    """Four of 60 ids each that repeat themselves, so that n-gram lookup drafts."""
    return [[3 + (7 * i + k * k) % 29 for i in range(20)] * 3 for k in range(4)]


def _demo_dir() -> Path:
    return ROOT / "runtime" / "demo" / "target"


def _random_llama(setting: Setting) -> Path:
    """A model of Llama-3.2-1B's shape, or in a hundredth of its size, with random weights made on the device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = setting.work / "llama"
    if (directory / "config.json").exists():
        return directory
    is_full = setting.scale == "full"
    sizes = (2048, 8192, 16, 32, 8, 128256) if is_full else (64, 96, 2, 4, 2, 256)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = LlamaConfig(**dict(zip((*names, "vocab_size"), sizes, strict=True)), tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.cpu().save_pretrained(directory)
    return directory


@contextmanager
def _engine(
    setting: Setting, model_dir: Path, dtype: Any, *, compiler: Any = "none", fraction: float = 0.5
) -> Iterator[Any]:
    """The model's engine, built where no part before has."""
    import torch

    from runtime.builder.build import BuildEffort, build_engine
    from runtime.builder.convert import convert
    from runtime.checkpoint.config import BuildConfig
    from runtime.engine.engine import Engine, KVCacheConfig

    engine_dir = setting.work / f"engine-{model_dir.name}-{dtype}-{compiler}"
    if not (engine_dir / "config.json").exists():
        checkpoint = setting.work / f"checkpoint-{model_dir.name}-{dtype}"
        convert(model_dir, checkpoint, dtype, replace=True, progress=lambda done, total: None)
        build = BuildConfig(compiler, 4, 512, 1024, 10, 32, "draft_tokens_external")
        device, effort = torch.device(setting.device), BuildEffort(measure_costs=False)
        build_engine(checkpoint, engine_dir, build, device, replace=True, phase=lambda name: None, effort=effort)
        shutil.rmtree(checkpoint)
    with Engine.open(engine_dir, kv_cache=KVCacheConfig(free_gpu_memory_fraction=fraction)) as engine:
        yield engine


def _answer(
    engine: Any, prompts: list[list[int]], drafter: Any = None, num_tokens: int = 32
) -> list[tuple[list[int], Any]]:
    """Each prompt's output, and its logits (num_tokens, vocab)."""
    from runtime.core.request import Request
    from runtime.loop.scheduler import generate

    requests = [Request(i, tuple(prompt), num_tokens, keep_logits=True) for i, prompt in enumerate(prompts)]
    done = {sequence.request.id: sequence for sequence, _ in generate(engine, requests, drafter, 10)}
    return [(list(done[i].output_tokens), done[i].logits) for i in range(len(prompts))]


def _same_bits(some: list[tuple[list[int], Any]], others: list[tuple[list[int], Any]]) -> bool:
    """True if they have the same tokens and the same logits, bit for bit."""

    def are_equal(one: Any, other: Any) -> bool:
        return len(one) == len(other) and all(row.equal(its) for row, its in zip(one, other, strict=True))

    pairs = zip(some, others, strict=True)
    return all(one[0] == other[0] and are_equal(one[1], other[1]) for one, other in pairs)


def _hugging_face(setting: Setting, model_dir: Path) -> list[list[int]]:
    """Greedy outputs in float32, without an end."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model: Any = loaded.to(setting.device).eval()
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in _prompts():
        tokens = torch.tensor([prompt], device=setting.device)
        made = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=32, do_sample=False, pad_token_id=0
        )
        outputs.append(made[0, len(prompt) :].tolist())
    return outputs


@dataclass
class Report:
    """Rows so far, in files that are written anew with each."""

    output: Path
    arguments: Values
    rows: list[Row] = field(default_factory=list)

    def write(self) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        document = {"written": datetime.now(UTC).isoformat(timespec="seconds"), "arguments": self.arguments}
        document["parts"] = [asdict(row) for row in self.rows]
        for name, text in (("report.json", json.dumps(document, indent=2)), ("report.txt", self.table())):
            (self.output / f".{name}").write_text(text + "\n")
            (self.output / f".{name}").replace(self.output / name)

    def table(self) -> str:
        lines = [f"{'part':<12} {'result':<18} {'seconds':>8}  found"]
        for row in self.rows:
            found = ", ".join(f"{name} {value}" for name, value in row.values.items()) or row.said.strip()[-200:]
            lines.append(f"{row.part:<12} {row.status:<18} {row.wall_s:>8.1f}  {' '.join(found.split())}")
        return "\n".join(lines)


def install_missing() -> list[str]:
    """Packages of pyproject.toml that cannot be imported; torch only where there is none."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {one: one.partition(">")[0].partition("=")[0] for one in wanted}
    return [one for one, name in names.items() if find_spec(_MODULES.get(name, name)) is None]


def run_part(report: Report, name: str, command: list[str], limit_s: float) -> Row:
    """Run a part's child in a process group of its own, which ends with the limit."""
    row = Row(name, "running")
    report.rows.append(row)
    report.write()
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryDirectory() as directory:
        answer = Path(directory) / "values.json"
        variables = {"PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1", "GPU_CHECK_ANSWER": str(answer)}
        environment, nothing = os.environ | variables, subprocess.DEVNULL
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=nothing, stdout=said, stderr=said, start_new_session=True
        )
        try:
            code = child.wait(limit_s)
            row.status = "passed" if code == 0 else "ended by a signal" if code < 0 else "failed"
        except subprocess.TimeoutExpired:
            row.status = "over its time"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # whatever it has begun
            child.wait()
        said.seek(0)
        row.said = said.read()[-4000:]
        row.values = json.loads(answer.read_text()) if answer.exists() else {}
    row.wall_s = time.monotonic() - start
    report.write()
    return row


def run_all(report: Report, arguments: argparse.Namespace) -> None:
    """Every part that fits into the budget, in order."""
    ends_at = time.monotonic() + arguments.budget_s
    if arguments.install and (missing := install_missing()):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", *missing]
        run_part(report, "packages", pip, ends_at - time.monotonic())
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as work:
        for name in arguments.parts.split(",") if arguments.parts else PARTS:
            limit_s = min(PARTS[name].limit_s, left := ends_at - time.monotonic())
            if left < max(_LEAST_S, PARTS[name].limit_s / 2):
                report.rows.append(Row(name, "not run", said=f"{left:.0f} s of the budget are left"))
                report.write()
                continue
            own = ["--part", name, "--device", arguments.device, "--scale", arguments.scale, "--work", work]
            row = run_part(report, name, [sys.executable, "-m", "scripts.gpu_check", *own], limit_s)
            print(f"{name}: {row.status}, {row.wall_s:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or "gpu-report"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--scale", choices=["full", "tiny"], default="full")
    parser.add_argument("--budget-s", type=float, default=530.0)
    parser.add_argument("--parts", help="some of them, with commas: " + ",".join(PARTS))
    parser.add_argument("--install", action="store_true", help="have pip install what is missing")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)  # of a child
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        values = PARTS[arguments.part].run(Setting(arguments.device, arguments.scale, arguments.work))
        Path(os.environ["GPU_CHECK_ANSWER"]).write_text(json.dumps(values))
        return
    if unknown := set(arguments.parts.split(",") if arguments.parts else ()) - PARTS.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    said = {name: str(value) for name, value in vars(arguments).items() if name not in ("part", "work")}
    report = Report(arguments.output, said)
    run_all(report, arguments)
    print(report.table())
    sys.exit(0 if all(row.status == "passed" for row in report.rows) else 1)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # also where it is run as a file
    main()
