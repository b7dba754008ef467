"""The chat templates of a tokenizer by name, from its files."""

from pathlib import Path
from typing import Any

from runtime.checkpoint.gguf.reader import is_gguf, read_gguf, templates_of
from runtime.checkpoint.tokenizer import template_files
from runtime.util.files import check_regular, read_json

DEFAULT, TOOL_USE = "default", "tool_use"
"""transformers' names for the usual template, and for the template of conversations with tools."""


def chat_templates(tokenizer_dir: Path) -> dict[str, Any]:
    """Chat templates of a GGUF file or a directory by name, found by transformers' rules but without transformers.

    Their values should be texts, and are not checked. `chat_template.json` belongs to a processor of images and sounds,
    and is ignored.
    """
    if is_gguf(tokenizer_dir):
        return templates_of(read_gguf(tokenizer_dir).metadata)
    default = tokenizer_dir / "chat_template.jinja"
    files = {DEFAULT: default} if default.exists() else {}
    if files := files | {file.stem: file for file in template_files(tokenizer_dir)}:
        for file in files.values():
            check_regular(file)
        return {name: file.read_text(encoding="utf-8", errors="replace") for name, file in files.items()}
    config = tokenizer_dir / "tokenizer_config.json"
    template = read_json(config).get("chat_template") if config.exists() else None
    if isinstance(template, list):
        return {str(one.get("name")): one.get("template") for one in template if isinstance(one, dict)}
    return {} if template is None else {DEFAULT: template}
