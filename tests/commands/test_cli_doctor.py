"""`specdec doctor`: faults planted in real engines and settings are diagnosed by name, healthy ones raise no alarm."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from command_line import PROMPTS, Result, Specdec, assert_valid, draft_model, each, edit_json
from draft_models import WITH_DRAFTS, MakeDraftEngineDir
from html_pages import assert_needs_nothing_else
from sentences import Said
from tiny import make_model
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from waiting import HANG_S

from commands.doctor.work import REMEDIES
from runtime.builder.profile import Figures, Profile, ProfileEngine, engine_digest, write_profile
from runtime.checkpoint.bundle import read_bundle
from runtime.drafters.specs import NgramDrafter
from runtime.drafters.speculation import Speculation
from runtime.measure.diagnosis.diagnose import DIAGNOSES

NGRAM = ["--ngram-config", "[4,2,[0]]"]
WITH_COSTS = WITH_DRAFTS | {"measure_costs": True}
NOISY = {"steps_slower_than_built", "memory_slower_than_built", "busy_machine"}
"""Diagnoses that another process of the machine that tests run on may cause for a while."""


@dataclass(frozen=True)
class Ward:
    """Engine and directory in which faults are planted."""

    engine_dir: Path
    directory: Path
    make_engine_dir: MakeDraftEngineDir
    tokenizer: PreTrainedTokenizerFast
    other_tokenizer: PreTrainedTokenizerFast
    monkeypatch: pytest.MonkeyPatch
    specdec: Specdec

    @property
    def vocab_size(self) -> int:
        return len(self.tokenizer)

    def engine_copy(self) -> Path:
        return shutil.copytree(self.engine_dir, self.directory / "engine")

    def model(self, **config: object) -> PreTrainedModel:
        return make_model("llama", vocab_size=self.vocab_size, **config)

    def write_profile(self, acceptance: float) -> Path:
        """Profile of the engine, for `NgramDrafter(4, 2)`."""
        path = self.directory / "profile.json"
        config = read_bundle(self.engine_dir).config
        figures = Figures(4, 1, 2.0, acceptance, 1.0, 1.2, 1.0, 1.2)
        engine = ProfileEngine(str(self.engine_dir), engine_digest(config))
        write_profile(path, Profile(engine, Speculation((NgramDrafter(4, 2),), "fixed"), figures))
        return path


@pytest.fixture
def ward(
    llama_uncompiled_dir: Path, tmp_path: Path, make_draft_engine_dir: MakeDraftEngineDir,
    tokenizer: PreTrainedTokenizerFast, other_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch,
    specdec: Specdec,
) -> Iterator[Ward]:  # fmt: skip
    num_threads, affinity = torch.get_num_threads(), os.sched_getaffinity(0)
    yield Ward(llama_uncompiled_dir, tmp_path, make_draft_engine_dir, tokenizer, other_tokenizer, monkeypatch, specdec)
    torch.set_num_threads(num_threads)
    os.sched_setaffinity(0, affinity)


@contextmanager
def busy(number: int, core: int | None = None) -> Iterator[None]:
    """Run processes that compute and do nothing else, on one core or on any."""
    pin = "" if core is None else f"import os; os.sched_setaffinity(0, {{{core}}})\n"
    end = f"end = time.monotonic() + {10 * HANG_S}"  # of whoever is forgotten
    code = f"{pin}import time; {end}\nprint(flush=True)\nwhile time.monotonic() < end: pass"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(number)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


OF_THE_MACHINE = {"busy_machine", "memory_slower_than_built", "steps_slower_than_built"}
"""May be true of a machine on which other tests run."""


def found_in(result: Result) -> set[str]:
    document = json.loads(result.stdout)
    assert_valid("doctor", document)
    found = {one["name"] for one in document["diagnoses"] if one["status"] == "found"}
    assert document["is_healthy"] == (not found) == (result.exit_code == 0)
    return found


# What is planted, and the arguments that doctor is called with.


def lookups_that_never_match(ward: Ward) -> list[object]:
    never = ["--ngram-config", "[4,90,[0]]", "--min-matching-ngram-size", 90]
    return ["--engine-dir", ward.engine_dir, *never]


def a_drafter_that_loses_its_way(ward: Ward) -> list[object]:
    """It knows what the engine generates, and forgets it."""
    asked = ["--engine-dir", ward.engine_dir, *each("--input-text", PROMPTS)]
    known = ward.specdec("run", *asked, "--max-output-len", 64, "--json").document["requests"]
    outputs = ward.directory / "outputs.json"
    outputs.write_text(json.dumps([one["prompt_ids"] + one["output_ids"] for one in known]))
    ward.monkeypatch.setenv("SPECDEC_TEST_OUTPUTS", str(outputs))
    return [*asked, "--drafter", "custom_drafters:LosesItsWay"]


def a_draft_model_of_the_same_tokens_and_other_merges(ward: Ward) -> list[object]:
    tokenizer = copy.deepcopy(ward.tokenizer)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["merges"] = state["model"]["merges"][:5]
    changed = PreTrainedTokenizerFast(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(json.dumps(state)),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    )
    return ["--engine-dir", ward.engine_dir, *draft_model(ward.make_engine_dir(small(ward), changed))]


def another_chat_template(ward: Ward) -> list[object]:
    engines = []
    for model, template, build in (
        (ward.model(), "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}", WITH_COSTS),
        (small(ward), "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}", {}),
    ):
        tokenizer = copy.deepcopy(ward.tokenizer)
        tokenizer.chat_template = template
        engines.append(ward.make_engine_dir(model, tokenizer, **build))
    return ["--engine-dir", engines[0], *draft_model(engines[1])]


def other_rotary_embeddings(ward: Ward) -> list[object]:
    model = small(ward, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    return ["--engine-dir", ward.engine_dir, *draft_model(ward.make_engine_dir(model))]


def the_target_as_its_own_draft_model(ward: Ward) -> list[object]:
    return ["--engine-dir", ward.engine_dir, *draft_model(ward.make_engine_dir(ward.model()), "[1,[0],[0],False]")]


def an_engine_of_a_faster_processor(ward: Ward) -> list[object]:
    engine = ward.engine_copy()
    costs = json.loads((engine / "config.json").read_text())["step_costs"]
    edit_json(engine / "config.json", step_costs=[cost | {"seconds": 1e-9} for cost in costs])
    return ["--engine-dir", engine]


def one_core_for_two_threads(ward: Ward) -> list[object]:
    torch.set_num_threads(2)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return ["--engine-dir", ward.engine_dir]


def a_cache_for_half_the_requests(ward: Ward) -> list[object]:
    prompts = each("--input-text", PROMPTS[:4])
    return ["--engine-dir", ward.engine_dir, "--max-tokens-in-paged-kv-cache", 120, *prompts]


def reuse_turned_off(ward: Ward) -> list[object]:
    return ["--engine-dir", ward.engine_dir, "--mode", "leader", "--no-kv-cache-enable-block-reuse"]


def fewer_slots_of_states_than_prompts(ward: Ward) -> list[object]:
    """Two are kept, as of a model whose states are large."""
    ward.monkeypatch.setattr("runtime.core.states._KEPT_BYTES", 0)
    model = make_model("lfm2", vocab_size=ward.vocab_size)
    engine = ward.make_engine_dir(model, **WITH_COSTS | {"max_batch_size": 1})
    prompts = each("--input-text", [4 * prompt for prompt in PROMPTS[:4]])
    return ["--engine-dir", engine, *prompts, "--max-output-len", 2]


def blocks_mixed_up_by_the_drafter(ward: Ward) -> list[object]:
    return ["--engine-dir", ward.engine_dir, "--drafter", "custom_drafters:MixesUpBlocks"]


def weights_that_vanish(ward: Ward) -> list[object]:
    model = ward.model()
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.data.copy_(torch.ones(weight.shape, dtype=torch.int32).view(torch.float32))  # the smallest number there is
    return ["--engine-dir", ward.make_engine_dir(model, **WITH_COSTS)]


def small(ward: Ward, **config: object) -> PreTrainedModel:
    return ward.model(num_hidden_layers=1, hidden_size=16, intermediate_size=16, **config)


# What a draft model that does not fit costs is a finding of its own.
COSTLY = {"drafts_longer_than_pays"}
PLANTED: dict[Callable[[Ward], list[object]], tuple[str, set[str]]] = {
    lookups_that_never_match: ("drafter_never_used", set()),
    a_drafter_that_loses_its_way: ("acceptance_falls_with_context", set()),
    a_draft_model_of_the_same_tokens_and_other_merges: ("draft_tokenizer_differs", COSTLY),
    another_chat_template: ("draft_chat_template_differs", COSTLY),
    other_rotary_embeddings: ("draft_rope_differs", COSTLY),
    the_target_as_its_own_draft_model: ("draft_model_is_target", COSTLY),
    an_engine_of_a_faster_processor: ("steps_slower_than_built", set()),
    one_core_for_two_threads: ("more_threads_than_cores", set()),
    a_cache_for_half_the_requests: ("cache_preempts", set()),
    reuse_turned_off: ("reuse_never_hits", set()),
    fewer_slots_of_states_than_prompts: ("state_slots_full", {"state_hits_missed"}),
    blocks_mixed_up_by_the_drafter: ("speculation_changes_output", {"drafter_never_used"}),
    weights_that_vanish: ("denormal_weights", set()),
}
# Of the engine, and of what is drafted; of a cache is shown below, and each judgement has tests in tests/runtime.
ALWAYS_PLANTED = (an_engine_of_a_faster_processor, blocks_mixed_up_by_the_drafter)


@pytest.mark.usefixtures("work_clock")
@pytest.mark.parametrize(
    "plant",
    [pytest.param(one, marks=() if one in ALWAYS_PLANTED else pytest.mark.slow, id=one.__name__) for one in PLANTED],
)
def test_planted_faults_are_diagnosed_by_name(
    plant: Callable[[Ward], list[object]], ward: Ward, specdec: Specdec
) -> None:
    name, may_follow = PLANTED[plant]
    found = found_in(specdec("doctor", *plant(ward), "--json"))
    assert name in found
    assert found - {name} <= may_follow | NOISY


def test_weights_that_do_not_stay_what_they_were_are_diagnosed(ward: Ward, specdec_fork: Specdec) -> None:
    """Runs in a process of its own: no model of it is what it was."""
    arguments = ["--engine-dir", ward.engine_dir, "--drafter", "custom_drafters:DamagesWeights", "--json"]
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = specdec_fork("doctor", *arguments, environment={"PYTHONPATH": paths})
    assert "output_not_repeatable" in found_in(result), result.stderr


def test_others_that_compute_on_the_only_core_are_diagnosed(ward: Ward, specdec: Specdec) -> None:
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    with busy(5, core):
        result = specdec(
            "doctor", "--engine-dir", ward.engine_dir, "--input-text", "a", "--max-output-len", 2, "--json"
        )
    assert "busy_machine" in found_in(result)


def test_every_diagnosis_has_a_remedy_and_is_documented() -> None:
    names = [diagnosis.__name__ for diagnosis in DIAGNOSES]
    assert list(REMEDIES) == names
    chapter = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert [name for name in names if f"| `{name}` |" not in chapter] == []


SUMS = {"num_sent": "num_draft_tokens", "num_accepted": "num_accepted_draft_tokens"} | {
    "num_new_tokens": "num_generated_tokens"
}
EXPLAINED = {
    "fixed": [*NGRAM, "--draft-len-mode", "fixed"],
    "automatic": [*NGRAM, "--draft-len-mode", "auto"],
    "two": [*NGRAM, "--suffix-config", "[4,[0]]", "--drafters", "ngram,suffix", "--draft-len-mode", "fixed"],
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_explained_steps_add_up_to_the_answer(name: str, ward: Ward, specdec: Specdec) -> None:
    """The sums of the steps are the answer's counts, which with fixed lengths are those of `run`."""
    asked = ["--engine-dir", ward.engine_dir, *EXPLAINED[name], "--input-text", "the ball " * 8, "--json"]
    found = specdec("doctor", *asked, "--max-output-len", 40, "--explain").document
    assert_valid("doctor", found)
    steps, total = found["explanation"]["steps"], found["explanation"]["total"]
    assert len(steps) == total["num_steps"] and sum(step["num_sent"] > 0 for step in steps) == total["num_spec_steps"]
    for key, count in SUMS.items():
        assert sum(step[key] for step in steps) == total[count], key
    assert 10 < total["num_generated_tokens"] <= 40 and found["diagnoses"] == []
    assert [step["context_len"] - steps[0]["context_len"] for step in steps[1:]] == [
        sum(step["num_new_tokens"] for step in steps[:i]) for i in range(1, len(steps))
    ]
    for step in steps:
        longest = max((offer["num_tokens"] for offer in step["offers"]), default=0)
        assert step["num_sent"] <= longest and step["reason"]
        assert (step["reason"] == "sent whole") == (step["num_sent"] == longest > 0)
        assert longest == 0 or (step["promised"] is not None) == (name == "automatic")
        assert longest == 0 or step["price"] is not None
    drafters = {offer["drafter"] for step in steps for offer in step["offers"]}
    assert drafters == ({"ngram", "suffix"} if name == "two" else {"ngram"})
    if name != "automatic":
        ran = specdec("run", *asked, "--max-output-len", 40).document["total"]
        assert {key: ran[key] for key in total if key in ran} == {
            key: value for key, value in total.items() if key in ran
        }


