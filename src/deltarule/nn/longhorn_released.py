"""Longhorn as released: one step size for each value channel, the transition's diagonal only.

S_t = S_{t-1} * (1 - e_t (k_t * k_t)^T) + (e_t * v_t) k_t^T        o_t = S_t q_t + D * v_t
e_t = b_t / (1 + b_t |k_t|^2)        b_t = sigmoid(beta_logits_t + dt_bias)
"""

import torch
from torch import Tensor, nn

from deltarule.nn.gates import computed, low_rank
from deltarule.nn.rule import Arguments, System
from deltarule.nn.scan import ScanMixer


def arguments(
    q: Tensor, k: Tensor, v: Tensor, *, beta_logits: Tensor, dt_bias: Tensor
) -> Arguments:
    """Arguments of `selective_scan`; 1 - e k^2 is in (0, 1] whatever the length of the key."""
    strength = torch.sigmoid(computed(beta_logits) + dt_bias)
    key_square = computed(k).square().sum(-1, keepdim=True)
    key_square = key_square.repeat_interleave(v.shape[2] // k.shape[2], dim=2)
    return {"q": q, "k": k, "v": v, "beta": strength / (1 + strength * key_square), "scale": 1.0}


SYSTEM = System(
    name="longhorn_released",
    title="Longhorn (released)",
    operator="selective_scan",
    recurrence="S = S * (1 - e (k * k)^T) + (e * v) k^T",
    read_out="o = S q + D * v",
    decay="none",
    erase="tied",
    objective="|S - S'|^2 + |S k - v|^2_b, then the diagonal of the step",
    source="arXiv 2407.14207, section 3.2 and the authors' released layer",
    state_size="HV V K",
)


class LonghornReleased(ScanMixer):
    """Longhorn: S = S * (1 - e (k * k)^T) + (e * v) k^T, o = S q + D * v, gated.

    e = b / (1 + b |k|^2) with one b for each value channel. The exact update of `Longhorn` is a
    product with I - e k k^T; here each entry of the state erases only what it holds itself.

    Defaults: as `Mamba1`, but for A_log, which there is none of, and a dt_bias of zeros.

    Examples:
        >>> import torch
        >>> y, state = LonghornReleased(32, num_heads=1)(torch.zeros(1, 5, 32))
        >>> state["recurrent"].shape
        torch.Size([1, 1, 64, 16])

    Source: arXiv 2407.14207, section 3.2 and algorithm 1.
    """

    rule = SYSTEM
    float32_parameters = ("dt_bias", "D")
    dt_bias: nn.Parameter

    def build_scan(self, inner: int) -> None:
        self.q_proj = nn.Linear(inner, self.head_k_dim, bias=False)
        self.k_proj = nn.Linear(inner, self.head_k_dim, bias=False)
        self.b_proj = low_rank(inner, self.step_rank(), inner)
        self.gate_parameter("dt_bias", torch.zeros(self.num_heads, self.head_v_dim))

    def scan_arguments(self, stream: Tensor, v: Tensor) -> Arguments:
        return arguments(
            self.q_proj(stream).unsqueeze(2), self.k_proj(stream).unsqueeze(2), v,
            beta_logits=self.by_head(self.b_proj(stream)), dt_bias=self.dt_bias,
        )  # fmt: skip
