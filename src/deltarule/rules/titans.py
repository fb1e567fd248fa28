"""Titans' neural memory: gradient steps with momentum, and weight decay that forgets.

S_t = eta_t S_{t-1} - theta_t grad |M(k_t) - v_t|^2
M_t = a_t M_{t-1} + S_t        o_t = M_t(q_t)
"""

from deltarule.rules.rule import System

LINEAR = System(
    name="titans_linear",
    title="Titans, linear memory",
    operator="titans",
    recurrence="S = eta S - theta 2 (M_0 k - v) k^T, M = a M + S, M_0 from mini-batches of 16",
    read_out="o = M q",
    decay="head",
    erase="gradient",
    objective="|M k - v|^2, with momentum and weight decay",
    source="arXiv 2501.00663, eq. 8 to 15",
    state_size="3 HV V K + 1",
    forms="recurrent, chunked, GPU kernel of the scan",
    page="titans",
)

MLP = System(
    name="titans_mlp",
    title="Titans, MLP memory",
    operator="titans",
    recurrence="S = eta S - theta grad |M_0(k) - v|^2, M = a M + S for both maps of the MLP",
    read_out="o = M_2 gelu(M_1 q)",
    decay="head",
    erase="gradient",
    objective="|M_2 gelu(M_1 k) - v|^2, with momentum and weight decay",
    source="arXiv 2501.00663, eq. 8 to 15",
    state_size="3 HV 2K (K + V) + 1",
    forms="recurrent, chunked",
    page="titans",
)