@pytest.mark.parametrize("arguments", [["--input-text", "a", "--input-text", "b", *NGRAM], ["--input-text", "a"]])
def test_one_prompt_with_a_drafter_is_explained(arguments: list[str], ward: Ward, specdec: Specdec, said: Said) -> None:
    result = specdec("doctor", "--engine-dir", ward.engine_dir, *arguments, "--explain")
    assert result.exit_code != 0
    said(result)


@pytest.fixture(scope="module")
def deep_pair(make_draft_engine_dir: MakeDraftEngineDir, tokenizer: PreTrainedTokenizerFast) -> tuple[Path, Path]:
    """A target of eight layers of which the last seven add nothing, and its first layer as draft model."""
    target = make_model("llama", vocab_size=len(tokenizer), num_hidden_layers=8)
    draft = make_model("llama", vocab_size=len(tokenizer), num_hidden_layers=1)
    with torch.no_grad():
        for layer in target.model.layers[1:]:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight.zero_()
                linear.bias.zero_()
    kept = {name: value for name, value in target.state_dict().items() if name in draft.state_dict()}
    draft.load_state_dict(kept)
    return make_draft_engine_dir(target, **WITH_COSTS), make_draft_engine_dir(draft, measure_costs=True)


HEALTHY: dict[str, list[object]] = {
    "n-gram": NGRAM,
    "n-gram, automatic lengths": [*NGRAM, "--draft-len-mode", "auto"],
    "suffix matching": ["--suffix-config", "[6,[0]]"],
    "two drafters": [
        *NGRAM, "--min-matching-ngram-size", 2, "--suffix-config", "[4,[0]]", "--drafters", "ngram,suffix",
    ],
    "a profile": ["PROFILE"],
    "a draft model": ["DRAFT MODEL"],
    "layers with states": ["STATES", *NGRAM],
}  # fmt: skip


