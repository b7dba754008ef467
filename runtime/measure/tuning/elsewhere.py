"""Step costs of another machine: what its `build` wrote into an engine's `config.json`."""

from pathlib import Path
from typing import Any

from runtime.checkpoint.checksums import CONFIG
from runtime.checkpoint.config import MachineSpeed, parse
from runtime.checkpoint.costs import CostModel, MeasuredCosts, kept_costs
from runtime.util.errors import SpecDecError
from runtime.util.reading import parse_json, read_utf8

_FIELDS = ("step_costs", "host_s", "self_draft_costs")


def read_costs(path: Path) -> tuple[CostModel, MachineSpeed | None]:
    """The costs in a JSON file such as an engine's `config.json`, or in its directory, and the machine's speed, if the
    file has it. SpecDecError without costs.
    """
    file = path / CONFIG if path.is_dir() else path
    data = parse_json(read_utf8(file), file)
    kept = kept_costs(file.parent.absolute()) if isinstance(data, dict) else None
    if not isinstance(data, dict) or not (data.get("step_costs") or kept):
        raise SpecDecError(
            f"the file has no step costs: {file}",
            hint="give the config.json of an engine that was built there, or that has drafted there",
        )
    found: dict[str, Any] = {name: data[name] for name in _FIELDS if name in data}
    costs = kept or parse(MeasuredCosts, found, str(file))
    machine = None if data.get("machine") is None else parse(MachineSpeed, data["machine"], str(file))
    return CostModel(costs.step_costs, costs.host_s), machine
