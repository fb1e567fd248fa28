"""Decaying fast weights: a gate for each value channel from the left, one for each key channel."""

import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.gates import computed
from deltarule.nn.mixer import Mixer
from deltarule.nn.rule import Arguments, LayerCall, System
from deltarule.nn.scan_mixer import scan

# sigmoid(4) = 0.98: most of the state outlives a token at first.
DECAY_BIAS = 4.0


def arguments(
    q: Tensor, k: Tensor, v: Tensor, *, decay_logits: Tensor, value_decay_logits: Tensor
) -> Arguments:
    decays = {
        "log_decay": F.logsigmoid(computed(decay_logits)),
        "value_log_decay": F.logsigmoid(computed(value_decay_logits)),
    }
    return {"q": q, "k": k, "v": v, **decays}


class DecayingFastWeights(Mixer):
    """Decaying fast weights: S = Diag(b) S Diag(a) + v k^T, o = S q, then a norm of each head.

    The biases of both gates start at 4 and the norm is this library's; the paper fine-tunes
    pre-trained attention and adds neither.
    """

    rule = System(
        name="dfw", title="Decaying fast weights", operator="selective_scan", decay="element",
        erase="none", state_size="HV V K",
        recurrence="S = Diag(b) S Diag(a) + v k^T", read_out="o = S q",
        objective="|S - Diag(b) S' Diag(a)|^2 - 2 <S k, v>",
        source="arXiv 2210.04243, section 4; table 4 of arXiv 2406.06484",
    )  # fmt: skip
    biased = ("a", "b")

    def stream_sizes(self) -> dict[str, int]:
        sizes = super().stream_sizes()
        return sizes | {"a": sizes["k"], "b": sizes["v"]}

    def build_gates(self) -> None:
        for gate in (self.a_proj, self.b_proj):
            nn.init.constant_(gate.bias, DECAY_BIAS)

    def arguments(self, call: LayerCall) -> Arguments:
        q, k, v = self.streams(call)
        a, b = self.by_key(self.stream("a", call)), self.by_head(self.stream("b", call))
        return arguments(q, k, v, decay_logits=a, value_decay_logits=b)

    def read(self, call: LayerCall) -> Tensor:
        return scan(self.arguments(call), call)