LONG = {"suffix matching"}
"""Up to 10 tokens whatever they cost: a model whose step takes a third of a millisecond may be faster without them,
and then that is said rightly."""
ALWAYS = ("two drafters",)


@pytest.mark.usefixtures("work_clock")
@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in HEALTHY]
)
def test_healthy_settings_raise_no_alarm(
    name: str, ward: Ward, request: pytest.FixtureRequest, specdec: Specdec
) -> None:
    deep_pair = request.getfixturevalue("deep_pair") if "draft model" in name else None
    allowed = OF_THE_MACHINE | (COSTLY if name in LONG else set())
    assert found_in(healthy(name, ward, deep_pair, specdec)) <= allowed


def healthy(name: str, ward: Ward, deep_pair: tuple[Path, Path] | None, specdec: Specdec) -> Result:
    first, *rest = HEALTHY[name] or [None]
    match first:
        case "PROFILE":
            asked = ["--engine-dir", ward.engine_dir, *each("--input-text", PROMPTS)]
            total = specdec("run", *asked, *NGRAM, "--max-output-len", 64, "--json").document["total"]
            arguments = [*asked, "--profile", ward.write_profile(total["draft_acceptance_rate"])]
        case "DRAFT MODEL":
            assert deep_pair is not None
            arguments = ["--engine-dir", deep_pair[0], *draft_model(deep_pair[1]), *rest]
        case "STATES":  # answers longer than a slot's positions, so that none holds the state of a prompt's end
            engine = ward.make_engine_dir(make_model("lfm2", vocab_size=ward.vocab_size), **WITH_COSTS)
            arguments = ["--engine-dir", engine, *each("--input-text", [4 * prompt for prompt in PROMPTS]), *rest]
        case _:
            arguments = ["--engine-dir", ward.engine_dir, *HEALTHY[name]]
    return specdec("doctor", *arguments, "--json")


