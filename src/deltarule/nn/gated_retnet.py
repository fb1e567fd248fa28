"""Gated RetNet, the retention of YOCO: RetNet whose heads choose what they forget.

S_t = g_t S_{t-1} + v_t k_t^T        g_t = sigmoid(decay_logits_t)^(1/16)
"""

from dataclasses import replace

from torch import nn

from deltarule.nn import gla, retnet


class GatedRetNet(retnet.RetNet):
    """Gated RetNet: S = g S + v k^T with g = sigmoid(a_proj x)^(1/16), and RoPE on q and k.

    Defaults: as `RetNet`.

    Examples:
        >>> y, state = GatedRetNet(32, num_heads=2)(torch.zeros(1, 5, 32))
        >>> state["length"]
        tensor([5])
    """

    rule = replace(
        retnet.RetNet.rule, name="gated_retnet", title="Gated RetNet", decay="head", page="retnet",
        recurrence="S = g S + v k^T",
        source="arXiv 2405.05254, section 3.1",
        arguments=gla.arguments,
    )  # fmt: skip

    def build_gates(self) -> None:
        super().build_gates()
        self.a_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False)
