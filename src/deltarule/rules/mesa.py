"""The mesa layer: ridge regression from all keys to all values, solved anew at every token.

H_t = a_t H_{t-1} + beta_t k_t k_t^T        G_t = a_t G_{t-1} + beta_t v_t k_t^T
o_t = G_t (H_t + Diag(lambda))^{-1} q_t
"""

from deltarule.rules.rule import System

SYSTEM = System(
    name="mesa",
    title="Mesa layer",
    operator="mesa",
    recurrence="H = a H + beta k k^T, G = a G + beta v k^T",
    read_out="o = G (H + Diag(lambda))^-1 q",
    decay="head",
    erase="solve",
    objective="sum_i a..a beta_i |S k_i - v_i|^2 + tr(S Diag(lambda) S^T)",
    source="arXiv 2309.05858 and 2506.05233, section 3",
    state_size="HV (K + V) K",
    forms="recurrent, chunked, GPU kernel of the solver",
)
