"""Cohere's Command models."""

from runtime.model.families.family import Family

FAMILIES = (
    *(Family(kind, reads={"sliding_window_pattern"}) for kind in ("cohere2", "cohere_compass_text")),
    Family("cohere2_moe", reads={"first_k_dense_replace"}),
)
