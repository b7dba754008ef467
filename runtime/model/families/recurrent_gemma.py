"""RecurrentGemma: Griffin's recurrent blocks between layers of local attention."""

from runtime.model.families.family import Family

FAMILIES = (Family("recurrent_gemma", layer_types={"linear_attention"}),)
