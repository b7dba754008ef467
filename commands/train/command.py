"""`specdec train`, its flags: makes an EAGLE-3 head, or trains a head further, on the model's own answers."""

from pathlib import Path

from commands.inputs.prompts import read_prompts
from commands.options.expand import expand_groups
from commands.output.output import Output, check_readable
from commands.train.flags import TrainInputs, TrainOptions, TrainResults
from runtime.checkpoint.resolve import read_model_config, resolve_model
from runtime.drafters.heads.head_config import HeadConfig, read_head
from runtime.text.trace_lines import check_trace_lines
from runtime.util.errors import SpecDecError, UsageError

_MOST_STEPS = 8
"""Most tokens that a head drafts in a row during training."""


@expand_groups
def train(inputs: TrainInputs, options: TrainOptions, results: TrainResults, output: Output) -> None:
    """Train a drafting head on the model's own answers: a new EAGLE-3 head, or an existing head further. Or adapt a
    small model, so that it drafts several tokens in one pass.

    An existing head is an EAGLE-3 head or the MTP head in the model's own checkpoint. The model itself does not change.
    Its hidden states are computed once, and kept in the working directory. A new head is weak: published heads have
    seen hundreds of thousands of answers. If the command is stopped, the same command resumes.
    """
    inputs = inputs.named()
    if not inputs.traces and inputs.input_file is None:
        raise UsageError(
            "nothing to train with", hint="`--traces` has recorded answers, `--input-file` prompts to answer"
        )
    if options.learning_rate is not None and not 0 < options.learning_rate <= 1:
        raise UsageError(f"`--learning-rate` is not between 0 and 1: {options.learning_rate}", hint="try 0.0005")
    if results.engines.copy is not None:
        raise UsageError("`--self-draft` has no meaning for a training", hint="leave it out")
    results.engines.check()
    results.check()
    check_readable(inputs.paths)
    for path in [*(inputs.traces or []), *([] if inputs.held_out_traces is None else [inputs.held_out_traces])]:
        check_trace_lines(path)  # not found out when the model is open
    prompts = read_prompts([], inputs.input_file) if inputs.input_file is not None else []
    read_model_config(resolve_model(inputs.target))
    given: HeadConfig | Path | None = None
    if inputs.parallel is not None:
        _check_parallel(inputs, options)
        given = resolve_model(inputs.parallel)
        read_model_config(given)
    elif inputs.draft_model_dir is not None:
        given = read_head(inputs.draft_model_dir)
        _check_head(given, inputs, options)

    from commands.train.work import start_training

    start_training(inputs, options, results, given, prompts, output)


def _check_parallel(inputs: TrainInputs, options: TrainOptions) -> None:
    """UsageError for flags of heads beside `--parallel`, which trains a model."""
    if inputs.draft_model_dir is not None:
        raise UsageError(
            f"`--parallel` adapts a model and `--draft-model-dir` is a head: {inputs.draft_model_dir}",
            hint="leave one of the two out",
        )
    if options.draft_vocab_size is not None:
        raise UsageError(
            f"a parallel draft model drafts all ids and has no use for `--draft-vocab-size`: "
            f"{options.draft_vocab_size}",
            hint="leave it out",
        )


def _check_head(given: HeadConfig, inputs: TrainInputs, options: TrainOptions) -> None:
    """SpecDecError for a head that cannot be trained, or not with these options, as its config shows."""
    if given.kind not in ("eagle3", "mtp"):
        raise UsageError(
            f"a head of this kind cannot be trained, {given.kind}: {inputs.draft_model_dir}",
            hint="without `--draft-model-dir` a new EAGLE-3 head is trained",
        )
    if options.draft_vocab_size is not None and given.kind == "mtp":
        raise UsageError(
            f"an MTP head drafts all ids and has no use for `--draft-vocab-size`: {options.draft_vocab_size}",
            hint="leave it out; `specdec run --draft-vocab` chooses ids",
        )
    if options.draft_vocab_size is not None and options.draft_vocab_size > given.draft_vocab_size:
        raise SpecDecError(
            f"the head drafts {given.draft_vocab_size} ids, fewer than `--draft-vocab-size`: "
            f"{options.draft_vocab_size}",
            hint="`--draft-vocab-size` can make a head's vocabulary smaller, not larger",
        )
    if not given.is_chain and (options.num_unrolled_steps or 0) > _MOST_STEPS:
        raise UsageError(
            f"`--num-unrolled-steps` of a head is at most {_MOST_STEPS}: {options.num_unrolled_steps}", hint="lower it"
        )
    if given.is_chain and (options.num_unrolled_steps or 0) > given.num_layers:
        raise SpecDecError(
            f"the head has {given.num_layers} layers, which draft a token each, fewer than `--num-unrolled-steps`: "
            f"{options.num_unrolled_steps}",
            hint="leave it out",
        )
