"""`specdec batch`: its flags, and the checks that need no torch."""

from dataclasses import dataclass, field
from typing import Annotated

from commands.batch.flags import BatchDefaults, BatchFiles
from commands.batch.lines import look_through
from commands.options.engine_choice import EngineOptions, KVDiskOptions
from commands.options.expand import expand_groups
from commands.options.shared import ClusterOptions
from commands.output.help import INPUT, RUNTIME, option
from commands.output.output import Output, check_output_files, check_readable
from runtime.core.params import SamplingParams


@dataclass(frozen=True)
class BatchModelOptions:
    """Name and settings of the model."""

    served_model_name: Annotated[
        list[str] | None,
        option(
            INPUT,
            "Name of the model in requests; repeatable, the first appears in results.",
            shown="the directory's name",
        ),
    ] = None
    max_num_tokens: Annotated[
        int | None, option(RUNTIME, "Prompt tokens per step (chunked prefill).", shown="512", min=1)
    ] = None
    defaults: BatchDefaults = field(default_factory=BatchDefaults)


@expand_groups
def batch(
    files: BatchFiles,
    engine: EngineOptions,
    disk: KVDiskOptions,
    model: BatchModelOptions,
    cluster: ClusterOptions,
    output: Output,
) -> None:
    """Answer a file of requests, with speculation in a running batch, on this machine or with Ray on many.

    After a kill or Ctrl-C the same command resumes, and the finished file of results has the same bytes.
    """
    engine = engine.named()
    files.check()
    defaults = model.defaults.checked()
    cluster.check()
    engine.check_is_leader("a batch")
    check_readable([files.input_file])
    outputs = [files.output_file, *([] if files.receipts is None else [files.receipts])]
    check_output_files(outputs, [files.input_file, *engine.leader.paths])
    choice = engine.choose(SamplingParams(), model.max_num_tokens, "leader", answers_many=True)
    choice = choice.with_disk(disk).with_pools(engine.speculation)
    choice.check_tokenizer()
    look_through(files.input_file, job="")  # a wrong line is named before the engine is built for it

    from commands.batch.work import start_batch

    start_batch(files, choice, tuple(model.served_model_name or [choice.model_name]), defaults, cluster, output)
