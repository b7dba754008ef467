"""Automatic draft lengths are every command's default but orchestrator mode's, and `--draft-len-mode fixed` says other.

Prices that are so high that nothing can pay, written into an engine, tell the two apart: automatic lengths send
nothing.
"""

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Specdec, edit_json
from sentences import Said
from shared import record_anew

from runtime.drafters.speculation import Speculation
from specdec_cli import (
    LLM,
    DraftTargetDrafter,
    NgramDrafter,
    SamplingParams,
    SpecDecError,
    SpecDecWarning,
    SuffixDrafter,
)

PROMPT = "the ball the ball the ball the ball the"
SUFFIX = ["--suffix-config", "4"]
EDIT = Callable[..., Path]


@pytest.fixture(scope="module")
def with_costs(llama_engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> EDIT:
    """A copy of the engine with seconds of its steps by the tokens of a row; without any, if there are none."""

    def copy(seconds: Callable[[int], float] | None) -> Path:
        directory = tmp_path_factory.mktemp("priced") / "engine"
        shutil.copytree(llama_engine_dir, directory)
        costs = json.loads((directory / "config.json").read_text())["step_costs"]
        edited = [cost | {"seconds": seconds(cost["num_tokens"])} for cost in costs] if seconds else []
        edit_json(directory / "config.json", step_costs=edited)
        record_anew(directory)
        return directory

    return copy


@pytest.fixture(scope="module")
def dear_dir(with_costs: EDIT) -> Path:
    """Every token of a row takes as long as a whole step: no draft can pay."""
    return with_costs(lambda num_tokens: float(num_tokens))


@pytest.fixture(scope="module")
def unpriced_dir(with_costs: EDIT) -> Path:
    return with_costs(None)


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        (["--ngram-config", "[4,2,[0]]"], "fixed"),
        (["--mode", "leader", *SUFFIX], "auto"),
        (["--spec-decode-algo", "SUFFIX"], "auto"),
        (["--spec-decode-algo", "NGRAM", "--draft-len-mode", "fixed"], "fixed"),
        (["--draft-len-mode", "auto", *SUFFIX], "auto"),
    ],
)
def test_default_of_run(specdec: Specdec, dear_dir: Path, flags: list[str], mode: str) -> None:
    asked = ["--max-output-len", 12, "--end-id", 299, "--input-text", PROMPT, "--json"]
    document = specdec("run", "--engine-dir", dear_dir, *flags, *asked).document
    assert document["settings"]["draft_len_mode"] == mode
    assert (document["total"]["num_draft_tokens"] > 0) == (mode == "fixed")


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_default_of_chat_and_serve(
    command: str, specdec: Specdec, dear_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses of the session do not matter here: the work is given it and ends. Old answers are of use to a server."""
    found: list[Speculation] = []
    monkeypatch.setattr("sys.stdin", io.StringIO("/quit\n"))
    monkeypatch.setattr(
        "commands.serve.work.serve_setup", lambda setup, *others: found.append(setup.session.speculation)
    )
    monkeypatch.setattr(
        "commands.chat.work.Conversation.__init__",
        lambda self, setup, *others: found.append(setup.session.speculation),
    )
    for flags in (SUFFIX, [*SUFFIX, "--draft-len-mode", "fixed"], ["--spec-decode-algo", "AUTO"]):
        specdec(command, "--engine-dir", dear_dir, *flags)
    assert [one.draft_len_mode for one in found] == ["auto", "fixed", "auto"]
    assert found[2].names == ["suffix", "answers"][: 2 if command == "serve" else 1]


LOST = re.compile(
    r"drafts of a fixed length lost: .* (0\.\d\d)x as fast as no drafter; `--draft-len-mode auto` .* 1\.00x"
)


def test_a_fixed_length_that_lost_says_what_automatic_ones_would_have_given(
    specdec: Specdec, dear_dir: Path, with_costs: EDIT
) -> None:
    """Nothing is sent where nothing pays, which is as fast as no drafter; where tokens are free nothing is said."""
    asked = ["--max-output-len", 12, "--end-id", 299, "--input-text", PROMPT]

    def shown(engine_dir: Path, *flags: str) -> str:
        result = specdec("run", "--engine-dir", engine_dir, *SUFFIX, *asked, *flags)
        assert result.exit_code == 0, result.stderr
        return " ".join(result.stdout.split())

    lost = LOST.search(shown(dear_dir))
    assert lost is not None and float(lost[1]) < 0.9
    assert "fixed length" not in shown(with_costs(lambda num_tokens: 1.0))
    assert "fixed length" not in shown(dear_dir, "--draft-len-mode", "auto")


def test_default_of_python(dear_dir: Path) -> None:
    asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(dear_dir) as llm:
        (automatic,) = llm.generate(PROMPT, asked, drafter=SuffixDrafter())
        (fixed,) = llm.generate(PROMPT, asked, drafter=SuffixDrafter(), draft_len_mode="fixed")
        assert automatic.token_ids == fixed.token_ids
        assert automatic.stats.num_draft_tokens == 0 < fixed.stats.num_draft_tokens
        assert llm.session(DraftTargetDrafter(dear_dir, use_logits=True)).speculation.draft_len_mode == "fixed"
    with LLM(dear_dir, mode="orchestrator") as llm:
        assert llm.session(NgramDrafter()).speculation.draft_len_mode == "fixed"


def test_drafts_whose_price_is_not_known_are_sent_whole_and_it_is_said(unpriced_dir: Path, said: Said) -> None:
    with LLM(unpriced_dir) as llm:
        with pytest.warns(SpecDecWarning) as warned:
            assert llm.session(NgramDrafter()).speculation.draft_len_mode == "fixed"
        said(warned)
        with pytest.raises(SpecDecError) as error:
            llm.session(NgramDrafter(), "auto")
        said(error)
