"""Ling's hybrid models."""

from runtime.model.families.family import Family

FAMILIES = (Family("bailing_hybrid", reads={"linear_conv_kernel_dim", "linear_head_dim", "linear_num_heads"}),)
