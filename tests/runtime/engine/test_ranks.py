"""Ranks compute what one device would; when one of them ends or hangs, all end, and nothing of them is left."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

import pytest
import torch
from ranks_as_threads import WAYS, together
from sentences import Said
from shared import once
from tiny import FAMILIES, build_tiny, hf_greedy, make_model, repetitive_prompt
from torch import Tensor
from transformers import PreTrainedModel
from waiting import HANG_S, wait_until

from runtime.builder.convert import convert
from runtime.core.batch import Batch, Row, pack
from runtime.core.kv_cache import KVPool
from runtime.core.params import SamplingParams
from runtime.drafters.specs import DraftTargetDrafter, NgramDrafter
from runtime.engine import rank_processes
from runtime.engine.devices import cores_of
from runtime.engine.engine import Engine
from runtime.kernels.groups import Way
from runtime.kernels.ops import load_kernels
from runtime.llm import LLM
from runtime.loop.serving import LoopLimits, ServingLoop
from runtime.loop.session import Session
from runtime.model.attention import KERNEL, PAGED
from runtime.model.model import ModelKind, Step, load_model, probe_config, split_config
from runtime.model.pretrained import parse_pretrained_config
from runtime.util.errors import SpecDecError, UsageError

ROOT = Path(__file__).parents[3]
PROMPTS = [repetitive_prompt(seed, length) for seed, length in ((1, 30), (2, 60), (3, 7))]
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
CPU = torch.device("cpu")
SPLIT = [family for family in FAMILIES if family not in ("gpt2", "opt", "lfm2", "qwen3.5")]
pytestmark = pytest.mark.filterwarnings("ignore::runtime.util.errors.SpecDecWarning")


def pids_of(llm: LLM) -> list[int]:
    assert llm.engine.ranks is not None
    return llm.engine.ranks.pids


def has_ended(pid: int) -> bool:
    """A zombie has, whoever's child it was."""
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True


@contextmanager
def no_compiler() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", "/nowhere/g++")
        yield


@pytest.fixture(scope="module")
def split_llama(shared: Path) -> Path:
    """Without kernels: its ranks reach each other by gloo."""

    def make(directory: Path) -> None:
        make_model("llama").save_pretrained(directory / "model")
        with no_compiler():
            build_tiny(directory / "model", directory, tp_size=2)

    return once(shared / "split-llama", make) / "engine"


@pytest.fixture(scope="module")
def llm(split_llama: Path) -> Iterator[LLM]:
    with no_compiler():
        opened = LLM(split_llama)
    with opened:
        yield opened


def test_tokens_are_hugging_faces(llm: LLM, split_llama: Path) -> None:
    """Compared with drafts, in one batch, and with K/V that are found again and copied on every rank.

    Neither to build the engine nor to open it a compiler was needed.
    """
    assert not (split_llama / "kernels.so").exists()
    model = make_model("llama")
    wanted = [hf_greedy(model, prompt, NUM_TOKENS, eos_token_id=2) for prompt in PROMPTS]
    for drafter in (None, NgramDrafter(6, 2)):
        assert [one.token_ids for one in llm.generate(PROMPTS, GREEDY, drafter=drafter)] == wanted
    shared = PROMPTS[0][:22] + PROMPTS[1][:9]
    (output,) = llm.generate([shared], GREEDY)
    assert output.stats.num_reused_tokens > 20
    assert output.token_ids == hf_greedy(model, shared, NUM_TOKENS, eos_token_id=2)


def logits_of_ranks(model: PreTrainedModel, work_dir: Path, tp_size: int, way: Way, batch: Batch) -> list[Tensor]:
    """Logits of each rank, all of them threads of this process."""
    model.save_pretrained(work_dir / "model")
    checkpoint, shapes = work_dir / "checkpoint", probe_config(model.config, split_config(model.config, tp_size))
    config = convert(work_dir / "model", checkpoint, None, replace=False, progress=lambda *_: None, tp_size=tp_size)
    splitting, attention = split_config(model.config, tp_size), KERNEL if way == "shared" else PAGED
    pretrained = parse_pretrained_config(config.pretrained_config, "config.json")
    weights = [checkpoint / f"rank{rank}.safetensors" for rank in range(tp_size)]
    kind = ModelKind(pretrained, torch.float32, attention, splitting=splitting)
    steps = [Step(load_model(kind, path)) for path in weights]

    @torch.inference_mode()
    def compute(rank: int) -> Tensor:
        pool = KVPool(shapes.layers, 20, 4, torch.float32, CPU)
        return steps[rank](*batch, *pool.tensors)

    return together(way, tp_size, compute)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("family", SPLIT)
