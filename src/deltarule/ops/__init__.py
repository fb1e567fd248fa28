"""The public operators: check the arguments, choose an implementation, call it."""

from deltarule.ops.attention_matrix import attention_matrix
from deltarule.ops.delta_rule import delta_rule
from deltarule.ops.dplr import dplr
from deltarule.ops.explain import explain
from deltarule.ops.pack import pack
from deltarule.ops.recurrent_step import recurrent_step

__all__ = ["attention_matrix", "delta_rule", "dplr", "explain", "pack", "recurrent_step"]
