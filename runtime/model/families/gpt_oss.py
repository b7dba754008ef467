"""gpt-oss."""

from runtime.model.families.family import Family

FAMILIES = (Family("gpt_oss", ignores={"hidden_act"}),)
