"""The public operators: check the arguments, choose an implementation, call it."""

from deltarule.ops.delta_rule.api import delta_rule
from deltarule.ops.delta_rule.attention_matrix import attention_matrix
from deltarule.ops.delta_rule.dplr import dplr
from deltarule.ops.delta_rule.explain import explain
from deltarule.ops.delta_rule.gate_logits import BetaLogits, DecayLogits
from deltarule.ops.delta_rule.step import recurrent_step
from deltarule.ops.long_convolution.api import long_convolution
from deltarule.ops.memory.titans import titans
from deltarule.ops.memory.ttt import ttt
from deltarule.ops.mesa.api import mesa
from deltarule.ops.pack import pack
from deltarule.ops.selective_scan.api import selective_scan
from deltarule.ops.slstm.api import slstm
from deltarule.ops.two_memories import two_memories
from deltarule.ops.warmup import warmup

__all__ = [
    "BetaLogits", "DecayLogits", "attention_matrix", "delta_rule", "dplr", "explain",
    "long_convolution", "mesa", "pack", "recurrent_step", "selective_scan", "slstm", "titans",
    "ttt", "two_memories", "warmup",
]  # fmt: skip
