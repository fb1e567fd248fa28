"""sLSTM (Beck et al. 2024, arXiv 2405.04517, eqs. 8-17) with several heads.

    z = tanh(z~), o = sigmoid(o~), x~_t = (W_x x_t) + R_x h_{t-1} + b_x   for x in i, f, z, o
    m_t = max(log f_t + m_{t-1}, i~_t)   (first step: m_1 = i~_1)
    c_t = f' c_{t-1} + i' z_t,  n_t = f' n_{t-1} + i',  h_t = o_t c_t / n_t

R_x is block diagonal: one block per head, heads do not mix. m cancels in c / n. The released cell
has f = sigmoid(f~); eq. 13 also allows exp. In the released layer the projection named "igate"
feeds the second (forget) slot and "fgate" the first (input) slot: names only, i, f, z, o here are
the cell's. No floor under n: n_t >= i'_t > 0.
"""

import torch
from torch.nn.functional import logsigmoid


def recurrence(i, f, z, o, recurrent):
    """i, f, z, o: (T, H, D), what the input and the bias give; recurrent["i"], ...: (H, D, D).

    recurrent[x][head] @ h[head] is the contribution of the last output.
    """
    h = torch.zeros_like(i[0])
    c, n = torch.zeros_like(h), torch.zeros_like(h)
    m = torch.full_like(h, -torch.inf)
    outputs = []
    for t in range(len(i)):
        raw = {
            name: x[t] + torch.stack([R @ last for R, last in zip(recurrent[name], h, strict=True)])
            for name, x in (("i", i), ("f", f), ("z", z), ("o", o))
        }
        log_f = logsigmoid(raw["f"])
        previous, m = m, torch.maximum(log_f + m, raw["i"])
        forget, write = torch.exp(log_f + previous - m), torch.exp(raw["i"] - m)
        c = forget * c + write * torch.tanh(raw["z"])
        n = forget * n + write
        h = torch.sigmoid(raw["o"]) * c / n
        outputs.append(h)
    return torch.stack(outputs), (h, c, n, m)
