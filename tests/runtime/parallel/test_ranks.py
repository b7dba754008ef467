"""Ranks compute what one device would; when one of them ends or hangs, all end, and nothing of them is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from shared import MakeEngineDir
from tiny import hf_greedy, make_model, repetitive_prompt

from runtime.drafters.settings import DraftTargetDrafter, NgramDrafter
from runtime.engine import Engine
from runtime.errors import SpecDecError, UsageError
from runtime.llm import LLM
from runtime.parallel import processes
from runtime.parallel.devices import check_device_ids, cores_of, equal_shares
from runtime.parallel.placing import Place
from runtime.params import SamplingParams

ROOT = Path(__file__).parents[3]
PROMPTS = [repetitive_prompt(seed, length) for seed, length in ((1, 30), (2, 60), (3, 7))]
GREEDY = SamplingParams(temperature=0, max_tokens=30)
pytestmark = pytest.mark.filterwarnings("ignore::runtime.errors.SpecDecWarning")


def pids_of(llm: LLM) -> list[int]:
    assert llm.engine.ranks is not None
    return llm.engine.ranks.pids


def has_ended(pid: int) -> bool:
    """A zombie has, whoever's child it was."""
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True


@pytest.fixture(scope="module")
def split_llama(make_engine_dir: MakeEngineDir) -> Path:
    return make_engine_dir(make_model("llama"), tp_size=2)


@pytest.fixture
def llm(split_llama: Path) -> Iterator[LLM]:
    with LLM(split_llama) as opened:
        yield opened


def test_tokens_are_hugging_faces(llm: LLM) -> None:
    """With drafts, in one batch, and with K/V that are found again and copied on every rank."""
    model = make_model("llama")
    wanted = [hf_greedy(model, prompt, 30, eos_token_id=2) for prompt in PROMPTS]
    for drafter in (None, NgramDrafter(6, 2)):
        assert [one.token_ids for one in llm.generate(PROMPTS, GREEDY, drafter=drafter)] == wanted
    shared = PROMPTS[0][:22] + PROMPTS[1][:9]
    (output,) = llm.generate([shared], GREEDY)
    assert output.stats.num_reused_tokens > 20
    assert output.token_ids == hf_greedy(model, shared, 30, eos_token_id=2)


def test_more_ranks_than_kv_heads(make_engine_dir: MakeEngineDir) -> None:
    model = make_model("qwen2")
    with LLM(make_engine_dir(model, tp_size=4)) as llm:
        assert llm.engine.config.layers[0].num_kv_heads == 1
        outputs = llm.generate(PROMPTS[:2], GREEDY, drafter=NgramDrafter(6, 2))
        assert len(pids_of(llm)) == 3
    assert [one.token_ids for one in outputs] == [
        hf_greedy(model, prompt, 30, eos_token_id=2) for prompt in PROMPTS[:2]
    ]


@pytest.mark.slow
def test_one_compiled_step_serves_all_ranks(make_engine_dir: MakeEngineDir) -> None:
    model = make_model("llama")
    engine_dir = make_engine_dir(model, tp_size=2, compiler="aot")
    assert [path.name for path in engine_dir.glob("*.pt2")] == ["rank0.pt2"]
    with LLM(engine_dir) as llm:
        assert llm.engine.config.batch_invariant
        outputs = llm.generate(PROMPTS, GREEDY, drafter=NgramDrafter(6, 2))
    assert [one.token_ids for one in outputs] == [hf_greedy(model, prompt, 30, eos_token_id=2) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("signal_number", "words"), [(signal.SIGKILL, "rank 1 of 2 has ended: SIGKILL"), (signal.SIGSTOP, "was stopped")]
)
def test_a_rank_that_ends_or_hangs_ends_all(llm: LLM, signal_number: signal.Signals, words: str) -> None:
    llm.generate(PROMPTS[:1], GREEDY)
    (pid,) = pids_of(llm)
    os.kill(pid, signal_number)
    start = time.monotonic()
    with pytest.raises(SpecDecError, match=words):
        for _ in range(1000):
            llm.generate(PROMPTS[:1], GREEDY)
    assert time.monotonic() - start < 10
    with pytest.raises(SpecDecError, match=words):
        llm.generate(PROMPTS[:1], GREEDY)
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


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not tell threads' cores")
def test_rank_0_goes_to_the_device_of_the_engine_that_computes() -> None:
    before = os.sched_getaffinity(0)
    first, second = (Place(cores) for cores in cores_of((0, 1)))
    for place, cores in zip((first, second, first), (*cores_of((0, 1)), cores_of((0, 1))[0]), strict=True):
        place.take()
        assert os.sched_getaffinity(0) == set(cores)
    first.leave()
    second.take()
    second.leave()
    assert os.sched_getaffinity(0) == before


CHILD = """
import signal, sys, warnings
warnings.simplefilter("ignore")
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell begins in the background ignores it
from runtime.llm import LLM
from runtime.params import SamplingParams
from pathlib import Path
with LLM(Path(sys.argv[1])) as llm:
    print(*llm.engine.ranks.pids, flush=True)
    while True:
        llm.generate([[5, 6, 7, 8] * 5], SamplingParams(max_tokens=100))
"""


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_rank_0_ends(split_llama: Path, signal_number: signal.Signals) -> None:
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(split_llama)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    ) as child:
        assert child.stdout is not None
        pids = [int(word) for word in child.stdout.readline().split()]
        assert len(pids) == 1 and not has_ended(pids[0])
        child.send_signal(signal_number)
        end = time.monotonic() + 10
        try:
            child.wait(10)
        finally:
            child.kill()
    while not all(has_ended(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert all(has_ended(pid) for pid in pids)
    assert set(os.listdir("/dev/shm")) <= before


def test_a_rank_that_cannot_begin_is_told(split_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_START", "raise SystemExit(7)")
    with pytest.raises(SpecDecError, match="rank 1 of 2 has ended: exit code 7"):
        Engine.open(split_llama)


@pytest.mark.parametrize(
    ("device_ids", "words"),
    [
        ((0,), "tp_size 2: it has 1, \\[0\\]"),
        ((4, 5, 6, 7), "tp_size 2: it has 4, \\[4, 5, 6, 7\\]"),
        ((1, 1), "named twice.*: \\[1, 1\\]"),
    ],
)
def test_each_rank_has_a_device_of_its_own(split_llama: Path, device_ids: tuple[int, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Engine.open(split_llama, device_ids)


@pytest.mark.parametrize("tp_size", [1, 4])
def test_an_engine_is_split_as_it_is(split_llama: Path, tp_size: int) -> None:
    with pytest.raises(UsageError, match=f"tp_size 2, and not: tensor_parallel_size {tp_size}"):
        LLM(split_llama, tensor_parallel_size=tp_size)


def test_cores_are_shared_out_equally() -> None:
    assert check_device_ids(None, 3) == (0, 1, 2)
    assert equal_shares([0, 1, 2, 3], (0, 1)) == [[0, 1], [2, 3]]
    assert equal_shares([0, 1, 2, 3, 4], (0, 1)) == [[0, 1], [2, 3, 4]]
    assert equal_shares([2, 3, 6, 7], (2, 3)) == [[6], [7]]
    assert equal_shares([0, 1], (0, 1, 2, 3)) == [[0], [0], [1], [1]]
