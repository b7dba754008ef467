"""`specdec compare`: two documents of `run` or `summarize` side by side, and which differences exceed the noise."""

from pathlib import Path
from typing import Annotated

import typer

from commands.options.expand import expand_groups
from commands.options.shared import Report
from commands.output.output import Output, check_output_files, check_report
from runtime.util.errors import SpecDecError


@expand_groups
def compare(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="Document of `run --json` or `summarize --json`.")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="Another document of the same command.")],
    output: Output,
    report: Report = None,
) -> None:
    """Compare two documents: settings, metrics, and which differences are more than noise.

    Counts such as tokens per step are exact for greedy output. Times are compared request by request, which needs at
    least six requests.
    """
    from commands.compare.document import compare_document, read_document, show
    from commands.compare.page import compare_page
    from commands.output.html.page import write_page

    check_report(report)
    check_output_files([] if report is None else [report], [a, b])
    document_a, document_b = read_document(a), read_document(b)
    if document_a["command"] != document_b["command"]:
        raise SpecDecError(
            f"the documents come from different commands: {a} from `{document_a['command']}`, {b} from "
            f"`{document_b['command']}`",
            hint="compare two documents of the same command",
        )
    document = compare_document(a, b, document_a, document_b)
    show(document, output)
    if report is not None:
        write_page(report, compare_page(document, document_a, document_b), output)
    output.document(document.as_json())
