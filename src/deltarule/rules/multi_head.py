"""The five multi-head DeltaNets: which of query, key and value each head has for itself.

S_{t,i} = S_{t-1,i} (I - beta_{t,i} k_{t,i} k_{t,i}^T) + beta_{t,i} v_{t,i} k_{t,i}^T
o_{t,i} = S_{t,i} q_{t,i}        i = 1..HV, put side by side, not summed
"""

from dataclasses import replace

from torch import Tensor

from deltarule.rules import deltanet
from deltarule.rules.rule import Carry, Mapped, Projections, Rule


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
