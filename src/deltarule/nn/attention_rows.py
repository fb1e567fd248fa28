"""What is said of softmax attention elsewhere: its rows of the table, its options in a model."""

from dataclasses import replace

from deltarule.nn.rule import System

FULL = System(
    name="attention",
    title="Softmax attention",
    operator="softmax",
    recurrence="(K, V) = ((K, k), (V, v))",
    read_out="o = V softmax(K^T q / sqrt(K))",
    decay="none",
    erase="none",
    objective="sum_j exp(q . k_j / sqrt(K)) |o - v_j|^2, exactly",
    source="arXiv 1706.03762, section 3.2 (the slides multiply by the mask; it must be added)",
    state_size="T H (K + V)",
    forms="cache, parallel, GPU kernel of PyTorch",
)
WINDOW = replace(
    FULL,
    name="sliding_window",
    title="Sliding-window attention",
    recurrence="(K, V) = the last W of ((K, k), (V, v))",
    source="arXiv 2004.05150, section 3.1; window and token counted together",
    state_size="W H (K + V)",
)
# Names in a model's config, where `attention_` tells them from those of recurrent layers.
OPTIONS = {
    "attention_head_dim": "head_dim",
    "attention_qk_norm": "qk_norm",
    "attention_gate": "output_gate",
    "attention_multiplier": "scale",
    "partial_rotary_factor": "partial_rotary_factor",
    "norm_eps": "norm_eps",
    "zero_centered_norm": "zero_centered_norm",
}