def test_logits_are_hugging_faces(family: str, tp_size: int, way: Way, tmp_path: Path, kernels: Path) -> None:
    """Ranks repeat K/V heads where there are 2 for 4 of them."""
    load_kernels(kernels)
    model = make_model(family)
    prompts = [repetitive_prompt(1, 30), repetitive_prompt(2, 19)]
    rows = [Row(prompt, 0, list(range(1 + 10 * i, 11 + 10 * i)), len(prompt)) for i, prompt in enumerate(prompts)]
    found = logits_of_ranks(model, tmp_path, tp_size, way, pack(rows, 4, CPU))
    assert all(torch.equal(one, found[0]) for one in found)
    with torch.no_grad():
        wanted = torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in prompts])
    torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-4)


def test_a_rank_that_ends_ends_all(split_engine_dir: Path, said: Said) -> None:
    llm = LLM(split_engine_dir)
    llm.generate(PROMPTS[:1], GREEDY)
    (pid,) = pids_of(llm)
    os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + HANG_S
    with pytest.raises(SpecDecError) as raised:
        while time.monotonic() < until:
            llm.generate(PROMPTS[:1], GREEDY)
    said(raised, "rank 1 of 2")
    with pytest.raises(SpecDecError) as raised:
        llm.generate(PROMPTS[:1], GREEDY)
    said(raised)
    loop = ServingLoop(Session(llm.engine, "leader"), LoopLimits(10), lambda answers: None)
    loop.start()
    assert not loop.takes_requests
    with pytest.raises(SpecDecError) as raised:
        loop.submit([])
    said(raised)
    loop.stop(0)
    llm.close()
    assert has_ended(pid)


def test_a_draft_model_has_ranks_of_its_own(llm: LLM, split_llama: Path) -> None:
    """The same model drafts what the target says: all of it is accepted."""
    drafter = DraftTargetDrafter(split_llama, 4, device_ids=(1, 0))
    outputs = llm.generate(PROMPTS, GREEDY, drafter=drafter)
    assert [one.token_ids for one in outputs] == [one.token_ids for one in llm.generate(PROMPTS, GREEDY)]
    assert all(one.stats.draft_acceptance_rate == 1 for one in outputs)
    if hasattr(os, "sched_getaffinity"):  # the draft engine's is another
        assert os.sched_getaffinity(0) == set(cores_of((0, 1))[0])


def test_ctrl_c_ends_the_answer_and_not_the_engine(llm: LLM) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt = Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt.start()
            while True:
                llm.generate(PROMPTS, GREEDY)
    finally:
        interrupt.join()
        signal.signal(signal.SIGINT, before)
    model = make_model("llama")
    assert llm.generate(PROMPTS[:1], GREEDY)[0].token_ids == hf_greedy(model, PROMPTS[0], NUM_TOKENS, eos_token_id=2)


CHILD = """
import signal, sys, warnings
warnings.simplefilter("ignore")
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell begins in the background ignores it
from runtime.llm import LLM
from runtime.core.params import SamplingParams
from runtime.engine import rank_processes
from pathlib import Path
rank_processes._PYTHON = sys.argv[2]
with LLM(Path(sys.argv[1])) as llm:
    print(*llm.engine.ranks.pids, flush=True)
    while True:
        llm.generate([[5, 6, 7, 8] * 5], SamplingParams(max_tokens=100))
"""


def test_nothing_is_left_when_rank_0_ends(split_engine_dir: Path) -> None:
    """Both ranks are forks where there are some, which begin sooner."""
    python = rank_processes._PYTHON
    with subprocess.Popen(
        [python, "-c", CHILD, str(split_engine_dir), python],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    ) as child:
        assert child.stdout is not None
        pids = [int(word) for word in child.stdout.readline().split()]
        assert len(pids) == 1 and not has_ended(pids[0])
        child.send_signal(signal.SIGKILL)
        try:
            child.wait(HANG_S)
        finally:
            child.kill()
    wait_until(lambda: all(has_ended(pid) for pid in pids))
    assert [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in (child.pid, *pids))] == []


def test_a_rank_that_cannot_begin_is_told(split_llama: Path, monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    monkeypatch.setattr(rank_processes, "_START", "raise SystemExit(7)")
    with pytest.raises(SpecDecError) as raised:
        Engine.open(split_llama)
    said(raised, "1", "2", "7")


@pytest.mark.parametrize(
    ("device_ids", "words"), [((4, 5, 6, 7), "2; 4; [4, 5, 6, 7]"), ((1, 1), "[1, 1]"), ((-1, 0), "[-1, 0]")]
)
def test_each_rank_has_a_device_of_its_own(
    split_llama: Path, device_ids: tuple[int, ...], words: str, said: Said
) -> None:
    with pytest.raises(UsageError) as raised:
        Engine.open(split_llama, device_ids)
    said(raised, *words.split("; "))
