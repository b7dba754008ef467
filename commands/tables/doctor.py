"""What `doctor` shows: every finding with its remedy, and what else was looked at."""

from collections.abc import Mapping

from commands.options.remedies import REMEDIES
from commands.output import Output
from runtime.diagnosis.judging import Judgement


def show(judgements: Mapping[str, Judgement | None], output: Output) -> None:
    found = [name for name, judgement in judgements.items() if judgement and judgement.is_fault]
    for name, judgement in judgements.items():
        if judgement is not None and not judgement.is_fault:
            output.result(f"ok     {name}: {judgement.message}")
    if unknown := [name for name, judgement in judgements.items() if judgement is None]:
        output.result(f"nothing to judge by: {', '.join(unknown)}")
    for name in found:
        judgement = judgements[name]
        assert judgement is not None
        output.result(f"FOUND  {name}: {judgement.message}")
        output.result(f"       {REMEDIES[name]}")
        if output.quiet:
            output.text(name)
    num_judged = sum(judgement is not None for judgement in judgements.values())
    output.result(f"looked at: {num_judged}, found: {len(found)}")
