"""What attention keeps: keys and values that grow with each call, or a cache that stays in place.

A cache is for decoding token by token. Its rows are overwritten in turn; where a window is as long
as the cache, from the start again.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.nn.layout import Layout
from deltarule.nn.state import LentState, State


def continued(
    before: State, keys: Tensor, values: Tensor, layout: Layout, window: int | None
) -> State:
    """The state with a call's rows appended, real rows last, less what no window reaches."""
    new = torch.ones_like(keys[:, before["keys"].shape[1] :, 0, 0], dtype=torch.bool)
    valid = torch.cat([before["valid"], new if layout.real is None else layout.real], dim=1)
    if layout.real is not None:
        # Real rows last, so that distances in rows are distances in tokens.
        order = valid.byte().argsort(dim=1, stable=True)
        valid = valid.gather(1, order)
        index = order[..., None, None]
        keys, values = (torch.take_along_dim(rows, index, dim=1) for rows in (keys, values))
    if window is not None:
        first = max(0, keys.shape[1] - window + 1)
        keys, values, valid = (rows[:, first:].clone() for rows in (keys, values, valid))
    length = before["length"] + layout.counts
    return State(keys=keys, values=values, valid=valid, length=length)


def with_free_rows(state: State, free: int) -> LentState:
    """A copy of attention's state with so many free rows; `place` [B] is that of the next token."""
    batch, rows = state["valid"].shape
    keys, values, valid = (
        torch.cat([state[name], state[name].new_zeros(batch, free, *state[name].shape[2:])], 1)
        for name in ("keys", "values", "valid")
    )
    place = torch.full_like(state["length"], rows)
    length = state["length"].clone()
    return LentState(keys=keys, values=values, valid=valid, length=length, place=place)


def attend_to_cache(
    q: Tensor, k: Tensor, v: Tensor, state: LentState, scale: float | None = None
) -> Tensor:
    """Write one token of each row into the cache, and attend to all that it holds.

    q [B, heads, D] and k [B, KV heads, D] are rotated, v is like k, and the state, overwritten, is
    from `with_free_rows`: [B, KV heads, heads / KV heads, D].
    """
    seen = add_row(k, v, state)[:, None, None]
    keys, values = (state[name].to(q.dtype).transpose(1, 2) for name in ("keys", "values"))
    # The query heads that share a key head are rows of one query: no key is repeated.
    queries = q.unflatten(1, (k.shape[1], -1))
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=scale)


def add_row(k: Tensor, v: Tensor, state: LentState) -> Tensor:
    """Write one token of each row into the cache; return [B, L], which of its rows have one."""
    place, valid = state["place"], state["valid"]
    at = torch.arange(len(place), device=place.device), place
    for name, new in (("keys", k), ("values", v)):
        state[name].index_put_(at, new.to(state[name].dtype))
    valid.index_put_(at, torch.ones_like(place, dtype=torch.bool))
    state["length"].add_(1)
    place.add_(1).remainder_(valid.shape[1])
    return valid
