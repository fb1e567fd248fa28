"""Linear attention: a sum of outer products, nothing forgotten, with any feature map."""

import torch.nn.functional as F
from torch import Tensor

from deltarule.nn.delta_mixer import DeltaMixer
from deltarule.nn.feature_maps import normed_qkv
from deltarule.nn.gates import computed
from deltarule.nn.rule import Arguments, Projections, Rule

# Where no feature of a query is among those of the keys, nothing is read and nothing divides.
SMALLEST = 1e-6


def with_one(v: Tensor) -> Tensor:
    """[v; 1]: the values and the channel that the normaliser sums in."""
    return F.pad(v, (0, 1), value=1.0)


def divided(o: Tensor, least: Tensor | float = SMALLEST, more: float = 0.0) -> Tensor:
    """S q / (max(z^T q, least) + more)."""
    read, z = computed(o[..., :-1]), computed(o[..., -1:])
    return (read / (z.clamp(min=least) + more)).to(o.dtype)


def arguments(projections: Projections) -> Arguments:
    given = normed_qkv(projections, otherwise="none") | {"beta": None}
    if projections.normalizer:
        given |= {"v": with_one(projections.v), "scale": 1.0}
    return given


def read_out(o: Tensor, projections: Projections) -> Tensor:
    return divided(o) if projections.normalizer else o


class LinearAttention(DeltaMixer):
    """Linear attention: S += v phi(k)^T, o = S phi(q), then a norm of each head.

    Two options are the papers' ablations: feature_map (identity, elu, relu, silu, dpfp,
    taylor, hedgehog, random_fourier, performer, cosformer, rebased, dijiang) and qk_norm (none, l1,
    l2). With normalizer=True the read-out is divided by z^T phi(q), z the sum of phi(k), in place
    of the norm. cosFormer counts tokens (`length` [N] in the state).

    Examples:
        >>> y, state = LinearAttention(32, num_heads=2)(torch.zeros(1, 5, 32))
        >>> y.shape, state["recurrent"].shape
        (torch.Size([1, 5, 32]), torch.Size([1, 2, 16, 16]))
        >>> layer = LinearAttention(32, num_heads=2, feature_map="elu", normalizer=True)
        >>> layer(torch.zeros(1, 5, 32))[1]["recurrent"].shape  # one value channel more: z
        torch.Size([1, 2, 17, 16])
    """

    rule = Rule(
        name="linear_attention", title="Linear attention", decay="none", erase="none",
        recurrence="S = S + v k^T",
        objective="-<S k, v>, one gradient step of size 1",
        source="arXiv 2006.16236, eq. 16 to 20; the norm as in arXiv 2210.10340",
        arguments=arguments, read_out_function=read_out,
    )  # fmt: skip
    maps_features = True
