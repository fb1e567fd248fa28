"""GateLoop (Katsch 2023, arXiv 2311.01927, section 3).

    a_t = f(alpha_t) exp(i g(beta_t)), f = sigmoid, g = identity     data-controlled, complex
    H_t = H_{t-1} * a_t + v_t k_t^T,    y_t = Re(H_t q_t)

a_t is one number per head, or one per key channel. The paper uses as many heads as channels (K = V
= 1). Unlike the name suggests the released package (flax-gated-linear-rnn) has a real gated RNN,
h_t = f_t h_{t-1} + i_t tanh(.) with f = 1 - i, y = o tanh(h).
For real q, k, v the sign of the phase does not show.
"""

import torch


def transition(alpha, beta):
    return torch.polar(torch.sigmoid(alpha), beta)


def recurrence(q, k, v, a):
    """q, k: (T, K); v: (T, V); a: (T, K) complex."""
    H = a.new_zeros(v.shape[1], k.shape[1])
    outputs = []
    for t in range(len(q)):
        H = H * a[t] + torch.outer(v[t], k[t])
        outputs.append((H @ q[t].to(H.dtype)).real)
    return torch.stack(outputs), H
