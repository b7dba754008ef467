"""A.X K1 and K2."""

from runtime.model.families.family import Family

FAMILIES = (*(Family(kind, reads={"first_k_dense_replace"}) for kind in ("axk1", "axk2")),)
