"""`specdec fingerprint`, its flags: do two machines, versions or builds give the same bits?"""

from commands.fingerprint.flags import FingerprintOptions
from commands.options.engine_choice import TargetOptions
from commands.options.expand import expand_groups
from commands.output.output import Output, check_readable


@expand_groups
def fingerprint(options: FingerprintOptions, target: TargetOptions, output: Output) -> None:
    """Print a digest of an engine's logits after fixed tokens, and list the facts that these bits depend on.

    Engines with the same digest give the same bits, on whatever machine. So their receipts can be checked exactly, and
    workers of a cluster can share a batch.
    """
    if options.expect is not None:
        check_readable([options.expect])
    choice = target.named(options.model).choose()

    from commands.fingerprint.document import print_fingerprint

    print_fingerprint(options, choice, output)
