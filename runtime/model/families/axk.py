"""A.X K1 and K2."""

from runtime.model.families.family import Family
from runtime.model.replaced import Indexed, Indexer

FAMILIES = (
    Family("axk1", reads={"first_k_dense_replace"}),
    Family("axk2", reads={"first_k_dense_replace"}, replaced={"AXK2Indexer": Indexer, "AXK2Attention": Indexed}),
)
