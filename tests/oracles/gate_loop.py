"""GateLoop (Katsch 2023, arXiv 2311.01927, section 3).

    a_t = f(alpha_t) exp(i g(beta_t)), f = sigmoid, g = identity     data-controlled, complex
    H_t = H_{t-1} * a_t + v_t k_t^T,    y_t = Re(H_t q_t)

a_t is one number per head, or one per key channel. The paper uses as many heads as channels (K = V
= 1). Unlike the name suggests the released package (flax-gated-linear-rnn) has a real gated RNN,
h_t = f_t h_{t-1} + i_t tanh(.) with f = 1 - i, y = o tanh(h): `released` below.
For real q, k, v the sign of the phase does not show. As a parallel sum,
y_t = Re sum_{j<=t} q_t^T (prod_{s=j+1}^{t} a_s * k_j) v_j.
"""

import torch


def transition(alpha, beta):
    return torch.polar(torch.sigmoid(alpha), beta)


def recurrence(q, k, v, a, state=None):
    """q, k: (T, K); v: (T, V); a: (T, K) complex; state: (V, K) complex."""
    H = a.new_zeros(v.shape[1], k.shape[1]) if state is None else state
    outputs = []
    for t in range(len(q)):
        H = H * a[t] + torch.outer(v[t], k[t])
        outputs.append((H @ q[t].to(H.dtype)).real)
    return torch.stack(outputs), H


def parallel(q, k, v, a):
    outputs = []
    for t in range(len(q)):
        o = torch.zeros_like(v[0])
        for j in range(t + 1):
            product = torch.ones_like(a[0])
            for s in range(j + 1, t + 1):
                product = product * a[s]
            o = o + (q[t] * product * k[j]).sum().real * v[j]
        outputs.append(o)
    return torch.stack(outputs)


def released(x, input_gate, output_gate):
    """All pre-activations (T, D), tied gates."""
    h = torch.zeros_like(x[0])
    outputs = []
    for t in range(len(x)):
        i = torch.sigmoid(input_gate[t])
        h = (1 - i) * h + i * torch.tanh(x[t])
        outputs.append(torch.sigmoid(output_gate[t]) * torch.tanh(h))
    return torch.stack(outputs), h
