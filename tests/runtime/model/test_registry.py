"""Every model that transformers knows is converted by its config, or refused in a sentence."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from forked import Forks
from tiny import run_convert
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from runtime.util.errors import SpecDecError
from scripts.tools import families

# An exception's name, or what Python and torch say in one.
INNER_ERROR = re.compile(r"\w(Error|Exception)\b|object has no attribute|unexpected keyword|meta tensor|Traceback")


def default_config(model_type: str) -> dict[str, Any]:
    """Config as transformers writes it: the family's own, small where it has a language model, or its name alone."""
    config_class = CONFIG_MAPPING[model_type]
    has_text = model_type in families.FAMILIES or hasattr(config_class, "text_config")
    for make in (lambda: families.small_config(model_type), config_class)[0 if has_text else 1 :]:
        try:
            return json.loads(make().to_json_string(use_diff=False))
        except Exception:  # transformers' own: some configs cannot be made or written without arguments
            continue
    return {"model_type": model_type}


ROWS = re.findall(r"^\| ([\w.-]+) \| (equal|refused|not tried)", families.PAGE.read_text(), re.MULTILINE)
DOCUMENTED = dict(ROWS)
RECORDED = families.recorded()


@pytest.mark.one_in(48)
@pytest.mark.parametrize("model_type", sorted(CONFIG_MAPPING_NAMES))
def test_every_config_is_taken_or_refused_in_a_sentence(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(default_config(model_type)))
    with pytest.raises(SpecDecError) as error:
        run_convert(tmp_path / "model", tmp_path / "out")
    said = f"{error.value.message}\n{error.value.hint}"
    assert said.count("\n") == 1 and not INNER_ERROR.search(said), said
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    if DOCUMENTED.get(model_type) == "equal":  # it is taken: nothing is missing but the weights
        assert error.value.message.startswith("file is missing: ")


# Those that differ from the families of tests/tiny.py in structure, and what becomes of them: "", equal; or why not.
SAMPLE = {
    "afmoe": "",  # experts beside a dense layer, a gate after attention, windows in every other layer
    "deepseek_v3": "",  # keys and values of low rank, heads of two widths, groups of experts
    "gemma3n_text": "",  # layers that share keys and values, inputs per layer
    "llava": "",  # a language model inside, of a class of its own
    "fuyu": "",  # one under a name of its own
    "qwen2_5_vl": "",  # one that has no class of its own
    "qwen3_vl_moe": "",  # one whose twin has a switch that it has not
    "jamba": "",  # a scan of each number of a state by itself, and layers that hand nothing on to it
    "jetmoe": "",  # linear layers of attention and of its feed-forward layer that a token chooses
    "moshi": "transformers keeps 8 keys of layer 0, and its attention asks for all: moshi",
    "roberta": "the model counts positions from its padding token's id, not from 0: roberta",
    "mllama": "",  # layers of cross-attention, idle on text
    "glm4v_moe": "",  # a language model inside that transformers has no head for, whose experts are in pieces
    "muse_glimmer": "",  # one with logits that are multiplied and capped
    "step3p7": "",  # one of more attention heads in some layers, whose experts transformers' interface is not offered
    "ernie4_5_vl_moe": "",  # experts of texts and of images, which files have as one list
    "unlimited_ocr": "transformers has no class for the language model inside unlimited_ocr alone",
}


ALWAYS = ("llava", "qwen2_5_vl", "mllama", "moshi", "unlimited_ocr")


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family in ALWAYS else pytest.mark.slow) for family in SAMPLE]
)
def test_a_sample_of_families_is_equal_to_hugging_face_or_refused(family: str, tmp_path: Path) -> None:
    outcome = families.try_family(family, tmp_path, lengths=families.SHORT_LENGTHS)
    assert outcome.verdict == ("refused" if SAMPLE[family] else "equal"), outcome.why
    assert outcome.why.startswith(SAMPLE[family])


STEP_BEFORE_AND_AFTER = """
import torch
from transformers.models.step3p7 import modeling_step3p7 as theirs
from runtime.model.causal_heads import has_causal_class

config = theirs.Step3p7TextConfig(num_local_experts=4, hidden_size=8, moe_intermediate_size=8)
before = theirs.Step3p7Experts(config)
for weight in before.parameters():
    torch.nn.init.normal_(weight)
given = torch.randn(3, 8), torch.tensor([[0, 1], [1, 2], [3, 0]]), torch.rand(3, 2)
expected = before(*given)
assert has_causal_class("step3p5")
after = theirs.Step3p7Experts(config)
after.load_state_dict(before.state_dict())
print(torch.equal(before(*given), expected), torch.equal(after(*given), expected), after.config is config)
"""


def test_a_model_of_transformers_that_was_made_before_goes_on(forks: Forks) -> None:
    """Step's experts get an interface for implementations when the first of ours is asked for."""
    done = forks.run(program=STEP_BEFORE_AND_AFTER)
    assert (done.returncode, done.stdout) == (0, "True True True\n"), done.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::runtime.util.errors.SpecDecWarning")
@pytest.mark.parametrize("family", [family for family, found in RECORDED.items() if found.ways])
def test_a_family_runs_in_the_ways_of_the_table(family: str, tmp_path: Path) -> None:
    assert families.try_family(family, tmp_path, ways=tuple(RECORDED[family].ways)) == RECORDED[family]


def test_the_table_of_the_documentation_has_every_family_as_it_was_found() -> None:
    assert families.table(list(RECORDED.values())) in families.PAGE.read_text()
    assert list(RECORDED) == [family for family, _ in ROWS]
    if transformers.__version__ == families.recorded_with():  # another one has other families
        assert list(RECORDED) == list(families.FAMILIES)
    assert {found.verdict for found in RECORDED.values()} == {"equal", "refused", "not tried"}
    assert {found.verdict for found in RECORDED.values() if found.ways} == {"equal"}
    assert families.POPULARITY.keys() <= RECORDED.keys()
    assert {family: DOCUMENTED[family] for family in SAMPLE} == {
        family: "refused" if why else "equal" for family, why in SAMPLE.items()
    }
