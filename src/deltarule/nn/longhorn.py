"""Longhorn: the minimiser of a proximal least-squares step, with one step size for each head."""

import torch
from torch import Tensor, nn

from deltarule.nn.deltanet import DeltaNet
from deltarule.nn.feature_maps import qk_normed
from deltarule.nn.gates import computed, float32_parameter, low_rank, strength_of
from deltarule.nn.rule import Arguments, Projections, Rule, System
from deltarule.nn.scan_mixer import ScanMixer


def arguments(projections: Projections) -> Arguments:
    """Keys keep their length: the step size makes up for it, and 1 - e |k|^2 is in (0, 1]."""
    strength = strength_of(projections)
    value_heads_per_key_head = projections.v.shape[2] // projections.k.shape[2]
    q, k = (qk_normed(projections, x, otherwise="none") for x in (projections.q, projections.k))
    key_square = k.square().sum(-1)
    key_square = key_square.repeat_interleave(value_heads_per_key_head, dim=2)
    beta = strength / (1 + strength * key_square)
    dtype = projections.v.dtype
    return projections.qkv | {"q": q.to(dtype), "k": k.to(dtype), "beta": beta}


def released_arguments(
    q: Tensor, k: Tensor, v: Tensor, *, beta_logits: Tensor, dt_bias: Tensor
) -> Arguments:
    """Arguments of `selective_scan`; 1 - e k^2 is in (0, 1] whatever the length of the key."""
    strength = torch.sigmoid(computed(beta_logits) + dt_bias)
    key_square = computed(k).square().sum(-1, keepdim=True)
    key_square = key_square.repeat_interleave(v.shape[2] // k.shape[2], dim=2)
    return {"q": q, "k": k, "v": v, "beta": strength / (1 + strength * key_square), "scale": 1.0}


class Longhorn(DeltaNet):
    """Longhorn (per head): S = S (I - e k k^T) + e v k^T, e = b / (1 + b |k|^2).

    The released model has one b for each channel and approximates I - e k k^T by its diagonal;
    this is the paper's exact update with one b for each head. e |k|^2 stays below 1 whatever
    beta_max, the largest b.
    """

    rule = Rule(
        name="longhorn", title="Longhorn (per head)", decay="none", erase="tied",
        recurrence="S = S (I - e k k^T) + e v k^T",
        objective="|S - S'|^2 + b |S k - v|^2, exactly",
        source="arXiv 2407.14207, theorem 3.1, one b for each head instead of one for each channel",
        arguments=arguments,
    )  # fmt: skip
    default_output_gate = True


class LonghornReleased(ScanMixer):
    """Longhorn: S = S * (1 - e (k * k)^T) + (e * v) k^T, o = S q + D * v, gated.

    e = b / (1 + b |k|^2) with one b for each value channel. The exact update of `Longhorn` is a
    product with I - e k k^T; here each entry of the state erases only what it holds itself.
    Otherwise it is `Mamba1` without A_log, with a dt_bias that starts at zeros.
    """

    rule = System(
        name="longhorn_released", title="Longhorn (released)", operator="selective_scan",
        decay="none", erase="tied", state_size="HV V K",
        recurrence="S = S * (1 - e (k * k)^T) + (e * v) k^T", read_out="o = S q + D * v",
        objective="|S - S'|^2 + |S k - v|^2_b, then the diagonal of the step",
        source="arXiv 2407.14207, section 3.2 and the authors' released layer",
    )  # fmt: skip
    float32_parameters = ("dt_bias", "D")

    def build_scan(self, inner: int) -> None:
        self.q_proj = nn.Linear(inner, self.head_k_dim, bias=False)
        self.k_proj = nn.Linear(inner, self.head_k_dim, bias=False)
        self.b_proj = low_rank(inner, self.step_rank(), inner)
        self.dt_bias = float32_parameter(torch.zeros(self.num_heads, self.head_v_dim))

    def scan_arguments(self, stream: Tensor, v: Tensor) -> Arguments:
        q, k = (proj(stream).unsqueeze(2) for proj in (self.q_proj, self.k_proj))
        logits = self.by_head(self.b_proj(stream))
        return released_arguments(q, k, v, beta_logits=logits, dt_bias=self.dt_bias)
