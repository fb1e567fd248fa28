"""Lift an oracle, which sees one head of one sequence, to a batch of heads; keys of unit length."""

import torch


def each_head(oracle, *inputs):
    """Inputs (B, T, H, ...) -> outputs (B, T, H, ...) and last states (B, H, ...)."""
    batch, _, heads = inputs[0].shape[:3]
    outputs, states = [], []
    for b in range(batch):
        results = [oracle(*(x[b, :, h] for x in inputs)) for h in range(heads)]
        outputs.append(torch.stack([o for o, _ in results], 1))
        states.append(torch.stack([s for _, s in results]))
    return torch.stack(outputs), torch.stack(states)


def unit(x):
    """Rows of unit length, as the released kernels have them."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
