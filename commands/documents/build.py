"""The JSON document of `specdec build`."""

from pydantic import Field

from commands.documents.records import Record
from runtime.config import EngineConfig, Measure, Size


class BuildDocument(Record):
    """What `specdec build --json` prints."""

    engine_dir: str
    engine: EngineConfig
    size_bytes: Size = Field(description="of all files")
    build_time_s: Measure
    phase_times_s: dict[str, Measure] = Field(description="seconds of each phase, in order")
