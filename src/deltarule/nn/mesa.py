"""The mesa layer: ridge regression from all keys to all values, solved anew at every token."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule import ops
from deltarule.nn.gates import computed, float32_parameter, unit
from deltarule.nn.layout import silence_padding
from deltarule.nn.mixer import Mixer
from deltarule.nn.rule import LayerCall, System
from deltarule.shapes import MesaState

LEAST_REGULARIZER = 0.25
FIRST_REGULARIZER = 1.0


class Mesa(Mixer):
    """Mesa: o = G (H + Diag(lambda))^-1 q, with decayed sums H of k k^T and G of v k^T.

    Unit q and k; beta = sigmoid(b_proj x), a = sigmoid(a_proj x), lambda = 0.25 + softplus, for
    each key channel, learned from 1. The state holds G as `recurrent` and H as `covariance`. Solved
    exactly on a CPU, by head_k_dim + 64 conjugate gradients elsewhere.
    """

    rule = System(
        name="mesa", title="Mesa layer", operator="mesa", decay="head", erase="solve",
        state_size="HV (K + V) K",
        recurrence="H = a H + beta k k^T, G = a G + beta v k^T",
        read_out="o = G (H + Diag(lambda))^-1 q",
        objective="sum_i a..a beta_i |S k_i - v_i|^2 + tr(S Diag(lambda) S^T)",
        source="arXiv 2309.05858; gates of MesaNet, arXiv 2506.05233, section 3 and its code",
        forms="recurrent, chunked, GPU kernel of the solver",
    )  # fmt: skip
    default_conv_size = 4
    convolved = ("q", "k")
    float32_parameters = ("regularizer_logits",)

    # As in the operator: a number of steps, or None to solve exactly.
    iterations: int | Literal["auto"] | None = "auto"

    def build_gates(self) -> None:
        self.a_proj = nn.Linear(self.hidden_size, self.num_heads)
        self.b_proj = nn.Linear(self.hidden_size, self.num_heads)
        logit = math.log(math.expm1(FIRST_REGULARIZER - LEAST_REGULARIZER))
        logits = torch.full((self.num_heads, self.head_k_dim), logit, dtype=torch.float32)
        self.regularizer_logits = float32_parameter(logits)

    def memories(self) -> dict[str, tuple[int, ...]]:
        return super().memories() | {"covariance": (self.num_heads, *[self.head_k_dim] * 2)}

    def read(self, call: LayerCall) -> Tensor:
        q, k, v = self.streams(call)
        q, k = (unit(x).to(v.dtype) for x in self.activated(q, k))
        arguments = {"q": q, "k": k, "v": v, "beta": torch.sigmoid(computed(self.b_proj(call.x)))}
        arguments["log_decay"] = F.logsigmoid(computed(self.a_proj(call.x)))
        output = ops.mesa(
            **silence_padding(arguments, call.layout.real, ("k", "v", "beta", "log_decay")),
            regularizer=LEAST_REGULARIZER + F.softplus(self.regularizer_logits),
            iterations=self.iterations,
            initial_state=MesaState(call.before["covariance"], call.before["recurrent"]),
            **call.layout.spans,
        )
        assert output.final_state is not None
        call.after["covariance"], call.after["recurrent"] = output.final_state
        return output.o.to(v.dtype)
