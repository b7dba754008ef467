"""Quantized weights: the formats of others, and quantizing to ours."""
