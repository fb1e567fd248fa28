"""Feature maps of queries and keys as one table, and what q and k may be divided by.

o_t = sum_j (phi(q_t) . phi(k_j)) v_j        phi: [B, T, H, K] -> [B, T, H, M]
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.gates import computed, unit
from deltarule.nn.roles import Role
from deltarule.nn.rule import Arguments, Projections, QueryKeyNorm
from deltarule.ops.dispatch import without_autocast

# Where all features of a key are zero, its L1 norm is.
SMALLEST_NORM = 1e-6
# A quarter of a turn over so many tokens, in cosFormer.
LONGEST = 4096
NORMS: tuple[QueryKeyNorm, ...] = get_args(QueryKeyNorm)


@dataclass(frozen=True, kw_only=True)
class FeatureMap:
    """One word for phi.

    Args:
        function: x [B, T, H, K], and a weight [H, ...] or a position [B, T] where the map has
            one, to phi(x) [B, T, H, M].
        size: K to M.
        weight: A learned matrix for q and another for k; a learned scale and shift of each; a
            random one that they share; or none.
        start: K to where the learned weights of a head start, or to the shape of the random ones.
        width: K to where the learned numbers of a head start that go with the random ones.
        widened: Random weights and those numbers [H, ...] to the weight of the function.
        positional: Whether it depends on the token's position in its sequence.
        divides: Whether phi(q) . phi(k) is positive, or an estimate of what is, so that the
            normaliser z^T q can divide.
        source: Paper and section.
    """

    function: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
    size: Callable[[int], int] = lambda channels: channels
    weight: Literal["none", "learned", "affine", "random"] = "none"
    start: Callable[[int], Tensor] = torch.eye
    width: Callable[[int], Tensor] | None = None
    widened: Callable[[Tensor, Tensor], Tensor] = torch.mul
    positional: bool = False
    divides: bool = True
    source: str


def elementwise(f: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, weight, position: f(x)


def dpfp(x: Tensor) -> Tensor:
    """r_i r_{i-1} for r = (relu(x), relu(-x)), the neighbour taken round the end."""
    halves = torch.cat([x, -x], dim=-1).relu()
    return halves * halves.roll(1, dims=-1)


def taylor(x: Tensor) -> Tensor:
    """Features whose dot product is 1 + s + s^2 / 2 for s = q . k / sqrt(K)."""
    x = x * x.shape[-1] ** -0.25
    first, second = torch.triu_indices(x.shape[-1], x.shape[-1], 1, device=x.device)
    pairs, squares = x[..., first] * x[..., second], x.square() * math.sqrt(0.5)
    return torch.cat([torch.ones_like(x[..., :1]), x, squares, pairs], dim=-1)


def hedgehog(x: Tensor, weight: Tensor | None, position: Tensor | None) -> Tensor:
    """softmax(W x, -W x) with a learned W for each head."""
    projected = _project(x, weight)
    return torch.cat([projected, -projected], dim=-1).softmax(-1)


def random_fourier(x: Tensor, weight: Tensor | None, position: Tensor | None) -> Tensor:
    """(sin W u, cos W u) / sqrt(M / 2), u = x / |x|: E phi(q) . phi(k) = exp(-|u - u'|^2 / 2)."""
    projected = _project(F.normalize(x, dim=-1), weight)
    features = torch.cat([projected.sin(), projected.cos()], dim=-1)
    return features * projected.shape[-1] ** -0.5


def performer(x: Tensor, weight: Tensor | None, position: Tensor | None) -> Tensor:
    """exp(W x' - |x'|^2 / 2) / sqrt(M), x' = x / K^(1/4): E phi(q) . phi(k) = exp(q . k / sqrt K).

    No maximum over tokens is subtracted: it would look ahead. The exponent is at most |w|^2 / 2.
    """
    x = x * x.shape[-1] ** -0.25
    exponent = _project(x, weight) - x.square().sum(-1, keepdim=True) / 2
    return exponent.exp() * exponent.shape[-1] ** -0.5


def cosformer(x: Tensor, weight: Tensor | None, position: Tensor | None) -> Tensor:
    """relu(x) (cos, sin)(pi t / (2 M)): q . k is weighted by the cosine of the distance."""
    assert position is not None
    angle = (position.to(x.dtype) * (math.pi / (2 * LONGEST)))[..., None, None]
    return torch.cat([x.relu() * angle.cos(), x.relu() * angle.sin()], dim=-1)


def rebased(x: Tensor, weight: Tensor | None, position: Tensor | None) -> Tensor:
    """Features whose dot product is (q' . k')^2 / K, x' = gamma norm(x) + beta of each head."""
    gamma, beta = _of_heads(weight, x).unbind(1)
    x = F.layer_norm(x, x.shape[-1:]) * gamma + beta
    first, second = torch.triu_indices(x.shape[-1], x.shape[-1], 1, device=x.device)
    pairs = math.sqrt(2) * x[..., first] * x[..., second]
    return torch.cat([x.square(), pairs], dim=-1) * x.shape[-1] ** -0.5


def dijiang(x: Tensor, weight: Tensor | None, position: Tensor | None) -> Tensor:
    """D exp(T C x), C the orthonormal cosine transform, T = Diag(t) random, D learned."""
    t, scale = _of_heads(weight, x).unbind(1)
    return scale * torch.exp(t * (x @ cosines(x.shape[-1]).to(x).mT))


def cosines(size: int) -> Tensor:
    """The orthonormal DCT-II: row j is s_j cos(pi (2 n + 1) j / 2 K)."""
    row = torch.arange(size, dtype=torch.float64, device="cpu")
    matrix = torch.cos(math.pi / (2 * size) * row.unsqueeze(1) * (2 * row + 1))
    return matrix * ((1 + (row > 0).to(row)) / size).sqrt().unsqueeze(1)


def _of_heads(weight: Tensor | None, x: Tensor) -> Tensor:
    """Weights [H, ...] of the heads of x [B, T, H, K]; slots of a head share its own."""
    assert weight is not None
    slots = x.shape[2] // weight.shape[0]
    return computed(weight) if slots == 1 else computed(weight).repeat_interleave(slots, dim=0)


def _project(x: Tensor, weight: Tensor | None) -> Tensor:
    """W x for each head: [B, T, H, K], [H, K, M] -> [B, T, H, M]."""
    return torch.einsum("bthk,hkm->bthm", x, _of_heads(weight, x))


FEATURE_MAPS: dict[str, FeatureMap] = {
    "identity": FeatureMap(
        function=elementwise(lambda x: x), divides=False, source="arXiv 2210.10340"
    ),
    "elu": FeatureMap(
        function=elementwise(lambda x: F.elu(x) + 1), source="arXiv 2006.16236, eq. 7"
    ),
    "relu": FeatureMap(function=elementwise(F.relu), source="arXiv 2103.13076"),
    "silu": FeatureMap(
        function=elementwise(F.silu), divides=False, source="arXiv 2406.06484, section 3.4"
    ),
    "dpfp": FeatureMap(
        function=elementwise(dpfp), size=lambda k: 2 * k,
        source="arXiv 2102.11174, section 5.3, nu = 1",
    ),
    "taylor": FeatureMap(
        function=elementwise(taylor), size=lambda k: (k + 1) * (k + 2) // 2,
        source="Based, arXiv 2402.18668, section 4",
    ),
    "hedgehog": FeatureMap(
        function=hedgehog, size=lambda k: 2 * k, weight="learned",
        source="arXiv 2402.04347, section 4",
    ),
    "random_fourier": FeatureMap(
        function=random_fourier, size=lambda k: 2 * k, weight="random",
        width=lambda k: torch.ones(k, 1),
        source="RFA, arXiv 2103.02143, section 3",
    ),
    "performer": FeatureMap(
        function=performer, weight="random", source="arXiv 2009.14794, lemma 1"
    ),
    "cosformer": FeatureMap(
        function=cosformer, size=lambda k: 2 * k, positional=True,
        source="arXiv 2202.08791, section 3",
    ),
    "rebased": FeatureMap(
        function=rebased, size=lambda k: k * (k + 1) // 2, weight="affine",
        start=lambda k: torch.stack([torch.ones(k), torch.zeros(k)]),
        source="arXiv 2402.10644, section 4, normed over each head",
    ),
    "dijiang": FeatureMap(
        function=dijiang, weight="random", start=lambda k: torch.ones(1, k),
        width=lambda k: torch.ones(1, k), widened=lambda t, scale: torch.cat([t, scale], dim=1),
        source="arXiv 2403.19928, section 3",
    ),
}  # fmt: skip


class QueryKeyMap(nn.Module):
    """phi of queries and keys, computed in float32 for 16-bit inputs; each head has its weights."""

    roles: ClassVar[dict[str, Role]] = dict.fromkeys(("bandwidth", "q_scale", "k_scale"), "scale")
    random: Tensor | None
    bandwidth: nn.Parameter | None

    def __init__(self, name: str, heads: int, channels: int) -> None:
        """Start learned maps at the identity, and draw random ones from a normal distribution."""
        super().__init__()
        self.name = name
        self.features = self.map.size(channels)
        kind = self.map.weight

        def start() -> Tensor:
            return self.map.start(channels).repeat(heads, 1, 1)

        for stream in "qk":
            for suffix, needed in (("weight", "learned"), ("scale", "affine")):
                value = nn.Parameter(start()) if kind == needed else None
                self.register_parameter(f"{stream}_{suffix}", value)
        self.register_buffer("random", torch.randn(start().shape) if kind == "random" else None)
        # RFA learns how wide its Gaussian kernel is; the softmax kernel of Performer has one width.
        width = None if self.map.width is None else self.map.width(channels).repeat(heads, 1, 1)
        self.bandwidth = None if width is None else nn.Parameter(width)

    @property
    def map(self) -> FeatureMap:
        """The entry of the table; a copy would hold functions, which pickle refuses."""
        return FEATURE_MAPS[self.name]

    def forward(
        self, q: Tensor, k: Tensor, position: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Map q [B, T, H, K] and k `[B, T*n, H, K]` to M channels, each in its dtype.

        The position [B, T] is only for maps that depend on it.
        """
        shared = self.random
        if shared is not None and self.bandwidth is not None:
            shared = self.map.widened(computed(shared), self.bandwidth)

        def mapped(x: Tensor, stream: str, position: Tensor | None) -> Tensor:
            found = shared, getattr(self, f"{stream}_weight"), getattr(self, f"{stream}_scale")
            weight = next((x for x in found if x is not None), None)
            return self.map.function(computed(x), weight, position).to(x.dtype)

        steps = k.shape[1] // max(q.shape[1], 1)
        k_position = None if position is None else position.repeat_interleave(steps, dim=1)
        # Autocast would take the products of the maps to 16 bits.
        with without_autocast(q.device):
            return mapped(q, "q", position), mapped(k, "k", k_position)


def normed_qkv(projections: Projections, otherwise: QueryKeyNorm) -> Arguments:
    """q, k and v for the operator, q and k divided by the norm that the layer names."""
    norm = otherwise if projections.qk_norm is None else projections.qk_norm
    if norm == "l1":
        q, k = (_l1(x).to(x.dtype) for x in (projections.q, projections.k))
        return {"q": q, "k": k, "v": projections.v, "normalize_qk": False}
    return projections.qkv | {"normalize_qk": norm == "l2"}


def qk_normed(projections: Projections, x: Tensor, otherwise: QueryKeyNorm = "l2") -> Tensor:
    """x divided by the norm that the layer names, in float32 at least, before the operator."""
    norm = otherwise if projections.qk_norm is None else projections.qk_norm
    return {"none": computed, "l1": _l1, "l2": unit}[norm](x)


def _l1(x: Tensor) -> Tensor:
    wide = computed(x)
    return wide / (wide.abs().sum(-1, keepdim=True) + SMALLEST_NORM)
