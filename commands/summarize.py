"""`specdec summarize`: ROUGE, acceptance and speed on a dataset, beside Hugging Face's `generate`.

The engine answers every batch twice, with the drafter and without, one after the other and each with an empty K/V
cache: `speedup` compares those two.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from commands.inputs.dataset import Columns, Sample, load_samples
from commands.inputs.paths import check_models
from commands.options.cluster import ClusterOptions
from commands.options.expand import expand_groups
from commands.options.kv_cache import KVCacheOptions
from commands.options.leader import LeaderOptions
from commands.options.speculation import SpeculationOptions
from commands.options.summarize import EvaluationOptions, SummarizeInputs, SummarizeResults
from commands.output import Output, check_new_directory
from runtime.errors import SpecDecError
from runtime.models import read_model_config, resolve_model

if TYPE_CHECKING:
    from commands.documents.settings import Setup
    from commands.sessions import SessionOptions
    from runtime.evaluation.systems import EvaluateEngine


@expand_groups
def summarize(
    inputs: SummarizeInputs,
    evaluation: EvaluationOptions,
    speculation: SpeculationOptions,
    kv_cache: KVCacheOptions,
    leader: LeaderOptions,
    results: SummarizeResults,
    output: Output,
) -> None:
    """Measure quality and speed on a dataset: ROUGE, acceptance, latency and throughput, by category.

    The first sample is a warm-up and is run once more. Greedy unless sampling is asked for. In orchestrator mode (V1)
    unless flags of leader mode (V2) are given.
    """
    chosen = leader.chosen(inputs.engine_dir, speculation)
    kv_cache.check(is_leader=leader.loop == "leader", disable_reuse=leader.disable_kv_cache_reuse)
    inputs.check()
    evaluation.check(inputs.hf_model_dir)
    results.check(test_engine=evaluation.test_engine, test_hf=evaluation.test_hf)
    chosen = chosen.or_profile(speculation.profile, inputs.engine).check(check_lossless=results.check_lossless)
    results.check_files([*inputs.paths, *speculation.paths, *leader.paths])
    params = evaluation.common.params(seed=evaluation.random_seed, max_tokens=evaluation.output_len)
    bundle = check_models(inputs.engine, leader.model_dir, inputs.tokenizer_dir, chosen.speculation)
    if bundle is not None:
        evaluation.check_fits(bundle.config.build_config, leader.loop)
    hf_dir = _hf_dir(inputs, evaluation)
    if results.output_dir is not None:
        check_new_directory(results.output_dir)
    samples = _load_samples(inputs, evaluation, results)

    from commands.evaluating import Systems, evaluate
    from commands.sessions import SessionOptions, open_setup_of_models
    from runtime.engine import DEFAULT_MAX_NUM_TOKENS

    cache = kv_cache.config(disable_reuse=leader.disable_kv_cache_reuse)
    num_tokens = evaluation.common.max_num_tokens or DEFAULT_MAX_NUM_TOKENS
    options = SessionOptions(inputs.engine, inputs.tokenizer_dir, chosen, params, cache, leader.loop, num_tokens)
    with open_setup_of_models(leader.models(), options, output) as setup:
        if bundle is None:
            evaluation.check_fits(setup.llm.engine.config.build_config, leader.loop)
        systems = Systems(_evaluate_engine(setup, options, leader, evaluation.cluster), hf_dir)
        evaluate(setup, systems, samples, inputs, evaluation, results, output)


def _evaluate_engine(
    setup: "Setup", options: "SessionOptions", leader: LeaderOptions, cluster: ClusterOptions
) -> "EvaluateEngine":
    """In this process, or by workers, who open the engines that were opened here."""
    if cluster.ray is None:
        from runtime.evaluation.systems import evaluate_engine

        return evaluate_engine

    from commands.batching.evaluating import evaluate_by_workers

    chosen = options.chosen.with_speculation(setup.session.speculation)
    options = replace(options, engine_dir=setup.llm.bundle.directory, chosen=chosen)
    return evaluate_by_workers(options, leader.models() if leader.model_dir is not None else None, cluster)


def _hf_dir(inputs: SummarizeInputs, evaluation: EvaluationOptions) -> Path | None:
    """Hugging Face's model, where it is to be run; SpecDecError if there is none."""
    if inputs.hf_model_dir is None or not evaluation.test_hf:  # TensorRT-LLM's command lines have it always
        return None
    directory = resolve_model(inputs.hf_model_dir)
    read_model_config(directory)
    return directory


def _load_samples(inputs: SummarizeInputs, evaluation: EvaluationOptions, results: SummarizeResults) -> list[Sample]:
    """The samples to answer; SpecDecError if references are needed and there are none."""
    samples = load_samples(
        inputs.dataset,
        eval_task=inputs.eval_task,
        dataset_dir=inputs.dataset_dir,
        max_samples=evaluation.max_ite * evaluation.batch_size,
        seed=evaluation.random_seed,
        columns=Columns(inputs.text_column, inputs.reference_column),
    )
    if results.check_accuracy and all(sample.reference is None for sample in samples):
        raise SpecDecError(
            f"`--check-accuracy` compares outputs with references, and there are none: {inputs.dataset}",
            hint="leave the flag out, or add a column `reference`",
        )
    return samples
