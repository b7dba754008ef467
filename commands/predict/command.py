"""`specdec predict`, its flags: would speculation pay on another machine?"""

from commands.options.expand import expand_groups
from commands.output.output import Output, check_readable
from commands.predict.flags import PredictOptions


@expand_groups
def predict(options: PredictOptions, output: Output) -> None:
    """Predict the speed of drafters on another machine, from recorded outputs and that machine's step costs.

    Needs neither the machine nor the model. Outputs are replayed through lookups of every kind, and each step is given
    the time that it would take on that machine. Drafts of a model or a head cannot be replayed.
    """
    check_readable([options.traces, *([] if options.costs.is_dir() else [options.costs])])

    from commands.predict.document import predict_speeds

    predict_speeds(options, output)
