"""Texts: encoding, decoding, stop words, chat templates, tool calls, traces, corpora."""
