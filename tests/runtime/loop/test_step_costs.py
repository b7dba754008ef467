"""Steps of an engine made of a model are measured when somebody asks what they cost, and the first answer does not."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest
from sentences import Said
from tiny import hf_greedy
from transformers import PreTrainedModel

from runtime.checkpoint.bundle import read_bundle
from runtime.checkpoint.cached_engines import remove_unused_entry
from runtime.loop import step_costs
from specdec_cli import LLM, NgramDrafter, SamplingParams, SpecDecWarning

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
ASKED = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
Opened = Callable[[], AbstractContextManager[LLM]]


@pytest.fixture
def opened(llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Opens the model, of which an engine is made the first time."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))

    @contextmanager
    def open_model() -> Iterator[LLM]:
        with LLM(llama_dir, compiler="none", max_seq_len=64) as llm:
            yield llm

    return open_model


def test_first_answer_waits_for_no_measurements(opened: Opened, llama: PreTrainedModel) -> None:
    expected = hf_greedy(llama, PROMPT, 12)
    with opened() as llm:
        assert llm.generate(PROMPT, ASKED)[0].token_ids == expected
        assert llm.bundle.has_costs and llm.bundle.config.step_costs == ()
        output = llm.generate(PROMPT, ASKED, drafter=NgramDrafter())[0]
        assert output.token_ids == expected
        assert llm.session(NgramDrafter()).speculation.draft_len_mode == "auto"
        measured = llm.bundle.config
        assert measured.step_costs and measured.host_s > 0
        assert llm.engine.config == measured
    with opened() as llm:  # which was measured before
        assert set(measured.step_costs) <= set(llm.bundle.config.step_costs)
        assert llm.generate(PROMPT, ASKED)[0].token_ids == expected


def test_no_answer_begins_with_what_was_measured(
    opened: Opened, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt begins like that of `measure_host`, which leaves early here, as it does where steps take long."""
    monkeypatch.setattr(step_costs, "_MAX_HOST_S", 0.0)
    prompt = [0, *PROMPT]
    with opened() as llm:
        measures: list[Callable[[], object]] = [
            llm.measure_costs,
            lambda: step_costs.time_cell(llm.engine, 1, 16, 2),
            lambda: llm.engine.occupy_cache(range(1, 9)),
        ]
        for measure in measures:
            assert llm.generate(prompt, ASKED)[0].token_ids == hf_greedy(llama, prompt, 12)
            measure()
            after = llm.generate(prompt, ASKED)[0]
            assert after.token_ids == hf_greedy(llama, prompt, 12)
            assert after.stats.num_reused_tokens == 0


def test_what_is_damaged_is_measured_again(opened: Opened) -> None:
    with opened() as llm:
        llm.measure_costs()
        directory = llm.bundle.directory
    (kept,) = directory.parent.glob("*.costs")
    kept.write_bytes(kept.read_bytes()[:-1])
    assert read_bundle(directory).config.step_costs == ()
    with opened() as llm:
        llm.measure_costs()
        assert read_bundle(directory).config.step_costs == llm.bundle.config.step_costs != ()


def test_costs_go_with_their_engine(opened: Opened) -> None:
    with opened() as llm:
        llm.measure_costs()
        directory = llm.bundle.directory
    assert list(directory.parent.glob("*.costs"))
    assert remove_unused_entry(directory)
    assert not list(directory.parent.glob("*.costs"))


def test_nothing_is_measured_beside_an_answer(opened: Opened, llama: PreTrainedModel, said: Said) -> None:
    """Measuring would overwrite its K/V."""
    with opened() as llm, closing(llm.stream(PROMPT, ASKED)) as pieces:
        tokens = list(next(pieces).token_ids)
        with pytest.warns(SpecDecWarning) as warned:
            assert llm.session(NgramDrafter()).speculation.draft_len_mode == "fixed"
        said(warned)
        for piece in pieces:
            tokens += piece.token_ids
    assert tokens == hf_greedy(llama, PROMPT, 12)
