"""StableLM, whose layers do not pass keywords on to their attention."""

from runtime.model.families.family import Family
from runtime.model.replaced import Layer

FAMILIES = (Family("stablelm", replaced={"StableLmDecoderLayer": Layer}, hands_over=True),)
