"""StableLM: layers do not hand keywords on to their attention."""

from runtime.model.families.family import Family

FAMILIES = (Family("stablelm", hands_over=True),)
