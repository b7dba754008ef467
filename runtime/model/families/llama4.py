"""Llama 4: queries with a temperature, rotation by complex numbers, experts that compute every token."""

from runtime.model.families.family import Family

FAMILIES = (Family("llama4_text"),)
