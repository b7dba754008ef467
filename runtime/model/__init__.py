"""A model in torch: transformers' classes, with our attention, weights and layers in place of theirs."""
