"""The sums of `mesa` where a process of a context begins.

What is read is not linear in the sums, but the sums are: with w_t = exp(the decays after t)

    U = sum_t w_t beta_t [v_t; k_t] k_t^T        M = exp(all decays), one number a head
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.ops.context import Context
from deltarule.ops.context.exchange import starting_state
from deltarule.shapes import Beta, Keys, MesaState, Values


def starting_sums(
    context: Context, k: Keys, v: Values, beta: Beta, log_decay: Tensor | None,
    given: MesaState | None,
) -> MesaState:  # fmt: skip
    """Return the sums before each sequence here, as given where it begins here."""
    first, sequences = len(k), context.sequences or len(k)
    heads, dtype = v.shape[2], torch.promote_types(k.dtype, torch.float32)
    key_size, value_size = k.shape[3], v.shape[3]
    if given is None:
        zeros = k.new_zeros(sequences, heads, value_size + key_size, key_size, dtype=dtype)
        given = MesaState(zeros[:, :, value_size:], zeros[:, :, :value_size])
    start = torch.cat([given.values, given.covariance], -2)
    k, v = (x[:, context.tail :].to(dtype) for x in (k, v))
    decay = torch.zeros_like(beta, dtype=dtype)
    if log_decay is not None:
        decay = log_decay.to(dtype).expand_as(beta)
    decay, weight = decay[:, context.tail :], beta[:, context.tail :].to(dtype)
    # The decays after each token; by sums from the end, since a reset is -inf.
    after = F.pad(decay.flip(1).cumsum(1).flip(1)[:, 1:], (0, 0, 0, 1))
    keys = k.repeat_interleave(heads // k.shape[2], 2)
    written = torch.cat([v, keys], -1) * (weight * after.exp()).unsqueeze(-1)
    kept = decay.sum(1).exp()[..., None, None]
    end = torch.einsum("bthv, bthk -> bhvk", written, keys) + start[-first:] * kept
    carried = float(context.goes_on and not context.starts)
    transition = (carried * kept).expand(-1, -1, -1, key_size)
    before = starting_state(context, end, transition)
    start = torch.cat([start[:first] + before, start[first:]])
    return MesaState(start[:, :, value_size:], start[:, :, :value_size])
