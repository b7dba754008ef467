"""Calls of tools in a model's output: the formats that models write them in, their parser, and their grammar."""
