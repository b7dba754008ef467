"""`--speculative-config`: the JSON object of vLLM and TensorRT-LLM, translated into our flags."""

import json
from typing import Any

from runtime.drafters.speculative_config import flags_of_config
from runtime.util.errors import UsageError

_FLAG = "`--speculative-config`"
_EXAMPLE = f"""{_FLAG[:-1]} '{{"method": "ngram", "num_speculative_tokens": 5}}'`"""


def parse_speculative_config(text: str) -> dict[str, Any]:
    """Flags by their Python names; `spec_decode_algo` chooses the drafter. UsageError for text that is no JSON object,
    or for a key that corresponds to no flag.
    """
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict) or not config:
        raise UsageError(f"{_FLAG} is no JSON object: {text}", hint=f"{_EXAMPLE} is one")
    try:
        return flags_of_config(config)
    except UsageError as error:
        raise UsageError(error.message.replace("speculative_config", _FLAG), hint=error.hint) from None
