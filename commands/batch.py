"""`specdec batch`: a file of requests becomes a file of results, however often it is interrupted."""

from commands.inputs.paths import check_models, check_readable
from commands.options.batch import BatchFiles, BatchModelOptions
from commands.options.cluster import ClusterOptions
from commands.options.expand import expand_groups
from commands.options.kv_cache import KVCacheOptions
from commands.options.leader import LeaderOptions
from commands.options.speculation import SpeculationOptions
from commands.output import Output, check_output_files
from runtime.errors import UsageError
from runtime.params import SamplingParams


@expand_groups
def batch(
    files: BatchFiles,
    model: BatchModelOptions,
    cluster: ClusterOptions,
    speculation: SpeculationOptions,
    kv_cache: KVCacheOptions,
    leader: LeaderOptions,
    output: Output,
) -> None:
    """Answer a file of requests, with speculation in a running batch, on this machine or with Ray on many.

    Started again after a kill or Ctrl-C it goes on where it was, and in the end the results are the same bytes.
    """
    files.check()
    model.defaults.check()
    cluster.check()
    if leader.mode == "orchestrator":
        raise UsageError("a batch runs in leader mode: `--mode orchestrator`", hint="leave the flag out")
    chosen = leader.chosen(model.engine_dir, speculation, is_either=False)
    kv_cache.check(is_leader=True, disable_reuse=leader.disable_kv_cache_reuse)
    check_readable([files.input_file])
    check_output_files([files.output_file], [files.input_file, *leader.paths])
    chosen = chosen.or_profile(speculation.profile, model.engine).check()
    check_models(model.engine, leader.model_dir, model.tokenizer_dir, chosen.speculation)

    from commands.batching.start import start_batch
    from commands.sessions import SessionOptions
    from runtime.engine import DEFAULT_MAX_NUM_TOKENS

    cache = kv_cache.config(disable_reuse=leader.disable_kv_cache_reuse)
    num_tokens = model.max_num_tokens or DEFAULT_MAX_NUM_TOKENS
    session = SessionOptions(model.engine, model.tokenizer_dir, chosen, SamplingParams(), cache, "leader", num_tokens)
    names = model.names(leader.model_dir)
    start_batch(files, session, leader.models(), names, model.defaults, cluster, output)
