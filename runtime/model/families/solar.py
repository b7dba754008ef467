"""Solar Open and Kolibri 1, whose configs state a width that no layer has."""

from runtime.model.families.family import Family

FAMILIES = (*(Family(kind, reads={"intermediate_size"}) for kind in ("solar_open", "kolibri1")),)
