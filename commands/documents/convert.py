"""The JSON document of `specdec convert`."""

from pydantic import Field

from commands.documents.records import Record
from runtime.config import CheckpointConfig, Measure, Size


class ConvertDocument(Record):
    """What `specdec convert --json` prints."""

    checkpoint_dir: str
    model_dir: str = Field(description="as given")
    checkpoint: CheckpointConfig
    size_bytes: Size = Field(description="of all files")
    convert_time_s: Measure
