"""The bodies of OpenAI's and Anthropic's protocols: parsed into requests, and written as answers."""
