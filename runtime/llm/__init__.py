"""A model that answers, for users of Python: `LLM`, `AsyncLLM`, their arguments and prompts."""

from runtime.llm.async_llm import AsyncLLM as AsyncLLM
from runtime.llm.llm import LLM as LLM
