"""`specdec summarize`, its flags: ROUGE, acceptance and speed on a dataset, beside Hugging Face's `generate`.

The engine answers every batch twice, with the drafter and without, one after the other and each with an empty K/V
cache: `speedup` is the ratio of their times.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from commands.inputs.dataset import Columns, Sample, load_samples
from commands.options.engine_choice import EngineChoice, EngineOptions
from commands.options.expand import expand_groups
from commands.options.shared import ClusterOptions
from commands.output.output import Output, check_new_directory
from commands.summarize.flags import EvaluationOptions, SummarizeInputs, SummarizeResults
from runtime.checkpoint.resolve import read_model_config, resolve_model
from runtime.util.errors import SpecDecError

if TYPE_CHECKING:
    from commands.output.documents.settings import Setup
    from runtime.measure.evaluation.systems import EvaluateEngine


@expand_groups
def summarize(
    engine: EngineOptions,
    inputs: SummarizeInputs,
    evaluation: EvaluationOptions,
    results: SummarizeResults,
    output: Output,
) -> None:
    """Measure quality and speed on a dataset: ROUGE, acceptance, latency and throughput, by category.

    The first sample is a warm-up, and runs once more for the results. Decoding is greedy without sampling flags. With a
    flag of leader mode (V2) it runs in that mode, otherwise in orchestrator mode (V1).
    """
    engine, evaluation = engine.named(), evaluation.with_test()
    inputs.check()
    evaluation.check(inputs.hf_model_dir)
    results.check(test_engine=evaluation.test_engine, test_hf=evaluation.test_hf)
    results.check_files([*inputs.paths, *engine.paths])
    params = evaluation.common.params(seed=evaluation.random_seed, max_tokens=evaluation.output_len)
    choice = engine.choose(params, evaluation.common.max_num_tokens, check_lossless=results.check_lossless)
    choice.check_tokenizer()
    choice.check_output_len()
    if choice.bundle is not None:
        evaluation.check_fits(choice.bundle.config.build_config, choice.mode)
    hf_dir = _hf_dir(inputs, evaluation)
    if results.output_dir is not None:
        check_new_directory(results.output_dir)
    samples = _load_samples(inputs, evaluation, results)

    from commands.options.sessions import open_setup_of_models
    from commands.summarize.work import Systems, evaluate

    with open_setup_of_models(choice, output) as setup:
        if choice.bundle is None:
            evaluation.check_fits(setup.llm.bundle.config.build_config, choice.mode)
        systems = Systems(_evaluate_engine(setup, choice, evaluation.cluster), hf_dir)
        evaluate(setup, systems, samples, inputs, evaluation, results, output)


def _evaluate_engine(setup: "Setup", choice: EngineChoice, cluster: ClusterOptions) -> "EvaluateEngine":
    """Evaluate the engine in this process, or by Ray's workers, each of which opens the same engine for itself."""
    if cluster.ray is None:
        from runtime.measure.evaluation.systems import evaluate_engine

        return evaluate_engine

    from commands.summarize.workers import evaluate_by_workers

    choice = replace(choice, engine_dir=setup.llm.bundle.directory, speculation=setup.session.speculation)
    return evaluate_by_workers(choice, cluster)


def _hf_dir(inputs: SummarizeInputs, evaluation: EvaluationOptions) -> Path | None:
    """Directory of Hugging Face's model, if it is to be run; None otherwise. SpecDecError if there is no such model."""
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
