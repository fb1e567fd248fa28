"""mLSTM (Beck et al. 2024, arXiv 2405.04517, eqs. 19-27; stabiliser as eqs. 15-17).

    m_t = max(log f_t + m_{t-1}, i~_t)
    f'_t = exp(log f_t + m_{t-1} - m_t),  i'_t = exp(i~_t - m_t)
    C_t = f'_t C_{t-1} + i'_t v_t (k_t / sqrt d)^T,     n_t = f'_t n_{t-1} + i'_t k_t / sqrt d
    o_t = C_t q_t / (max(|n_t^T q_t|, exp(-m_t)) + eps)

Eq. 21 prints max(|n^T q|, 1): that holds for the unstabilised n. C_t and n_t above are smaller by
exp(-m_t), so the floor is exp(-m_t); a floor of 1 beside a stabilised n is wrong. With eps = 0
the result does not depend on m_0. The released programs use f = sigmoid, m_0 = 0 in the recurrent
step, m_0 = -inf in the parallel form, eps = 1e-6: eps is added to the STABILISED denominator, so
it counts exp(m_t) times as much and the two released forms differ by O(eps).
"""

import torch
from torch.nn.functional import logsigmoid


def soft_cap(x, cap):
    """cap tanh(x / cap): xLSTM-7B caps both gate pre-activations at 15 (the logits at 30)."""
    return cap * torch.tanh(x / cap)


def recurrence(q, k, v, input_gate, forget_gate, eps=0.0):
    """q, k: (T, K) unscaled; v: (T, V); pre-activations of the gates: (T,); m_0 is 0."""
    C = v.new_zeros(v.shape[1], k.shape[1])
    n = v.new_zeros(k.shape[1])
    maximum = v.new_tensor(0.0)
    outputs = []
    for t in range(len(q)):
        log_f = logsigmoid(forget_gate[t])
        previous, maximum = maximum, torch.maximum(log_f + maximum, input_gate[t])
        f, i = torch.exp(log_f + previous - maximum), torch.exp(input_gate[t] - maximum)
        key = k[t] / k.shape[1] ** 0.5
        C = f * C + i * torch.outer(v[t], key)
        n = f * n + i * key
        denominator = torch.maximum((n @ q[t]).abs(), torch.exp(-maximum)) + eps
        outputs.append(C @ q[t] / denominator)
    return torch.stack(outputs), (C, n, maximum)
