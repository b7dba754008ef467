"""The JSON document of `specdec run`."""

from dataclasses import asdict
from typing import Any

from commands.documents.head import document_head
from commands.documents.settings import Setup
from commands.inputs.prompts import Prompt
from runtime.generation import Generation
from runtime.request import Sequence


def run_document(
    setup: Setup, prompts: list[Prompt], generation: Generation, settings: dict[str, Any], *, per_step: bool
) -> dict[str, Any]:
    """`prompts` has the prompt of each request; `settings` are those of the command alone."""
    max_draft_len = setup.session.max_draft_len
    return {
        **document_head("run"),
        "requests": [
            _request_record(setup, prompts[sequence.request.id], sequence, per_step=per_step)
            for sequence in generation.sequences
        ],
        "total": generation.total(max_draft_len),
        "settings": {**setup.settings_record(), **settings},
        **setup.engine_records(),
    }


def _request_record(setup: Setup, prompt: Prompt, sequence: Sequence, *, per_step: bool) -> dict[str, Any]:
    record: dict[str, Any] = {
        "prompt": prompt.text,
        "prompt_ids": list(sequence.request.prompt_tokens),
        "return_index": sequence.request.return_index,
        "output_ids": sequence.output_tokens,
        "output_text": setup.llm.text(sequence),
        "finish_reason": sequence.finish_reason,
        "stats": sequence.stats.as_dict(setup.session.max_draft_len, per_step=per_step),
    }
    if sequence.request.num_logprobs is not None:
        record["logprobs"] = [asdict(one) for one in sequence.logprobs]
    return record
