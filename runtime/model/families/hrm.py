"""HRM: layers are passed several times, each time with keys and values of their own."""

from runtime.model.families.family import Family

FAMILIES = (Family("hrm_text"),)