def test_findings_are_shown_with_number_and_remedy(ward: Ward, specdec: Specdec) -> None:
    path = ward.directory / "page.html"
    result = specdec("doctor", *reuse_turned_off(ward), "--report", path)
    assert result.exit_code == 1 and "error" not in result.stderr
    lines = result.stdout.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("FOUND  reuse_never_hits: "))
    assert "0 of" in lines[place]
    assert lines[place + 1].strip() == REMEDIES["reuse_never_hits"]
    assert result.stdout.count("reuse_never_hits") == 1  # said once
    assert not any(name in line for name in REMEDIES for line in lines if line.startswith("ok "))
    html = path.read_text()
    assert_needs_nothing_else(html)
    assert re.search(rf"<h1>{ward.engine_dir.name} \(32 bits\): \d findings?</h1>", html)
    finding = re.search(r'<section class="card finding"><h3>reuse never hits</h3><p>(.*?)</p>(.*?)</section>', html)
    assert finding is not None and "0 of" in finding[1] and "<code>--max-tokens-in-paged-kv-cache</code>" in finding[2]
    named = specdec("doctor", *reuse_turned_off(ward), "--quiet").stdout.split()
    assert {"reuse_never_hits"} <= set(named) <= {"reuse_never_hits", *OF_THE_MACHINE}


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["--engine-dir", "ENGINE", "--draft-len-mode", "auto"], 2, "`--draft-len-mode auto`"),
        (["--engine-dir", "ENGINE", "--input-text", "dog " * 200], 1, "max_input_len; 96"),
    ],
)
def test_bad_input_is_one_error(
    arguments: list[object], exit_code: int, message: str, ward: Ward, specdec: Specdec, said: Said
) -> None:
    result = specdec("doctor", *[ward.engine_dir if one == "ENGINE" else one for one in arguments])
    assert result.exit_code == exit_code
    assert "Traceback" not in result.stderr
    said(result, *message.split("; "))
    assert result.stdout == ""
