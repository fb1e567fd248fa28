"""TTT-Linear and TTT-MLP (Sun et al. 2024, arXiv 2407.04620, sections 2.1-2.7; released ttt.py).

    loss(W; k, v) = 1/2 |LN(f(k; W)) + k - v|^2     the residual k is INSIDE the model
    W_t = W_{t'} - scale_t sum_{s=t'+1}^{t} lr_s grad loss(W_{t'}; k_s, v_s)
    o_t = q_t + LN(f(q_t; W_t))                     the residual is q, reads after the write

t' is the last token before t's mini-batch (16 in the release). lr_s = base_lr sigmoid(w^T x_s) / D
(base 1 for linear; D the head dimension), scale_t = max(1 / (position in its mini-batch, from 1) +
learned, 0): the scale belongs to the READING token t, the rate to the WRITING token s. Layer norm
has weights of its own per head and eps 1e-6; biases are fast weights too. Rows are tokens:
f(x) = x W + b. TTT-MLP: f(x) = gelu_tanh(x W1 + b1) W2 + b2 with width 4 D.
Rotary angles restart in every mini-batch. The text's output z = f(theta_Q x; W_t) leaves LN and the
residual to section 2.7. Flash-linear-attention's naive file reads out f + LN(f) instead.
"""

import torch
from torch.nn.functional import gelu, layer_norm


def linear(weights, x):
    return x @ weights["W1"] + weights["b1"]


def mlp(weights, x):
    hidden = gelu(x @ weights["W1"] + weights["b1"], approximate="tanh")
    return hidden @ weights["W2"] + weights["b2"]


def default_scale(mini_batch):
    """1, 1/2, ..., 1/b."""
    return 1 / torch.arange(1, mini_batch + 1, dtype=torch.float64)


def recurrence(model, weights, q, k, v, lr, scale, ln_weight, ln_bias, eps=1e-6):
    """q, k, v: (T, D); lr: (T,); scale: (mini_batch,); returns outputs and W_T."""

    def normalise(x):
        return layer_norm(x, x.shape[-1:], ln_weight, ln_bias, eps)

    def loss(weights, k, v):
        return 0.5 * (normalise(model(weights, k)) + k - v).square().sum()

    gradient = torch.func.grad(loss)
    current = start = weights
    total = {}
    outputs = []
    for t in range(len(q)):
        position = t % len(scale)
        if position == 0:
            start = current
            total = {name: torch.zeros_like(w) for name, w in start.items()}
        step = gradient(start, k[t], v[t])
        total = {name: total[name] + lr[t] * step[name] for name in total}
        current = {name: start[name] - scale[position] * total[name] for name in start}
        outputs.append(q[t] + normalise(model(current, q[t])))
    return torch.stack(outputs), current
