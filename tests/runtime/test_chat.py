"""Chat templates where the hub's directories have them, beside what transformers finds."""

import json
from pathlib import Path

import pytest
from byte_tokenizers import byte_level
from transformers import AutoTokenizer

from runtime.chat import ChatTemplate, has_chat_template

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
TEMPLATES = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": TEMPLATE}]


@pytest.mark.parametrize("place", ["none", "inline", "list", "file", "processor"])
def test_a_template_is_found_where_transformers_finds_it(place: str, tmp_path: Path) -> None:
    byte_level().save_pretrained(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    if place in ("inline", "list"):
        config.write_text(json.dumps(settings | {"chat_template": TEMPLATE if place == "inline" else TEMPLATES}))
    elif place == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    elif place == "processor":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    own = AutoTokenizer.from_pretrained(tmp_path)
    assert has_chat_template(tmp_path) == (own.chat_template is not None) == (place in ("inline", "list", "file"))
    if own.chat_template is not None:
        messages = [{"role": "user", "content": "the dog"}]
        found = ChatTemplate(tmp_path, {"model_type": "llama"}).encode(messages)  # type: ignore[list-item]
        expected = own.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert found == expected != []
