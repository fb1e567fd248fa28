"""Hyena of order 2 (Poli et al. 2023, arXiv 2302.10866) and multi-head Hyena (Massaroli et al.
2023, arXiv 2310.18780, section 4); the filter h is given, whatever makes it.

    Hyena:       y = q * (h conv (k * v) + d (k * v))         per channel
    multi-head:  y_t = sum_{j<=t} h_{t-j} (q_t . k_j) v_j     per head, one filter for the head:
                 the convolution runs over the outer product k_j v_j^T, then q_t contracts it.

conv is causal: (h conv z)_t = sum_{j<=t} h_{t-j} z_j. The release adds the skip d z inside the
convolution (the multi-head text has none); q, k, v come out of a projection and a short causal
convolution of length 3. Safari's order: its first projection is q (x0), the second k (x1), then v.
"""

import torch


def hyena(q, k, v, h, d=0.0):
    """q, k, v: (T, C); h: (T, C) filter taps from lag 0; d: (C,)."""
    z = k * v
    outputs = []
    for t in range(len(q)):
        convolved = sum((h[t - j] * z[j] for j in range(t + 1)), torch.zeros_like(z[0]))
        outputs.append(q[t] * (convolved + d * z[t]))
    return torch.stack(outputs)


def multi_head(q, k, v, h, d=0.0):
    """One head. q, k: (T, K); v: (T, V); h: (T,)."""
    outer = [torch.outer(v[t], k[t]) for t in range(len(q))]
    outputs = []
    for t in range(len(q)):
        S = d * outer[t]
        for j in range(t + 1):
            S = S + h[t - j] * outer[j]
        outputs.append(S @ q[t])
    return torch.stack(outputs)
