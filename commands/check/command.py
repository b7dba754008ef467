"""`specdec check`, its flags: answers with receipts are checked against an engine."""

from commands.check.flags import CheckOptions
from commands.options.engine_choice import TargetOptions
from commands.options.expand import expand_groups
from commands.output.output import Output


@expand_groups
def check(options: CheckOptions, target: TargetOptions, output: Output) -> None:
    """Check answers by their receipts: would this engine have given these tokens?

    Each answer is computed in one pass, as a long draft, which is quicker than generating it. The first token that is
    not the engine's is named, with its probability, rank and gap. Exits with 1 if an answer is wrong or unlikely,
    cannot be checked, or comes from another engine.
    """
    options, target = options.without_model(target)
    options.check()
    choice = target.choose()

    from commands.check.work import check_receipts

    check_receipts(options, choice, output)
