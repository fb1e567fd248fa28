"""The feature map of a layer's queries and keys, with whatever it learns or draws."""

import difflib

import torch
from torch import Tensor, nn

from deltarule.nn.feature_maps import FEATURE_MAPS, NORMS
from deltarule.nn.gates import computed
from deltarule.nn.rule import QueryKeyNorm


class QueryKeyMap(nn.Module):
    """phi of queries and keys, computed in float32 for 16-bit inputs.

    Args:
        name: A key of `deltarule.nn.feature_maps.FEATURE_MAPS`.
        heads: Heads of q and k, each with weights of its own.
        channels: Channels K of a head.

    Raises:
        ValueError: There is no map of this name.

    Example:
        >>> phi = QueryKeyMap("dpfp", heads=2, channels=4)
        >>> q, k = phi(torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2, 4))
        >>> q.shape, phi.features
        (torch.Size([1, 3, 2, 8]), 8)
    """

    random: Tensor | None
    bandwidth: nn.Parameter | None

    def __init__(self, name: str, heads: int, channels: int) -> None:
        """Start learned maps at the identity, and draw random ones from a normal distribution."""
        super().__init__()
        check_word("feature_map", name, list(FEATURE_MAPS))
        self.map = FEATURE_MAPS[name]
        self.features = self.map.size(channels)
        weights = torch.eye(channels).repeat(heads, 1, 1)
        learned, random = self.map.weight == "learned", self.map.weight == "random"
        self.q_weight = nn.Parameter(weights) if learned else None
        self.k_weight = nn.Parameter(weights.clone()) if learned else None
        self.register_buffer("random", torch.randn(heads, channels, channels) if random else None)
        # RFA learns how wide its Gaussian kernel is; the softmax kernel of Performer has one width.
        wide = random and name == "random_fourier"
        self.bandwidth = nn.Parameter(torch.ones(heads, channels, 1)) if wide else None

    def forward(
        self, q: Tensor, k: Tensor, position: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Map q [B, T, H, K] and k [B, T*n, H, K] to M channels, each in its dtype.

        The position [B, T] is only for maps that depend on it.
        """
        shared = self.random
        if shared is not None and self.bandwidth is not None:
            shared = computed(shared) * self.bandwidth
        steps = k.shape[1] // max(q.shape[1], 1)
        k_position = None if position is None else position.repeat_interleave(steps, dim=1)
        # Autocast would take the products of the maps to 16 bits.
        with torch.autocast(q.device.type, enabled=False):
            q = self._one(q, shared if self.q_weight is None else self.q_weight, position)
            k = self._one(k, shared if self.k_weight is None else self.k_weight, k_position)
        return q, k

    def _one(self, x: Tensor, weight: Tensor | None, position: Tensor | None) -> Tensor:
        return self.map.function(computed(x), weight, position).to(x.dtype)


def check_word(name: str, given: object, known: list[str]) -> None:
    """Refuse a word that is none of the known ones, suggesting the nearest."""
    if given not in known:
        near = difflib.get_close_matches(str(given), known, n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {given!r}{hint}")


def check_divides(normalizer: bool, feature_map: str | None) -> None:
    """Refuse to divide by a sum that may be zero or negative."""
    name = "identity" if feature_map is None else feature_map
    if normalizer and not FEATURE_MAPS[name].divides:
        known = ", ".join(name for name, entry in FEATURE_MAPS.items() if entry.divides)
        raise ValueError(
            f"normalizer=True divides by a sum of phi(q) . phi(k), which feature_map={name!r} may "
            f"make zero or negative: choose one of {known}"
        )


def check_norm(qk_norm: QueryKeyNorm | None) -> QueryKeyNorm | None:
    """Refuse a norm that is none."""
    if qk_norm is not None:
        check_word("qk_norm", qk_norm, list(NORMS))
    return qk_norm
