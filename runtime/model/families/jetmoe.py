"""JetMoE: experts of its queries too."""

from runtime.model.families.family import Family

FAMILIES = (Family("jetmoe"),)
