"""`config.json` survives a round trip, and every damage to it is an error that names the file and the key."""

import copy
import dataclasses
import json
import typing
from typing import Any

import pytest
from sentences import Said
from tiny import make_build

from runtime.builder.profile import Figures, ProfileEngine
from runtime.checkpoint.config import (
    ENGINE_FORMAT_VERSION,
    CheckpointConfig,
    EngineConfig,
    Environment,
    FileRecord,
    LayerShape,
    LogitsCheck,
    Mapping,
    Quality,
    StepCost,
    as_json,
    parse,
)
from runtime.util.errors import SpecDecError

ENGINE = EngineConfig(
    pretrained_config={"model_type": "llama", "rope_parameters": {"rope_theta": 1e4}},
    dtype="bfloat16",
    build_config=make_build(),
    layers=(LayerShape(0, 2, 8, 8, None), LayerShape(1, 2, 8, 8, 512)),
    vocab_size=32,
    environment=Environment("2.13.0", "5.23.0", "cpu", "x86_64 AVX512"),
    logits_check=LogitsCheck(1e-6, 2e-7, 1e-4),
    weights_digest="00ff",
    files=(FileRecord("rank0.safetensors", 8, "00ff"),),
    step_costs=(StepCost(1, 0, 1, 0.001),),
    quality=Quality(64, 0.01, 0.98, "demo", "text.txt"),
    compiler_note=None,
)


@pytest.mark.parametrize(
    "config",
    [ENGINE, CheckpointConfig({"model_type": "gpt2"}, "float16", mapping=Mapping())],
    ids=["engine", "checkpoint"],
)
def test_round_trip_through_json(config: Any) -> None:
    assert parse(type(config), json.loads(json.dumps(as_json(config))), "config.json") == config


NEWER = ENGINE_FORMAT_VERSION + 1
DAMAGES = [
    pytest.param(("format_version",), NEWER, (ENGINE_FORMAT_VERSION, NEWER), id="newer"),
    pytest.param(("format_version",), None, (ENGINE_FORMAT_VERSION, None), id="no version"),
    pytest.param(("surprise",), 1, ("surprise",), id="unknown key"),
    pytest.param(("vocab_size",), "32", ("vocab_size`", "'32'"), id="text for a number"),
    pytest.param(("vocab_size",), 3.5, ("vocab_size`", 3.5), id="fraction for a count"),
    pytest.param(("dtype",), "int8", ("dtype`", "'int8'"), id="not one of the choices"),
    pytest.param(("layers",), 3, ("layers`", 3), id="number for a list"),
    pytest.param(("layers",), [5], ("layers`", "int"), id="number for an object in a list"),
    pytest.param(("layers", 0, "sliding_window"), "8", ("sliding_window`", "'8'"), id="text for an optional number"),
    pytest.param(("build_config",), [], ("build_config`", "list"), id="list for an object"),
    *(
        pytest.param(
            path,
            value,
            (f"{path[-1]}`", bound, *([value] if len(str(value)) < 20 else [])),
            id=f"{path[-1]} {str(value)[:20]}",
        )
        for path, value, bound in (
            (("build_config", "max_batch_size"), -1, "1"),
            (("build_config", "max_draft_len"), 600, "256"),
            (("layers", 1, "sliding_window"), 0, "1"),
            (("host_s",), float("nan"), "nan"),
            (("host_s",), 1e308, "1,000,000"),
            (("quality", "mean_kl"), float("inf"), "inf"),
            (("step_costs", 0, "seconds"), 10**400, "1" + 56 * "0"),
        )
    ),
]


@pytest.mark.parametrize(("path", "value", "quoted"), DAMAGES)
def test_damaged_config_is_an_error(path: tuple[Any, ...], value: Any, quoted: tuple[object, ...], said: Said) -> None:
    data = json.loads(json.dumps(as_json(ENGINE)))
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(SpecDecError) as error:
        parse(EngineConfig, data, "dir/config.json")
    versions = (ENGINE_FORMAT_VERSION + 1, ENGINE_FORMAT_VERSION) if path == ("format_version",) else ()
    said(error, "dir/config.json", *quoted, varying=versions)


@pytest.mark.parametrize("key", ["pretrained_config", "layers"])
def test_missing_key_is_an_error(key: str, said: Said) -> None:
    data = copy.deepcopy(as_json(ENGINE))
    del data[key]
    with pytest.raises(SpecDecError) as error:
        parse(EngineConfig, data, "config.json")
    said(error, "`config.json`", key)


def unbounded_numbers(kind: Any) -> set[str]:
    """The fields of a config, and of what is in it, that may be any number."""
    found = set()
    for field in dataclasses.fields(kind):
        left = [typing.get_type_hints(kind, include_extras=True)[field.name]]
        while left:
            hint = left.pop()
            if dataclasses.is_dataclass(hint):
                found |= unbounded_numbers(hint)
            elif hint in (int, float):
                found.add(f"{kind.__name__}.{field.name}")
            elif typing.get_origin(hint) is not typing.Annotated:
                left += typing.get_args(hint)
    return found


@pytest.mark.parametrize("kind", [EngineConfig, CheckpointConfig, ProfileEngine, Figures])
def test_every_number_has_bounds(kind: Any) -> None:
    assert unbounded_numbers(kind) <= {f"{kind.__name__}.format_version"}
