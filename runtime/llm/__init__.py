"""A model that answers, for users of Python: `LLM`, `AsyncLLM`, and what they are given."""

from runtime.llm.async_llm import AsyncLLM as AsyncLLM
from runtime.llm.llm import LLM as LLM
