"""`specdec batch`: a file of requests becomes a file of results, however often it is interrupted."""

from commands.inputs.paths import check_readable
from commands.options.batch import BatchFiles, BatchModelOptions
from commands.options.cluster import ClusterOptions
from commands.options.engine import EngineOptions
from commands.options.expand import expand_groups
from commands.output import Output, check_output_files
from runtime.params import SamplingParams


@expand_groups
def batch(
    files: BatchFiles, engine: EngineOptions, model: BatchModelOptions, cluster: ClusterOptions, output: Output
) -> None:
    """Answer a file of requests, with speculation in a running batch, on this machine or with Ray on many.

    Started again after a kill or Ctrl-C it goes on where it was, and in the end the results are the same bytes.
    """
    files.check()
    model.defaults.check()
    cluster.check()
    engine.check_is_leader("a batch")
    check_readable([files.input_file])
    check_output_files([files.output_file], [files.input_file, *engine.leader.paths])
    choice = engine.choose(SamplingParams(), model.max_num_tokens, "leader")

    from commands.batching.start import start_batch

    start_batch(files, choice, tuple(model.served_model_name or [choice.model_name]), model.defaults, cluster, output)
