"""The five multi-head DeltaNets: which of query, key and value each head has for itself.

S_{t,i} = S_{t-1,i} (I - beta_{t,i} k_{t,i} k_{t,i}^T) + beta_{t,i} v_{t,i} k_{t,i}^T
o_{t,i} = S_{t,i} q_{t,i}        i = 1..HV, put side by side, not summed
"""

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from deltarule.nn import deltanet
from deltarule.nn.arguments import check_own_heads
from deltarule.nn.delta import DeltaMixer
from deltarule.nn.rule import Carry, Mapped, Projections, Rule


def arguments(projections: Projections, carry: Carry | None = None) -> Mapped:
    """Repeat for every head what the heads share; q and k together may stay one for all values."""
    p = projections
    keys = max(p.q.shape[2], p.k.shape[2])
    heads = max(keys, p.v.shape[2])
    q, k = (_repeated(x, keys) for x in (p.q, p.k))
    beta_logits = _repeated(p.need("beta_logits"), heads)
    expanded = replace(p, q=q, k=k, v=_repeated(p.v, heads), beta_logits=beta_logits)
    return deltanet.arguments(expanded, carry)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """[B, T, 1 or heads, ...] -> [B, T, heads, ...]."""
    return x.expand(*x.shape[:2], heads, *x.shape[3:])


def _row(name: str, title: str, recurrence: str, read_out: str) -> Rule:
    return replace(
        deltanet.RULE, name=name, title=title, recurrence=recurrence, read_out=read_out,
        source="blog post 'Multi-Head DeltaNet', its table", page="multi_head",
        arguments=arguments,
    )  # fmt: skip


HEAD = _row(
    "multi_head_deltanet", "Multi-head DeltaNet",
    "S_i = S_i (I - beta_i k_i k_i^T) + beta_i v_i k_i^T", "o_i = S_i q_i",
)  # fmt: skip
KEY_VALUE = _row(
    "multi_kv_deltanet", "Multi-KV DeltaNet",
    "S_i = S_i (I - beta_i k_i k_i^T) + beta_i v_i k_i^T", "o_i = S_i q",
)  # fmt: skip
VALUE = _row(
    "multi_value_deltanet", "Multi-value DeltaNet",
    "S_i = S_i (I - beta_i k k^T) + beta_i v_i k^T", "o_i = S_i q",
)  # fmt: skip
KEY = _row(
    "multi_key_deltanet", "Multi-key DeltaNet",
    "S_i = S_i (I - beta_i k_i k_i^T) + beta_i v k_i^T", "o_i = S_i q",
)  # fmt: skip
QUERY = _row(
    "multi_query_deltanet", "Multi-query DeltaNet",
    "S = S (I - beta k k^T) + beta v k^T", "o_i = S q_i",
)  # fmt: skip


class MultiHeadDeltaNet(DeltaMixer):
    """DeltaNet by another name: every head has its own query, key, value and write strength.

    The base of the other four, which project what is shared once and keep an output for each head.

    Defaults: DeltaNet's. num_v_heads is num_heads.

    Examples:
        >>> import torch
        >>> y, state = MultiHeadDeltaNet(32, num_heads=2)(torch.zeros(1, 5, 32))
        >>> state["recurrent"].shape
        torch.Size([1, 2, 16, 16])

    Source: the blog post "Multi-Head DeltaNet", with outputs side by side instead of summed.
    """

    rule = HEAD
    default_conv_size = 4
    activates_projections = True
    # Which of q, k, v and beta all heads share.
    shared: ClassVar[tuple[str, ...]] = ()

    def check_options(self) -> None:
        """Refuse value heads that share a key head: sharing is what the layer's name says."""
        check_own_heads(self.rule.name, self.num_heads, self.num_v_heads)

    def heads_of(self, name: str) -> int:
        """One head of what is shared."""
        return 1 if name in self.shared else super().heads_of(name)


class MultiKVDeltaNet(MultiHeadDeltaNet):
    """One query reads a state for each key and value: DeltaProduct with states of their own.

    Examples:
        >>> MultiKVDeltaNet(32, num_heads=2).q_proj.weight.shape
        torch.Size([16, 32])
    """

    rule = KEY_VALUE
    shared = ("q",)


class MultiValueDeltaNet(MultiHeadDeltaNet):
    """One query and one key for all values, each with a state and a write strength (GVA).

    Examples:
        >>> layer = MultiValueDeltaNet(32, num_heads=2)
        >>> layer.k_proj.weight.shape, layer.v_proj.weight.shape
        (torch.Size([16, 32]), torch.Size([32, 32]))
    """

    rule = VALUE
    shared = ("q", "k")


class MultiKeyDeltaNet(MultiHeadDeltaNet):
    """One value under a key for each state, read by one query.

    Examples:
        >>> MultiKeyDeltaNet(32, num_heads=2).v_proj.weight.shape
        torch.Size([16, 32])
    """

    rule = KEY
    shared = ("q", "v")


class MultiQueryDeltaNet(MultiHeadDeltaNet):
    """One key, value and write strength, so one state, read by a query for each head.

    The operator keeps the state once for each query: the heads of `recurrent` are equal.

    Examples:
        >>> MultiQueryDeltaNet(32, num_heads=2).k_proj.weight.shape
        torch.Size([16, 32])
    """

    rule = QUERY
    shared = ("k", "v", "beta")
