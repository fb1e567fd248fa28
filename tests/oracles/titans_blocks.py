"""How Titans places the memory (arXiv 2501.00663, section 4): as context, as gate, as layer.

`memory` is any object with write(tokens), which updates it and returns its outputs, and
read(tokens), which does not update it; `attention(x, prefix)` is causal attention whose first
`prefix` tokens every token sees. The print: eq. 28 calls the output of MAG "p"; eqs. 29-30 of MAL
define x~ with the persistent tokens and then feed x (x~ is meant, or eq. 29 has no use).
Neither says where the persistent positions go; here they are cut off the output.
"""

import torch


def as_context(x, persistent, memory, attention, gate, segment):
    """Eqs. 21-25, segment by segment: h = M_{t-1}*(S W_Q); y = Attn(p | h | S); M_t = M_{t-1}(y);
    o = y (x) M_t*(y). The memory's own projections belong to it; only y of the segment is kept."""
    outputs = []
    for tokens in x.split(segment):
        history = memory.read(tokens)
        prefix = len(persistent) + len(history)
        y = attention(torch.cat([persistent, history, tokens]), prefix)[prefix:]
        memory.write(y)
        outputs.append(gate(y, memory.read(y)))
    return torch.cat(outputs)


def as_gate(x, persistent, memory, attention, gate):
    """Eqs. 26-28: o = SW-Attn*(x~) (x) M(x~), x~ = p | x; not segmented."""
    prefixed = torch.cat([persistent, x])
    y = attention(prefixed, len(persistent))
    return gate(y, memory.write(prefixed))[len(persistent) :]


def as_layer(x, persistent, memory, attention):
    """Eqs. 29-31: o = SW-Attn(M(x~)); the window has no prefix here."""
    prefixed = torch.cat([persistent, x])
    return attention(memory.write(prefixed), 0)[len(persistent) :]


def sigmoid_gate(weight_y, weight_memory, eps=1e-6):
    """Section 4.2: normalise both with learnable vectors, then a non-linearity sigma.

    The text leaves the product open; here sigma acts on the memory's side: y^ sigma(m^).
    """

    def normalise(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    return lambda y, m: normalise(y, weight_y) * torch.sigmoid(normalise(m, weight_memory))
