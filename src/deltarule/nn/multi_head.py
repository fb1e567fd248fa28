"""The five multi-head DeltaNets as layers: DeltaNet with q, k, v or beta shared by all heads."""

from typing import ClassVar

from deltarule.nn.arguments import check_own_heads
from deltarule.nn.deltanet import DeltaNet
from deltarule.rules import multi_head


class MultiHeadDeltaNet(DeltaNet):
    """DeltaNet by another name: every head has its own query, key, value and write strength.

    The base of the other four, which project what is shared once and keep an output for each head.

    Defaults: DeltaNet's. num_v_heads is num_heads.

    Example:
        >>> import torch
        >>> y, state = MultiHeadDeltaNet(32, num_heads=2)(torch.zeros(1, 5, 32))
        >>> state["recurrent"].shape
        torch.Size([1, 2, 16, 16])

    Source: the blog post "Multi-Head DeltaNet", with outputs side by side instead of summed.
    """

    rule = multi_head.HEAD
    maps_features = False
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

    Example:
        >>> MultiKVDeltaNet(32, num_heads=2).q_proj.weight.shape
        torch.Size([16, 32])
    """

    rule = multi_head.KEY_VALUE
    shared = ("q",)


class MultiValueDeltaNet(MultiHeadDeltaNet):
    """One query and one key for all values, each with a state and a write strength (GVA).

    Example:
        >>> layer = MultiValueDeltaNet(32, num_heads=2)
        >>> layer.k_proj.weight.shape, layer.v_proj.weight.shape
        (torch.Size([16, 32]), torch.Size([32, 32]))
    """

    rule = multi_head.VALUE
    shared = ("q", "k")


class MultiKeyDeltaNet(MultiHeadDeltaNet):
    """One value under a key for each state, read by one query.

    Example:
        >>> MultiKeyDeltaNet(32, num_heads=2).v_proj.weight.shape
        torch.Size([16, 32])
    """

    rule = multi_head.KEY
    shared = ("q", "v")


class MultiQueryDeltaNet(MultiHeadDeltaNet):
    """One key, value and write strength, so one state, read by a query for each head.

    The operator keeps the state once for each query: the heads of `recurrent` are equal.

    Example:
        >>> MultiQueryDeltaNet(32, num_heads=2).k_proj.weight.shape
        torch.Size([16, 32])
    """

    rule = multi_head.QUERY
    shared = ("k", "v", "beta")
