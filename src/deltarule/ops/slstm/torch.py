"""sLSTM in PyTorch: all sequences side by side, token by token, with a backward of its own.

The forward keeps h, c, n and m of every token. Before the backward the gates of all tokens come
from one product; then it goes from the last token to the first.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.ops.slstm.inputs import SLSTMInputs


class SideBySide:
    """Rows of sequences as [L, H, N, ..]: L tokens of the longest, N sequences."""

    def __init__(self, inputs: SLSTMInputs) -> None:
        """Find the rows; a packed call reads its offsets, which a GPU waits for."""
        self.first, self.size = inputs.spans
        self.steps = inputs.gates.shape[1]
        if inputs.cu_seqlens is not None and self.size.device.type != "meta":
            self.steps = int(self.size.max()) if len(self.size) else 0
        token = torch.arange(self.steps, device=self.size.device).unsqueeze(1)
        self.here = token < self.size
        self.even = inputs.cu_seqlens is None and inputs.lengths is None
        rows = inputs.gates.shape[0] * inputs.gates.shape[1]
        self.rows = (self.first + token).clamp(max=max(rows - 1, 0))
        sequence, place = inputs.places
        self.places = place * len(self.first) + sequence

    def lay(self, x: Tensor) -> Tensor:
        """[B T, H, ..] -> [L, H, N, ..]."""
        return x[self.rows].transpose(1, 2)

    def back(self, x: Tensor) -> Tensor:
        """[L, H, N, ..] -> [B T, H, ..]."""
        return x.transpose(1, 2).flatten(0, 1)[self.places]

    def where_here(self, t: int, new: Tensor, old: Tensor) -> Tensor:
        """New [H, N, ..] in sequences that have a token t."""
        if self.even:
            return new
        return torch.where(self.here[t].view(-1, *[1] * (new.ndim - 2)), new, old)


def forward(inputs: SLSTMInputs, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """o [B, T, H, D], the last state [N, H, 4, D], and all of them [B T, H, 4, D] with `save`."""
    side = SideBySide(inputs)
    gates = side.lay(inputs.gates.to(inputs.dtype).flatten(0, 1)).flatten(-2)
    weights = inputs.recurrent.to(inputs.dtype).flatten(1, 2).mT
    state = inputs.before.transpose(0, 1)
    states = []
    for t in range(side.steps):
        state = side.where_here(t, step(gates[t], weights, state), state)
        states.append(state)
    final = state.transpose(0, 1).contiguous()
    if not states:
        return inputs.gates[:, :, :, 0].clone(), final.clone(), final.new_empty(0, *final.shape[1:])
    kept = side.back(torch.stack(states)) if save else final.new_empty(0, *final.shape[1:])
    h = kept[:, :, 0] if save else side.back(torch.stack([x[:, :, 0] for x in states]))
    o = h.to(inputs.gates.dtype).clone(memory_format=torch.contiguous_format)
    return o.view(inputs.gates[:, :, :, 0].shape), final, kept


def step(gates: Tensor, weights: Tensor, state: Tensor) -> Tensor:
    """Gates [H, N, 4 D], R^T [H, D, 4 D] and a state [H, N, 4, D] to the next state."""
    h, c, n, m = state.unbind(2)
    raw = torch.baddbmm(gates, h, weights)
    i, f, z, o = raw.unflatten(-1, (4, -1)).unbind(2)
    kept, fresh = F.logsigmoid(f) + m, n == 0
    m = torch.where(fresh, i, torch.maximum(kept, i))
    forget, write = torch.exp(kept - m).masked_fill(fresh, 0), torch.exp(i - m)
    c, n = torch.addcmul(forget * c, write, torch.tanh(z)), torch.addcmul(write, forget, n)
    return torch.stack([torch.sigmoid(o) * c / n, c, n, m], dim=2)


def backward(
    d_o: Tensor, d_final: Tensor, inputs: SLSTMInputs, raw: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients by the gates with R h [B T, H, 4, D], and by the state before, of wide d_o."""
    side = SideBySide(inputs)
    raw, states, d_o = side.lay(raw), side.lay(states), side.lay(d_o.flatten(0, 1))
    weights, start = inputs.recurrent.to(inputs.dtype).flatten(1, 2), inputs.before.transpose(0, 1)
    d_h, d_c, d_n, _ = d_final.transpose(0, 1).unbind(2)
    found = []
    for t in reversed(range(side.steps)):
        d_all, d_c_, d_n_ = step_back(
            d_h + d_o[t], d_c, d_n, raw[t], states[t], states[t - 1] if t else start
        )
        d_all = side.where_here(t, d_all, torch.zeros_like(d_all))
        found.append(d_all)
        d_h = side.where_here(t, d_all.flatten(-2) @ weights, d_h)
        d_c, d_n = side.where_here(t, d_c_, d_c), side.where_here(t, d_n_, d_n)
    d_before = torch.stack([d_h, d_c, d_n, torch.zeros_like(d_h)], dim=2).transpose(0, 1)
    if not found:
        return torch.zeros_like(inputs.gates, dtype=inputs.dtype).flatten(0, 1), d_before
    return side.back(torch.stack(found[::-1])), d_before


def step_back(
    d_h: Tensor, d_c: Tensor, d_n: Tensor, raw: Tensor, state: Tensor, before: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    i, f, z, o = raw.unbind(2)
    _, c, n, m = state.unbind(2)
    _, c_before, n_before, m_before = before.unbind(2)
    forget = torch.exp(F.logsigmoid(f) + m_before - m).masked_fill(n_before == 0, 0)
    write, z, o = torch.exp(i - m), torch.tanh(z), torch.sigmoid(o)
    d_c = d_c + d_h * o / n
    d_n = d_n - d_h * o * c / n.square()
    d_i, d_z = (d_c * z + d_n) * write, d_c * write * (1 - z.square())
    d_f = (d_c * c_before + d_n * n_before) * forget * torch.sigmoid(-f)
    d_all = torch.stack([d_i, d_f, d_z, d_h * c / n * o * (1 - o)], dim=2)
    return d_all, d_c * forget, d_n * forget
