"""Softmax attention, of all earlier tokens or of a window of them: the rows to compare with."""

from dataclasses import replace

from deltarule.rules.rule import System

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
