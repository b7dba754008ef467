"""Quantized weights: reading other tools' formats, and quantizing to our own."""
