"""`specdec doctor`, its flags: what is wrong with an engine, its drafter and the machine, and a remedy for each."""

from commands.doctor.flags import DoctorInputs, DoctorOptions
from commands.inputs.prompts import check_readable_by, read_prompts
from commands.options.engine_choice import EngineOptions
from commands.options.expand import expand_groups
from commands.output.output import Output, check_output_files, check_report
from runtime.core.params import greedy_params
from runtime.util.errors import UsageError


@expand_groups
def doctor(engine: EngineOptions, inputs: DoctorInputs, options: DoctorOptions, output: Output) -> None:
    """Look for causes that make an engine slow or speculation useless, and say what to do about each.

    Answers a few prompts without the drafter, with it, and without it again. Compares step times with the times
    measured at the build. Checks the draft model, the K/V cache, the weights and the machine. Exits with 1 if it finds
    a fault. Decoding is greedy.
    """
    has_prompts = bool(inputs.input_text) or inputs.input_file is not None
    prompts = read_prompts(inputs.input_text or [], inputs.input_file) if has_prompts else None
    check_report(options.report)
    check_output_files([] if options.report is None else [options.report], inputs.paths)
    params = greedy_params(options.max_output_len)
    choice = engine.named().choose(params, None)
    if prompts is None:
        choice.check_tokenizer()
    else:
        check_readable_by(choice, prompts)

    if options.explain and prompts is not None and len(prompts) > 1:
        raise UsageError(f"one request is explained, and several prompts are given: {len(prompts)}", hint="give one")
    if options.explain and options.report is not None:
        raise UsageError(
            f"`--report` is a page of findings, and `--explain` looks for none: {options.report}",
            hint="leave one of the two out; `--json` has the steps",
        )

    from commands.doctor.work import diagnose, explain_steps
    from commands.options.sessions import engines_made

    with engines_made(choice, output) as made:
        if options.explain:
            explain_steps(made, inputs.input_file, prompts, output)
        else:
            diagnose(made, inputs.input_file, prompts, options.report, output)
