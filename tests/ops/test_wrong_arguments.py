"""Wrong arguments of the operators beside the delta rule (test_arguments.py) are named."""

import pytest
import torch

from deltarule import (
    MesaState,
    delta_rule,
    long_convolution,
    make_context,
    mesa,
    pack,
    selective_scan,
    slstm,
    two_memories,
)
from deltarule.ops.context import Context
from ops.contract import HV, OPERATORS, K, V


def spanned(tokens):
    """What is no context, another length, and offsets beside a context, which has its own."""
    context, longer = Context(None, 0, (0, tokens)), Context(None, 0, (0, tokens + 1))
    return {
        "context must be what make_context returns, or None, got str": {"context": "gloo"},
        f"must have the {tokens + 1} tokens of process 0 of the context": {"context": longer},
        "cu_seqlens must be None with a context": {"context": context, "cu_seqlens": pack([1])},
    }


SCAN = spanned(2) | {
    r"v must have 4 axes \[B, T, HV, V\], got \[4\]": {"v": torch.zeros(4)},
    "v must be float64, float32, bfloat16 or float16, got torch.int64": {
        "v": torch.zeros(1, 2, HV, V).long()
    },
    "v needs at least one head": {"v": torch.zeros(1, 2, 0, V)},
    r"q must have 4 axes \[B, T, H, K\] or constant \[HV, V, K\], got \[3\]": {"q": torch.zeros(3)},
    r"k must be \[HV, V, K\] = \[4, 5, 3\], got \[4, 5, 2\]": {"k": torch.zeros(HV, V, 2)},
    r"k must be \[B, T, H, K\] = \[1, 2, 2, 3\], got": {"k": torch.zeros(1, 3, 2, 3)},
    "v must have a multiple of the 3 heads of k, got 4": {"k": torch.zeros(1, 2, 3, 3)},
    "k is torch.float64, but v is torch.float32": {"k": torch.zeros(1, 2, 2, 3).double()},
    "delta and A go together, got only A": {"A": torch.zeros(HV, V, 3)},
    r"A must be \[HV, V, K\]": {"A": torch.zeros(HV, 3, V)},
    r"delta must be \[B, T, HV, V\]": {"delta": torch.zeros(1, 2, HV)},
    r"value_log_decay must be \[B, T, HV, V\]": {"value_log_decay": torch.zeros(1, 2, HV, 3)},
    r"log_decay must be \[B, T, HV, K\]": {"log_decay": torch.zeros(HV)},
    r"log_decay must be float32 \(or float64\), got torch.bfloat16": {
        "log_decay": torch.zeros(1, 2, HV, 3).bfloat16()
    },
    r"beta must be \[B, T, HV, V\]": {"beta": torch.zeros(1, 2, HV)},
    "initial_state must be torch.float32": {"initial_state": torch.zeros(1, HV, V, 3).double()},
    "cu_seqlens must end at T = 2": {"cu_seqlens": torch.tensor([0, 1])},
    "scale must be a number": {"scale": "1"},
    "impl='triton' cannot run this: Triton needs CUDA tensors, and v is on cpu": {"impl": "triton"},
    "impl must be one of 'auto', 'triton', 'torch', 'reference', got 'gluon'": {"impl": "gluon"},
}
MESA = spanned(9) | {
    r"beta must be \[B, T, HV\] = \[2, 9, 4\], got \[2, 9\]": {"beta": torch.ones(2, 9)},
    "beta must be a tensor": {"beta": None},
    r"regularizer must be \[HV, K\] = \[4, 6\]": {"regularizer": torch.ones(4)},
    "decay of each key channel would": {"log_decay": torch.zeros(2, 9, HV, K)},
    "iterations must be an integer of 1 or more, .auto., or None": {"iterations": 0},
    "scale must be a number": {"scale": torch.ones(())},
    "initial_state must be a MesaState": {"initial_state": torch.ones(2)},
    r"initial_state.covariance must be \[N, HV, K, K\]": {
        "initial_state": MesaState(torch.ones(1), torch.ones(2))
    },
    "initial_state.covariance must be torch.float64": {
        "initial_state": MesaState(torch.ones(2, HV, K, K), torch.ones(2, HV, V, K))
    },
    "cu_seqlens packs sequences into one row": {"cu_seqlens": torch.tensor([0, 9])},
    "impl='triton' cannot run this: Triton needs CUDA tensors": {"impl": "triton"},
    "impl must be one of 'auto', 'triton', 'torch', 'reference', got 'gluon'": {"impl": "gluon"},
}
TWO = spanned(2) | {
    r"q must have 4 axes .*, got \[4\]": {"q": torch.zeros(4)},
    "slots must be a tensor .*, got list": {"slots": [1.0]},
    r"slots must be \[B, T, H, M\]": {"slots": torch.zeros(1, 2, 3, 5)},
    r"log_decay must be \[B, T, H, M\]": {"log_decay": torch.zeros(1, 2, 2)},
    r"v must be \[B, T, H, V\] with the 2 heads of q": {"v": torch.zeros(1, 2, 4, 4)},
    "key_memory must be .* \\[1, 2, 5, 3\\]": {"key_memory": torch.zeros(1, 2, 3, 5)},
    "value_memory must be torch.float32": {"value_memory": torch.zeros(1, 2, 4, 5).double()},
    "impl must be one of": {"impl": "fast"},
}
LONG = {
    r"v must be a floating-point tensor \[B, T, H, V\]": {"v": torch.zeros(5, 2, 2)},
    "q and k go together, got only k": {"q": None},
    r"taps must be \[H, L\]": {"taps": torch.zeros(1, 200)},
    r"initial_state must be \[N, L - 1, H, K \+ V\]": {"initial_state": torch.zeros(2, 3, 2, 5)},
    "lengths must be from 0 to 9": {"lengths": torch.tensor([1, 10])},
    "impl must be one of 'auto', 'torch', 'reference'": {"impl": "triton"},
}
CELLS = {
    r"gates must be a floating-point tensor \[B, T, H, 4, D\]": {"gates": torch.zeros(9, 2, 4, 5)},
    r"recurrent must be \[H, 4, D, D\]": {"recurrent": torch.zeros(1, 4, 5, 5)},
    r"recurrent must be a tensor": {"recurrent": None},
    "initial_state must be torch.float64": {"initial_state": torch.zeros(2, 2, 4, 5)},
    "lengths must be from 0 to 9": {"lengths": torch.tensor([1, 10])},
    "impl='triton' cannot run this: Triton needs CUDA tensors": {"impl": "triton"},
}


