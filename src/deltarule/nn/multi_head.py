"""Multi-head DeltaNets: which of query, key and value each slot of a head has for itself."""

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from deltarule.nn import deltanet
from deltarule.nn.feature_maps import qk_normed
from deltarule.nn.gates import per_value_head
from deltarule.nn.rule import Arguments, LayerCall, Projections


def arguments(projections: Projections) -> Arguments:
    """A head of the operator for each state; what the slots of a head share is repeated.

    One state is read by all queries at once, through the sum of the unit queries.
    """
    p = projections
    if p.q.shape[2] > max(p.k.shape[2], p.v.shape[2]):
        dtype = p.q.dtype
        q = qk_normed(p, p.q).unflatten(2, (-1, p.slots)).sum(3).to(dtype)
        p = replace(p, q=q, k=qk_normed(p, p.k).to(dtype), qk_norm="none")
    keys = max(p.q.shape[2], p.k.shape[2])
    states = max(keys, p.v.shape[2])
    q, k = (per_value_head(x, keys) for x in (p.q, p.k))
    beta_logits = per_value_head(p.need("beta_logits"), states)
    expanded = replace(p, q=q, k=k, v=per_value_head(p.v, states), beta_logits=beta_logits)
    return deltanet.arguments(expanded)


def read_out(o: Tensor, projections: Projections) -> Tensor:
    p = projections
    heads = max(x.shape[2] for x in (p.q, p.k, p.v)) // p.slots
    return o.unflatten(2, (heads, -1)).sum(3)


class MultiHeadDeltaNet(deltanet.DeltaNet):
    """num_heads heads of num_slots DeltaNets, each with its own q, k, v, beta and state, summed.

    The base of the other four, in which the slots of a head share some of these. num_v_heads is
    num_heads.

    Examples:
        >>> y, state = MultiHeadDeltaNet(32, num_heads=2, num_slots=3)(torch.zeros(1, 5, 32))
        >>> state["recurrent"].shape
        torch.Size([1, 6, 16, 16])
    """

    rule = replace(
        deltanet.DeltaNet.rule, name="multi_head_deltanet", title="Multi-head DeltaNet",
        page="multi_head", state_size="HV M V K",
        recurrence="S_i = S_i (I - beta_i k_i k_i^T) + beta_i v_i k_i^T",
        read_out="o = sum_i S_i q_i", source="blog post 'Multi-Head DeltaNet', its table",
        arguments=arguments, read_out_function=read_out,
    )  # fmt: skip
    # What heads share is what the layer's name says.
    options = deltanet.DeltaNet.options - {"num_v_heads"} | {"num_slots"}
    default_num_slots = 2
    # Which of q, k, v and beta each slot has for itself.
    own: ClassVar[tuple[str, ...]] = ("q", "k", "v", "beta")

    def heads_of(self, name: str) -> int:
        """A head of the operator for each slot, where slots do not share."""
        return self.num_heads * (self.num_slots if name in self.own else 1)

    def memories(self) -> dict[str, tuple[int, ...]]:
        """A state for each slot with a key or value of its own."""
        ((_, *sizes),) = super().memories().values()
        return {"recurrent": (max(self.heads_of("k"), self.heads_of("v")), *sizes)}

    def project(self, call: LayerCall) -> Projections:
        return replace(super().project(call), slots=self.num_slots)


class MultiKVDeltaNet(MultiHeadDeltaNet):
    """One query reads a state for each key and value: DeltaProduct with states of their own."""

    rule = replace(
        MultiHeadDeltaNet.rule,
        name="multi_kv_deltanet",
        title="Multi-KV DeltaNet",
        read_out="o = sum_i S_i q",
    )
    own = ("k", "v", "beta")


class MultiValueDeltaNet(MultiHeadDeltaNet):
    """One query, key and write strength for all values of a head, each with its own state.

    Examples:
        >>> layer = MultiValueDeltaNet(32, num_heads=2)
        >>> layer.k_proj.weight.shape, layer.v_proj.weight.shape
        (torch.Size([32, 32]), torch.Size([64, 32]))
    """

    rule = replace(
        MultiKVDeltaNet.rule, name="multi_value_deltanet", title="Multi-value DeltaNet",
        recurrence="S_i = S_i (I - beta k k^T) + beta v_i k^T",
    )  # fmt: skip
    own = ("v",)


class MultiKeyDeltaNet(MultiHeadDeltaNet):
    """One value under a key for each state, read by one query."""

    rule = replace(
        MultiKVDeltaNet.rule, name="multi_key_deltanet", title="Multi-key DeltaNet",
        recurrence="S_i = S_i (I - beta_i k_i k_i^T) + beta_i v k_i^T",
    )  # fmt: skip
    own = ("k", "beta")


class MultiQueryDeltaNet(MultiHeadDeltaNet):
    """One key, value, write strength and state a head, read by several queries.

    Examples:
        >>> y, state = MultiQueryDeltaNet(32, num_heads=2, num_slots=3)(torch.zeros(1, 5, 32))
        >>> state["recurrent"].shape
        torch.Size([1, 2, 16, 16])
    """

    rule = replace(
        MultiHeadDeltaNet.rule, name="multi_query_deltanet", title="Multi-query DeltaNet",
        state_size="HV V K", recurrence="S = S (I - beta k k^T) + beta v k^T",
        read_out="o = S sum_i q_i",
    )  # fmt: skip
    own = ("q",)


class BlockDeltaNet(MultiHeadDeltaNet):
    """Keys of num_slots blocks, each of which erases on its own, under one value.

    A head's state [V, n K] moves by a block-diagonal matrix with a generalised Householder matrix
    in each block of K channels: state grows with the key, the work of a kernel does not. Slot i of
    the state is block i.

    Examples:
        >>> layer = BlockDeltaNet(32, num_heads=2, num_slots=4, head_k_dim=8)
        >>> layer.k_proj.weight.shape, layer(torch.zeros(1, 5, 32))[1]["recurrent"].shape
        (torch.Size([64, 32]), torch.Size([1, 8, 8, 8]))
    """

    rule = replace(
        MultiKeyDeltaNet.rule, name="block_deltanet", title="Block DeltaNet",
        read_out="o = sum_i S_i q_i",
        source="arXiv 2406.06484, section 5.3 (future work: block-diagonal Householder matrices)",
    )  # fmt: skip
    own = ("q", "k", "beta")
