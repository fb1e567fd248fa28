"""Delta-rule linear recurrent networks: one recurrence, its layers, and the models made of them."""

from deltarule.ops import attention_matrix, delta_rule, dplr, explain, pack, recurrent_step
from deltarule.shapes import RecurrentOutput

__version__ = "0.1.0"

__all__ = [
    "RecurrentOutput",
    "attention_matrix",
    "delta_rule",
    "dplr",
    "explain",
    "pack",
    "recurrent_step",
]