def given(name, *left_out):
    return {n: x for n, x in OPERATORS[name].draw(tokens=9).items() if n not in left_out}


STATE = ("initial_state", "covariance", "values", "key_memory", "value_memory", "log_decay")
SMALL = {"q": torch.zeros(1, 2, 2, 3), "k": torch.zeros(1, 2, 2, 3)}
TABLES = [
    (delta_rule, SMALL | {"v": torch.zeros(1, 2, 2, 4), "beta": None}, spanned(2)),
    (selective_scan, SMALL | {"v": torch.zeros(1, 2, HV, V)}, SCAN),
    (mesa, given("mesa", *STATE), MESA),
    (two_memories, SMALL | {"v": torch.zeros(1, 2, 2, 4), "slots": torch.zeros(1, 2, 2, 5)}, TWO),
    (long_convolution, given("multi-head hyena", *STATE), LONG),
    (slstm, given("slstm", *STATE), CELLS),
]


@pytest.mark.parametrize(
    ("operator", "good", "message", "changes"),
    [(operator, good, *row) for operator, good, table in TABLES for row in table.items()],
)
def test_wrong_arguments_are_named(operator, good, message, changes):
    with pytest.raises(ValueError, match=message):
        operator(**(good | changes))


def test_a_context_needs_processes():
    with pytest.raises(ValueError, match="group can be None after init_process_group"):
        make_context(16)


@pytest.mark.parametrize(("operator", "good", "_"), TABLES)
def test_the_state_is_an_option(operator, good, _):
    if operator is not two_memories:
        assert operator(**good, return_state=False).final_state is None
