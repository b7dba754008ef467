"""DiffLlama: a layer attends twice, and subtracts."""

from runtime.model.families.family import Family

FAMILIES = (Family("diffllama"),)
