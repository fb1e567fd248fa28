"""LRU: complex channels that turn and decay at learned rates, between two constant matrices.

lambda = exp(-exp(nu) + i exp(theta))

With g_t = e^{-i exp(theta) (t - 1)} h_t, which only decays, the scan is over real numbers.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.gates import computed, float32_parameter
from deltarule.nn.rotation import at_positions, turned
from deltarule.nn.rule import LayerCall, System
from deltarule.nn.scan_mixer import VectorMixer

# An eigenvalue of zero, or of one, has no logarithm of its logarithm.
SMALLEST = 1e-4


class LRU(VectorMixer):
    """LRU: h = lambda h + gamma * (B u), o = Re(C h) + D * u, where u = v_proj x; then GELU.

    Each head has matrices of its own: with one head they are the paper's. B [H, 2, K, V] and
    C [H, 2, V, K] have the real part first. The state's `recurrent` [N, H, 2 K, 1] is
    e^{-i exp(theta) (t - 1)} h after `length` [N] = t tokens. The paper's GLU after the layer is
    left to the MLP of the model. head_k_dim complex numbers are kept. Eigenvalues start uniform on
    the unit disc, gamma at sqrt(1 - |lambda|^2).
    """

    rule = System(
        name="lru", title="LRU", operator="selective_scan", decay="element", erase="none",
        state_size="2 HV K",
        recurrence="h = lambda * h + gamma * (B u)", read_out="o = Re(C h) + D * u",
        source="arXiv 2303.06349, section 3",
    )  # fmt: skip
    options = VectorMixer.options | {"head_k_dim"}
    state_size = None
    gate_activation = "sigmoid"
    counts = True
    float32_parameters = ("nu", "theta", "gamma_log", "D")
    roles = {"B": "gate", "C": "gate"}

    def memories(self) -> dict[str, tuple[int, ...]]:
        return {"recurrent": (self.num_heads, 2 * self.head_k_dim, 1)}

    def build_gates(self) -> None:
        heads, states, values = self.num_heads, self.head_k_dim, self.head_v_dim
        radius, turn = torch.rand(2, heads, states, dtype=torch.float32)
        nu = (-radius.clamp(SMALLEST, 1 - SMALLEST).log() / 2).log()
        self.nu = float32_parameter(nu)
        self.theta = float32_parameter((2 * math.pi * turn.clamp(min=SMALLEST)).log())
        self.gamma_log = float32_parameter(torch.log(-torch.expm1(-2 * nu.exp())) / 2)
        self.B = nn.Parameter(torch.randn(heads, 2, states, values) * (2 * values) ** -0.5)
        self.C = nn.Parameter(torch.randn(heads, 2, values, states) * states**-0.5)
        self.D = float32_parameter(torch.randn(heads, values))

    def read(self, call: LayerCall) -> Tensor:
        u = self.by_head(self.stream("v", call))
        angle = at_positions(call.positions(), self.theta.exp())
        inputs = torch.einsum("bthv,hckv->bthck", u, self.B.to(u.dtype)).flatten(-2)
        gamma, log_decay = (torch.cat([x] * 2, dim=-1) for x in (self.gamma_log, -self.nu.exp()))
        h = turned(self.run(turned(inputs * gamma.exp(), -angle), log_decay, call), angle)
        real, imaginary = h.to(u.dtype).chunk(2, dim=-1)
        parts = torch.stack([real, -imaginary], dim=-2)
        o = torch.einsum("bthck,hcvk->bthv", parts, self.C.to(u.dtype))
        return F.gelu(computed(o) + self.D * u).to(u.dtype)
