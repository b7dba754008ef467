"""`specdec drafters`, its flags: which draft fits my model?"""

from pathlib import Path

from commands.drafters.flags import DraftersInputs, DraftersOptions
from commands.inputs.prompts import read_prompts
from commands.options.expand import expand_groups
from commands.output.output import Output, check_readable
from runtime.checkpoint.bundle import is_engine_dir
from runtime.checkpoint.resolve import read_model_config, resolve_model
from runtime.text.trace_lines import check_trace_lines
from runtime.util.errors import UsageError


@expand_groups
def drafters(inputs: DraftersInputs, options: DraftersOptions, output: Output) -> None:
    """Find the drafter that fits a model: for each, its tokens a step, its cost on this machine, and the command to
    type.

    Tries lookups, the model's own MTP head, its own copy with `--self-draft`, and draft models and heads that lie
    beside it, on a sample of requests. Lists drafters that were published for the model's family; nothing is
    downloaded.
    """
    inputs = inputs.with_model()
    model = inputs.model_dir or ""
    if is_engine_dir(Path(model)):
        raise UsageError(
            f"this is an engine, and drafters are looked for by a model's files: {model}",
            hint="name the model; `specdec tune ENGINE` times lookups on an engine",
        )
    if inputs.traces is not None:
        check_readable([inputs.traces])
        check_trace_lines(inputs.traces)
    has_prompts = bool(inputs.input_text) or inputs.input_file is not None
    prompts = read_prompts(inputs.input_text or [], inputs.input_file) if has_prompts else None
    read_model_config(resolve_model(model))

    from commands.drafters.work import show_drafters

    show_drafters(inputs, options, prompts, output)
