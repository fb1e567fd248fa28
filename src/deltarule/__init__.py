"""Delta-rule linear recurrent networks: one recurrence, its layers, and the models made of them."""

from deltarule.ops import (
    BetaLogits,
    DecayLogits,
    attention_matrix,
    delta_rule,
    dplr,
    explain,
    long_convolution,
    mesa,
    pack,
    recurrent_step,
    selective_scan,
    slstm,
    titans,
    ttt,
    two_memories,
    warmup,
)
from deltarule.ops.context import Context, make_context
from deltarule.shapes import (
    MesaOutput,
    MesaState,
    RecurrentOutput,
    TitansOutput,
    TitansState,
    TransitionOutput,
    TTTOutput,
    TTTState,
)

__version__ = "0.1.0"

__all__ = [
    "BetaLogits",
    "Context",
    "DecayLogits",
    "MesaOutput",
    "MesaState",
    "RecurrentOutput",
    "TTTOutput",
    "TTTState",
    "TitansOutput",
    "TitansState",
    "TransitionOutput",
    "attention_matrix",
    "delta_rule",
    "dplr",
    "explain",
    "long_convolution",
    "make_context",
    "mesa",
    "pack",
    "recurrent_step",
    "selective_scan",
    "slstm",
    "titans",
    "ttt",
    "two_memories",
    "warmup",
]
