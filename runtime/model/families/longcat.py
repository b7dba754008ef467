"""LongCat-Flash: experts that return what they get."""

from runtime.model.families.family import Family

FAMILIES = (Family("longcat_flash", reads={"router_bias"}),)
