"""The public operators: check the arguments, choose an implementation, call it."""

from deltarule.ops.attention_matrix import attention_matrix
from deltarule.ops.delta_rule import delta_rule
from deltarule.ops.dplr import dplr
from deltarule.ops.explain import explain
from deltarule.ops.gate_logits import BetaLogits, DecayLogits
from deltarule.ops.mesa import mesa
from deltarule.ops.pack import pack
from deltarule.ops.recurrent_step import recurrent_step
from deltarule.ops.selective_scan import selective_scan
from deltarule.ops.titans import titans
from deltarule.ops.ttt import ttt
from deltarule.ops.two_memories import two_memories
from deltarule.ops.warmup import warmup

__all__ = [
    "BetaLogits",
    "DecayLogits",
    "attention_matrix",
    "delta_rule",
    "dplr",
    "explain",
    "mesa",
    "pack",
    "recurrent_step",
    "selective_scan",
    "titans",
    "ttt",
    "two_memories",
    "warmup",
]
