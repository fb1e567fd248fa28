"""Lightning attention / MiniMax-01 and TransNormerLLM: constant decay per head, no scale on q.

    S_t = exp(-s_h) S_{t-1} + v_t k_t^T,    o_t = S_t q_t.

Three rules for the slope s_h of head h = 0 .. H-1 in layer l = 0 .. L-1 are in print or released:

* TransNormerLLM's text (arXiv 2307.14995):  s_h = (8 h / H) (1 - l / L): LINEAR in h,
  head 0 never forgets;
* the released lightning-attention and MiniMax-Text-01:  ALiBi's slopes, GEOMETRIC in h,
  s_h = 2^(-8 (h+1) / H) (1 - l / (L - 1) + 1e-5) for H a power of two;
* transformers' MiniMax: the same slopes for every H, factor 1 - l / (L - 1 + 1e-5) + 1e-5.

l counts every layer, those of softmax attention too; a model of one layer has factor 1 + 1e-5. The
last layer hardly forgets (factor 1e-5). q, k, v = SiLU(projection) in MiniMax-01; its output is
norm(o) sigmoid(gate).
"""

import math

import torch


def alibi_slopes(heads):
    """A power of two: 2^(-8/H), 2^(-16/H), ...; else those of the power below, then every other
    one of the power above."""
    below = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * (h + 1) / below) for h in range(below)]
    above = [2.0 ** (-8 * (h + 1) / (2 * below)) for h in range(0, 2 * below, 2)]
    return slopes + above[: heads - below]


def released_slopes(heads, layer, layers):
    slopes = torch.tensor(alibi_slopes(heads), dtype=torch.float64)
    return slopes * (1 - layer / max(layers - 1, 1) + 1e-5)
