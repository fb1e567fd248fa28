"""Test-time training: the state is a network, each mini-batch of tokens a step of its training.

W_t = W_0 - s_t sum_{i <= t} eta_i grad |k_i + LN(W k_i) - v_i|^2 / 2 at W_0
o_t = q_t + LN(W_t q_t)
"""

from deltarule.rules.rule import System

LINEAR = System(
    name="ttt_linear",
    title="TTT-Linear",
    operator="ttt",
    recurrence="W = W_0 - s sum_i eta_i grad loss_i(W_0), i up to t in mini-batches of 16",
    read_out="o = q + LN(W q)",
    decay="none",
    erase="gradient",
    objective="|k + LN(W k) - v|^2 / 2",
    source="arXiv 2407.04620, sections 2.1 to 2.7",
    state_size="2 HV K (K + 1) + 1",
    forms="recurrent, chunked, GPU kernel of the scan",
    page="ttt",
)

MLP = System(
    name="ttt_mlp",
    title="TTT-MLP",
    operator="ttt",
    recurrence="W = W_0 - s sum_i eta_i grad loss_i(W_0) for both maps of the MLP",
    read_out="o = q + LN(W_2 gelu(W_1 q))",
    decay="none",
    erase="gradient",
    objective="|k + LN(W_2 gelu(W_1 k)) - v|^2 / 2",
    source="arXiv 2407.04620, sections 2.1 to 2.7",
    state_size="2 HV (4K (K + 1) + K (4K + 1)) + 1",
    forms="recurrent, chunked",
    page="ttt",
)
