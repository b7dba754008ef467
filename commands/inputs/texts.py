"""The texts of `specdec corpus create`: a file's documents, as tokens."""

from pathlib import Path

from commands.inputs.prompts import check_text
from runtime.errors import SpecDecError
from runtime.reading import read_json_lines, read_utf8, shown
from runtime.text import encode_text
from runtime.tokenizer import Tokenizer


def read_texts(path: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of each document of a text file."""
    content = read_utf8(path)
    texts = [(content, str(path))]
    if path.suffix.lower() == ".jsonl":
        texts = []
        for number, row in read_json_lines(content, path):
            if "text" not in row:
                raise SpecDecError(
                    f"line {number} of {path} has no `text`, it has: {shown(sorted(row))}",
                    hint='write {"text": "..."}; traces are given with `--traces`',
                )
            where = f"line {number} of {path}"
            texts.append((check_text(row["text"], f"`text` on {where}"), where))
    documents = []
    for document, where in texts:
        documents.append(encode_text(tokenizer, document))
        if not documents[-1]:
            raise SpecDecError(f"the tokenizer makes nothing of the text: {where}", hint="leave it out")
    return documents
