"""`specdec regress`, its flags: compares old answers with a new engine."""

from commands.options.engine_choice import TargetOptions
from commands.options.expand import expand_groups
from commands.output.output import Output
from commands.regress.flags import RegressOptions


@expand_groups
def regress(options: RegressOptions, target: TargetOptions, output: Output) -> None:
    """Compare old answers with the answers of a new engine: after quantizing, fine-tuning or an upgrade.

    Each old answer is computed in one pass, as a long draft for the new engine, which is quicker than generating it
    again. Answers without receipts are compared with greedy answers.
    """
    options.check()
    choice = target.named(options.model).choose()

    from commands.regress.work import compare_answers

    compare_answers(options, choice, output)
