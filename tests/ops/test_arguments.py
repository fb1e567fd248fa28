"""Wrong arguments are named, with what was given and what was expected: a table for each call."""

import copy
import inspect
import re
from typing import get_args

import numpy as np
import pytest
import torch

from deltarule import (
    MesaState,
    attention_matrix,
    delta_rule,
    dplr,
    explain,
    long_convolution,
    make_context,
    mesa,
    pack,
    recurrent_step,
    selective_scan,
    slstm,
    titans,
    ttt,
    two_memories,
)
from deltarule.models import CausalLM, ModelConfig
from deltarule.nn import DeltaNet
from deltarule.ops.context import Context
from deltarule.serve import pool_convolution, pool_prefill, pool_step
from logits import make_logits
from ops.contract import HV, OPERATORS, K, V
from ops.memories import DOUBLE, arguments, draw, make
from oracle import make_case

ONE, ZEROS = torch.ones, torch.zeros
FLOATING = "must be float64, float32, bfloat16 or float16, got torch.int64"


def drawn(*names, **sizes):
    x = make_case(dtype=torch.float32, **sizes).tensors
    return {name: x[name] for name in names or x if x[name] is not None}


def spanned(tokens):
    """What is no context, another length, and offsets beside a context, which has its own."""
    context, longer = Context(None, 0, (0, tokens)), Context(None, 0, (0, tokens + 1))
    return {
        "context must be what make_context returns, or None, got str": {"context": "gloo"},
        f"must have the {tokens + 1} tokens of process 0 of the context": {"context": longer},
        "cu_seqlens must be None with a context": {"context": context, "cu_seqlens": pack([1])},
    }


def twice(first, second):
    return {"state_indices": torch.tensor([first, second])}


ON_CPU = "impl='triton' cannot run this: Triton needs CUDA tensors, and {} is on cpu"
NO_KERNEL = {ON_CPU.format("q"): {"impl": "triton"}}
FORMS = "'auto', 'triton', 'torch', 'reference'"
NO_IMPL = {f"impl must be one of {FORMS}, got 'gluon'": {"impl": "gluon"}}

# ---- the delta rule -----------------------------------------------------------------------------

GOOD = drawn(tokens=10)
ONE_ROW = {name: x[:1] for name, x in GOOD.items() if name != "initial_state"}
DELTA = {
    r"q must have 4 axes .* got \[10, 2, 8\]": {"q": GOOD["q"][0]},
    "q must be float64.*got torch.int64": {"q": GOOD["q"].long()},
    r"q must be a tensor \[B, T, heads, channels\], got list": {"q": [1.0]},
    "k is torch.float64 on cpu, but q is torch.float32": {"k": GOOD["k"].double()},
    r"k must be \[B, T\*n, H, K\] = \[2, 10, 2, 8\]": {"k": GOOD["k"][:, :9]},
    r"k must be .* = \[2, 20, 2, 8\] .*n_steps=2": {"n_steps": 2},
    "n_steps must be an integer of 1 or more, got 0": {"n_steps": 0},
    "n_steps must be an integer": {"n_steps": True},
    "normalize_qk must be True or False, got 'none'": {"normalize_qk": "none"},
    "batch_invariant must be True or False, got 1": {"batch_invariant": 1},
    "save_states must be True or False, got 'no'": {"save_states": "no"},
    "return_transition must be True or False, got 'no'": {"return_transition": "no"},
    "scale must be a number or None, got str": {"scale": "a"},
    "scale must be a number .* multiply q": {"scale": ONE(())},
    "v must have a multiple of the 2 heads .* got 3": {"v": GOOD["v"][:, :, :3]},
    r"v must start with \[B, T\*n\] = \[2, 10\]": {"v": GOOD["v"][:1]},
    r"beta must be \[B, T\*n, HV\] = \[2, 10, 4\], got \[2, 10\]": {"beta": GOOD["beta"][..., 0]},
    "beta must be a tensor or None, got float": {"beta": 0.5},
    "log_decay must be float32.*bfloat16": {"log_decay": GOOD["log_decay"].bfloat16()},
    r"log_decay must be \[HV\] = \[4\] or \[B, T, HV\]": {"log_decay": GOOD["log_decay"][:1]},
    r"initial_state must be \[N, HV, V, K\]": {"initial_state": GOOD["initial_state"].mT},
    "initial_state must be torch.float32": {"initial_state": GOOD["initial_state"].half()},
    "cu_seqlens packs .* B must be 1, got 2": {"cu_seqlens": pack([10])},
    "impl must be one of 'auto', 'triton', 'gluon', 'torch', 'reference', got 'fast'": {
        "impl": "fast"
    },
}
OFFSETS = {
    "cu_seqlens must start at 0, got 1": torch.tensor([1, 10]),
    "cu_seqlens must not decrease, got 6 then 4": torch.tensor([0, 6, 4, 10]),
    "cu_seqlens must end at T = 10, got 9": torch.tensor([0, 9]),
    "cu_seqlens must be an int32 or int64 tensor, got torch.float32": torch.tensor([0.0, 10.0]),
    r"cu_seqlens must be \[N \+ 1\], got \[1, 2\]": torch.tensor([[0, 10]]),
    "cu_seqlens must be an int32 or int64 tensor, got list": [0, 10],
}
STEP_GOOD = {name: x[:, :1] for name, x in GOOD.items() if name != "initial_state"}
STEP_GOOD["state"] = GOOD["initial_state"].clone()
ERASE = ZEROS(2, 1, 4, 8)
STEP = {
    r"state must be \[slots, HV, V, K\] = \[\*, 4, 6, 8\]": {"state": ZEROS(2, 4, 8, 6)},
    "state must have B = 2 rows without state_indices": {"state": ZEROS(3, 4, 6, 8)},
    "state must be torch.float32 or torch.bfloat16 or torch.float16 on cpu, got torch.float64": {
        "state": ZEROS(2, 4, 6, 8).double()
    },
    r"state_indices must be a tensor \[B\], got list": {"state_indices": [0, 1]},
    "state must not be expanded, it is written to": {"state": ZEROS(1, 4, 6, 8).expand(2, 4, 6, 8)},
    "null_index must be an integer, got 'no'": twice(0, 1) | {"null_index": "no"},
    "state_indices must lie in .* got -2": twice(-2, 0),
    r"state_indices must lie in \[0, 2\).* got 2": twice(2, 0),
    "state_indices must name no slot twice": twice(1, 1),
    r"state_indices must be \[B\] with B = 2": {"state_indices": ZEROS(3).long()},
    "state_indices must be an int32 or int64": {"state_indices": ZEROS(2)},
    "beta must be None with a and b": {"a": ERASE, "b": ERASE},
    "a and b go together": {"beta": None, "a": ERASE},
    "recurrent_step has no gradient": {"state": ZEROS(2, 4, 6, 8, requires_grad=True)},
    "Triton needs CUDA tensors, and state is on cpu": {"impl": "triton"},
    r"states must be \[B, T, HV, V, K\] = \[2, 1, 4, ": {"states": ZEROS(2, 2, 4, 6, 8)},
    r"states must be contiguous, torch\.float32": {"states": ZEROS(2, 1, 4, 6, 8).double()},
}
FREE_GOOD = {"beta": None, **drawn("q", "k", "v", "a", "b", decay="none", erase="free", tokens=2)}
TWO_STEPS = {name: FREE_GOOD[name].repeat_interleave(2, 1) for name in "kv"}
FREE = {
    "normalize_qk must be False with a free erase": {"normalize_qk": True},
    "n_steps must be 1 with a free erase": TWO_STEPS | {"n_steps": 2},
    "a and b go together, got only a": {"b": None},
    "beta must be None with a and b": {"beta": GOOD["beta"][:, :2]},
}
LONG_STEP = drawn("q", "k", "v", decay="none", erase="none", tokens=17) | {"beta": None}
MATRIX_GOOD = {"q": GOOD["q"], "k": GOOD["k"], "beta": None}
MATRIX = {
    "k must have 4 axes": {"k": GOOD["k"][0]},
    r"beta must have a multiple of the 2 heads .* got 3": {"beta": GOOD["beta"][..., :3]},
    "log_decay must be": {"log_decay": GOOD["log_decay"][0]},
}
# Logits in place of a step's gates.
HEAD, CHANNEL = make_logits("head"), make_logits("channel")
LOGITS_GOOD = {name: HEAD.case.tensors[name] for name in "qkv"} | {"normalize_qk": True}
LOGITS_GOOD |= {"beta": HEAD.beta, "log_decay": HEAD.decay, "state": HEAD.state()}
LOGITS = {
    message: {"log_decay": HEAD.decay._replace(**changes)}
    for message, changes in {
        r"log_decay.logits must be \[B, T, HV\] = \[2, 2, 4\] or": {"logits": ZEROS(4)},
        "log_decay.logits must be a tensor, got NoneType": {"logits": None},
        "log_decay.logits must be a floating-point": {"logits": ZEROS(2, 2, 4).long()},
        r"log_decay.A_log must be \[HV\] = \[4\], got \[2\]": {"A_log": ZEROS(2)},
        r"log_decay.dt_bias must be \[HV\] = \[4\], got \[4, 8\]": {"dt_bias": ZEROS(4, 8)},
        "log_decay.A_log is on meta, but q is on cpu": {"A_log": ZEROS(4, device="meta")},
        "recurrent_step has no gradient": {"dt_bias": ZEROS(4, requires_grad=True)},
        "log_decay.lower_bound must be a number < 0 or None": {"lower_bound": 1.0},
    }.items()
}
LOGITS |= {
    message: {"beta": HEAD.beta._replace(**changes)}
    for message, changes in {
        r"beta.logits must be \[B, T\*n, HV\] = \[2, 2, 4\], got": {"logits": ZEROS(2, 4)},
        "beta.logits must be a tensor, got float": {"logits": 1.0},
        "beta.beta_max must be a number, got Tensor": {"beta_max": ONE(4)},
        "beta.beta_max must be a number, got bool": {"beta_max": True},
    }.items()
}
LOGITS |= {
    r"log_decay.dt_bias must be \[HV, K\] = \[4, 8\], got": {
        "log_decay": CHANNEL.decay._replace(dt_bias=ZEROS(4))
    },
    "beta must be None with a and b": dict.fromkeys("ab", ZEROS(2, 2, 4, 8))
    | {"log_decay": None, "normalize_qk": False},
}

# ---- the operators beside it --------------------------------------------------------------------

SCAN = {
    r"v must have 4 axes \[B, T, HV, V\], got \[4\]": {"v": ZEROS(4)},
    f"v {FLOATING}": {"v": ZEROS(1, 2, HV, V).long()},
    "signed must be True or False, got 'no'": {"signed": "no"},
    "v needs at least one head": {"v": ZEROS(1, 2, 0, V)},
    r"q must have 4 axes \[B, T, H, K\] or constant \[HV, V, K\], got \[3\]": {"q": ZEROS(3)},
    r"k must be \[HV, V, K\] = \[4, 5, 3\], got \[4, 5, 2\]": {"k": ZEROS(HV, V, 2)},
    r"k must be \[B, T, H, K\] = \[1, 2, 2, 3\], got": {"k": ZEROS(1, 3, 2, 3)},
    "v must have a multiple of the 3 heads of k, got 4": {"k": ZEROS(1, 2, 3, 3)},
    "k is torch.float64, but v is torch.float32": {"k": ZEROS(1, 2, 2, 3).double()},
    "delta and A go together, got only A": {"A": ZEROS(HV, V, 3)},
    r"A must be \[HV, V, K\]": {"A": ZEROS(HV, 3, V)},
    r"delta must be \[B, T, HV, V\]": {"delta": ZEROS(1, 2, HV)},
    r"value_log_decay must be \[B, T, HV, V\]": {"value_log_decay": ZEROS(1, 2, HV, 3)},
    r"log_decay must be \[B, T, HV, K\]": {"log_decay": ZEROS(HV)},
    r"log_decay must be float32 \(or float64\), got torch.bfloat16": {
        "log_decay": ZEROS(1, 2, HV, 3).bfloat16()
    },
    r"beta must be \[B, T, HV, V\]": {"beta": ZEROS(1, 2, HV)},
    "initial_state must be torch.float32": {"initial_state": ZEROS(1, HV, V, 3).double()},
    "cu_seqlens must end at T = 2": {"cu_seqlens": torch.tensor([0, 1])},
    "scale must be a number": {"scale": "1"},
    ON_CPU.format("v"): {"impl": "triton"},
    **spanned(2), **NO_IMPL,
}  # fmt: skip
WIDE = MesaState(ONE(2, HV, K, K), ONE(2, HV, V, K))
MESA = {
    r"beta must be \[B, T, HV\] = \[2, 9, 4\], got \[2, 9\]": {"beta": ONE(2, 9)},
    "beta must be a tensor": {"beta": None},
    r"regularizer must be \[HV, K\] = \[4, 6\]": {"regularizer": ONE(4)},
    "decay of each key channel would": {"log_decay": ZEROS(2, 9, HV, K)},
    "iterations must be an integer of 1 or more, .auto., or None": {"iterations": 0},
    "scale must be a number": {"scale": ONE(())},
    "initial_state must be a MesaState": {"initial_state": ONE(2)},
    r"initial_state.covariance must be \[N, HV, K, K\]": {
        "initial_state": MesaState(ONE(1), ONE(2))
    },
    "initial_state.covariance must be torch.float64": {"initial_state": WIDE},
    "cu_seqlens packs sequences into one row": {"cu_seqlens": torch.tensor([0, 9])},
    **spanned(9), **NO_KERNEL, **NO_IMPL,
}  # fmt: skip
TWO = {
    r"q must have 4 axes .*, got \[4\]": {"q": ZEROS(4)},
    "slots must be a tensor .*, got list": {"slots": [1.0]},
    "cu_seqlens must be an int32 or int64 tensor, got int": {"cu_seqlens": 5},
    r"slots must be \[B, T, H, M\]": {"slots": ZEROS(1, 2, 3, 5)},
    r"log_decay must be \[B, T, H, M\]": {"log_decay": ZEROS(1, 2, 2)},
    r"v must be \[B, T, H, V\] with the 2 heads of q": {"v": ZEROS(1, 2, 4, 4)},
    "key_memory must be .* \\[1, 2, 5, 3\\]": {"key_memory": ZEROS(1, 2, 3, 5)},
    "value_memory must be torch.float32": {"value_memory": ZEROS(1, 2, 4, 5).double()},
    "impl must be one of": {"impl": "fast"},
    **spanned(2),
}
LONG = {
    r"v must be a floating-point tensor \[B, T, H, V\]": {"v": ZEROS(5, 2, 2)},
    "q and k go together, got only k": {"q": None},
    r"taps must be \[H, L\]": {"taps": ZEROS(1, 200)},
    r"initial_state must be \[N, L - 1, H, K \+ V\]": {"initial_state": ZEROS(2, 3, 2, 5)},
    "lengths must be from 0 to 9": {"lengths": torch.tensor([1, 10])},
    "lengths must be None with cu_seqlens": {"lengths": ONE(2), "cu_seqlens": pack([9, 9])},
    "impl must be one of 'auto', 'torch', 'reference'": {"impl": "triton"},
}
CELLS = {
    r"gates must be a floating-point tensor \[B, T, H, 4, D\]": {"gates": ZEROS(9, 2, 4, 5)},
    r"gates must be a tensor \[B, T, H, 4, D\], got NoneType": {"gates": None},
    r"recurrent must be \[H, 4, D, D\]": {"recurrent": ZEROS(1, 4, 5, 5)},
    r"recurrent must be a tensor": {"recurrent": None},
    "initial_state must be torch.float64": {"initial_state": ZEROS(2, 2, 4, 5)},
    "lengths must be from 0 to 9": {"lengths": torch.tensor([1, 10])},
    ON_CPU.format("gates"): {"impl": "triton"},
}
MEMORY = {
    r"beta must be \[B, T, HV\]": {"beta": ONE(2)},
    "lengths must be an int64 tensor": {"lengths": ONE(3)},
    "lengths must be from 0 to 37, got": {"lengths": torch.tensor([1, 2, 38])},
    "lengths must be None with cu_seqlens": {
        "lengths": torch.tensor([1, 2, 3]), "cu_seqlens": pack([37])
    },
    "initial_state must be a T.*State, got tuple: begin": {"initial_state": ()},
    **NO_KERNEL, **NO_IMPL,
}  # fmt: skip
BAD_STATES = {
    "initial_state.position must be an int64 tensor": {"position": ZEROS(3)},
    "initial_state.position must be from 0 to 4": {"position": torch.tensor([0, 5, 0])},
    r"initial_state.weights\[0\] must be \[N, HV, outputs, inputs": {
        "weights": (ZEROS(3, HV, 4, 6, dtype=DOUBLE),)
    },
}
# What only one of the memories has.
OF_ONE = {
    titans: {
        "mini_batch must be an integer of 1 or more, got 0": {"mini_batch": 0},
        r"log_decay must be \[HV\] or \[B, T, HV\]": {"log_decay": ZEROS(3, 37, HV, 4)},
    },
    ttt: {
        "step_scale must be a tensor": {"step_scale": 16},
        "v must have the K=4 channels of q and k": {"v": draw(3, 37, HV, 5)},
    },
}


def memory(operator, maps):
    """A call of `ttt` or `titans`, and what is wrong with others like it."""
    good = arguments(operator.__name__, make(operator.__name__, maps))
    state, table = good["initial_state"], MEMORY | OF_ONE[operator]
    second = state._fields[1]
    parts = {rf"initial_state\.{second} must be a tuple of tensors, one": {second: ()}}
    if maps == 1:
        parts |= BAD_STATES
        wide = ZEROS(state.weights[0].shape)
        parts[r"initial_state.weights\[0\] must be torch.float64"] = {"weights": (wide,)}
    table |= {m: {"initial_state": state._replace(**changes)} for m, changes in parts.items()}
    return operator, good, table


# ---- the functions of a server ------------------------------------------------------------------

Q = ZEROS(1, 4, 2, 4)
POOL_GOOD = {
    "q": Q, "k": Q, "v": Q, "beta": Q[..., 0], "state": ZEROS(3, 2, 4, 4),
    "state_indices": torch.tensor([2, 1]), "cu_seqlens": pack((3, 1)),
}  # fmt: skip
TWICE = torch.tensor([1, 1])
POOL = {
    r"state must be \[slots, HV, V, K\] = \[\*, 2, 4, 4\]": {"state": ZEROS(3, 2, 4, 5)},
    "state must be torch.float32 or .* on cpu, got torch.float64": {
        "state": ZEROS(3, 2, 4, 4).double()
    },
    r"state_indices must be \[N\].* with N = 2": {"state_indices": torch.tensor([0])},
    r"state_indices must lie in \[0, 3\) or be null_index=-1, got 3": twice(0, 3),
    "must name no slot twice": {"state_indices": TWICE},
    "state_indices must be an int32 or int64 tensor": {"state_indices": TWICE.float()},
    r"out must be \[B, T, HV, V\] = \[1, 4, 2, 4\]": {"out": ZEROS(1, 4, 4, 2)},
    "out must be contiguous": {"out": ZEROS(1, 4, 4, 2).mT},
    "has no gradient": {"q": Q.clone().requires_grad_()},
}
PREFILL = {
    "borders must be tokens at multiples of 64": {"borders": torch.tensor([1])},
    "borders must be tokens at multiples of 64 .*got": {"borders": torch.tensor([4])},
    r"borders must be a tensor \[M\], got list": {"borders": [0]},
    "borders must be int32 or int64, got torch.float32": {"borders": torch.zeros(1)},
    "write_indices must name no slot twice": {"write_indices": TWICE},
}
ROWS_OF_SLOTS = torch.tensor([[0, 1, 2], [-1, -1, -1]])
DRAFTS = {
    "must have S >= 3 tokens, got S = 2": {"state_indices": torch.tensor([[0, 1], [2, -1]])},
    r"accepted must be \[N\] = \[2\] beside state_indices \[N, S\]": {"accepted": TWICE},
    r"accepted must be a tensor \[N\], got list": {"accepted": [1, 1]},
    "accepted must lie in 1 to S = 3": {
        "state_indices": ROWS_OF_SLOTS, "accepted": torch.tensor([1, 4])
    },
}  # fmt: skip
TAPS_GOOD = {
    "x": ZEROS(2, 2, 6), "weight": ZEROS(6, 4), "state": ZEROS(3, 3, 6), **twice(2, -1),
}  # fmt: skip
TAPS = {
    r"weight must be \[D, W\] = \[6": {"weight": ZEROS(5, 4)},
    r"bias must be \[D\] = \[6\] or None": {"bias": ZEROS(5)},
    r"must have R >= 3, got R = 2": {"state": ZEROS(3, 2, 6)},
    r"must have R >= 4, got R = 3": {"accepted": TWICE},
    r"accepted must be a tensor \[N\], got list": {"accepted": [1, 1]},
    r"accepted must be 1 or more, got \[0, 1\]": {"accepted": TWICE - torch.tensor([1, 0])},
    "must name no slot twice": {"state_indices": TWICE},
    "pool_convolution has no gradient": {"x": ZEROS(2, 2, 6).requires_grad_()},
}

# ---- all of them --------------------------------------------------------------------------------


def given(name):
    """A call of an operator without a state or a decay."""
    left_out = "initial_state", "covariance", "values", "key_memory", "value_memory", "log_decay"
    return {n: x for n, x in OPERATORS[name].draw(tokens=9).items() if n not in left_out}


SMALL = {"q": ZEROS(1, 2, 2, 3), "k": ZEROS(1, 2, 2, 3)}
SMALL_VALUES = SMALL | {"v": ZEROS(1, 2, 2, 4)}
SEQUENCES = [
    (delta_rule, SMALL_VALUES | {"beta": None}, spanned(2)),
    (selective_scan, SMALL | {"v": ZEROS(1, 2, HV, V)}, SCAN),
    (mesa, given("mesa"), MESA),
    (long_convolution, given("multi-head hyena"), LONG),
    (slstm, given("slstm"), CELLS),
    *(memory(operator, maps) for operator in (ttt, titans) for maps in (1, 2)),
]
TABLES = [
    *SEQUENCES,
    (two_memories, SMALL_VALUES | {"slots": ZEROS(1, 2, 2, 5)}, TWO),
    (delta_rule, GOOD, DELTA),
    (delta_rule, ONE_ROW, {message: {"cu_seqlens": x} for message, x in OFFSETS.items()}),
    (dplr, {name: GOOD[name] for name in "qkv"} | dict.fromkeys("ab", ZEROS(2, 10, 4, 8)),
     {r"b must be a tensor .* use delta_rule": {"b": None}}),
    (explain, {name: GOOD[name] for name in ("q", "k", "v", "beta")},
     {"beta must be": {"beta": GOOD["beta"][0]}, "scale must be a number": {"scale": "1"},
      "batch_invariant must be True or False, got 1": {"batch_invariant": 1}}),
    (explain, FREE_GOOD, FREE),
    (recurrent_step, FREE_GOOD | {"state": ZEROS(2, 4, 6, 8)}, FREE),
    (recurrent_step, STEP_GOOD, STEP),
    (recurrent_step, LONG_STEP | {"state": STEP_GOOD["state"]},
     {"1 to 16 tokens, got T = 17": {}}),
    (recurrent_step, LOGITS_GOOD, LOGITS),
    (attention_matrix, MATRIX_GOOD, MATRIX),
    (pool_prefill, POOL_GOOD, POOL | PREFILL),
    (pool_step, POOL_GOOD, POOL | DRAFTS),
    (pool_convolution, TAPS_GOOD, TAPS),
]  # fmt: skip


@pytest.mark.parametrize(
    ("operator", "good", "message", "changes"),
    [
        pytest.param(operator, good, *row, id=f"{operator.__name__}: {row[0]}")
        for operator, good, table in TABLES for row in table.items()
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(operator, good, message, changes):
    with pytest.raises(ValueError, match=message):
        operator(**(good | changes))


@pytest.mark.parametrize(
    ("operator", "good"), {x: (x, good) for x, good, _ in TABLES if x != explain}.values()
)
def test_impl_takes_what_its_type_says(operator, good):
    names = get_args(inspect.signature(operator).parameters["impl"].annotation)
    with pytest.raises(ValueError, match="impl must be one of") as refused:
        operator(**copy.deepcopy(good) | {"impl": "fast"})
    assert {*re.findall(r"'(\w+)'", str(refused.value))} == {*names, "fast"}


@pytest.mark.parametrize(("operator", "good", "_"), SEQUENCES)
def test_the_state_is_an_option(operator, good, _):
    assert operator(**good, return_state=False).final_state is None
    with pytest.raises(ValueError, match="return_state must be True or False, got 'no'"):
        operator(**good, return_state="no")


@pytest.mark.parametrize(
    ("operator", "good", "numbers"),
    [
        (delta_rule, GOOD, {"scale": np.float32(0.3), "n_steps": np.int64(1)}),
        (recurrent_step, STEP_GOOD, {"scale": np.float16(0.3), "null_index": np.int32(-1)}),
        (selective_scan, SMALL | {"v": ONE(1, 2, HV, V)}, {"scale": np.float32(0.3)}),
        (mesa, given("mesa"), {"scale": np.float32(0.3), "iterations": np.uint8(9)}),
        (titans, memory(titans, 1)[1], {"mini_batch": np.int64(4)}),
        (ttt, memory(ttt, 1)[1], {"norm_eps": np.float32(1e-6)}),
    ],
)
def test_numbers_of_numpy_are_those_of_python(operator, good, numbers):
    def run(**given):
        out = operator(**copy.deepcopy(good) | given)
        return out if isinstance(out, torch.Tensor) else out.o

    assert torch.equal(run(**numbers), run(**{name: x.item() for name, x in numbers.items()}))


OTHERS = {
    "sparse": (lambda x: x.to_sparse(), "to_dense"),
    "sparse_csr": (lambda _: torch.eye(3).to_sparse_csr(), "to_dense"),
    "nested": (lambda x: torch.nested.nested_tensor([x[0], x[0]]), "cu_seqlens"),
    "jagged": (
        lambda x: torch.nested.nested_tensor([x.view(-1), x.view(-1)[:1]], layout=torch.jagged),
        "cu_seqlens",
    ),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8), "dequantize"
    ),
    "meta": (lambda x: x.to("meta"), "meta"),
    "complex": (lambda x: x.to(torch.complex64), "complex64"),
    "array": (lambda x: x.numpy(), "got ndarray"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "log_decay", "initial_state"])
def test_tensors_that_are_not_dense_are_named_in_one_line(name, kind):
    make_other, says = OTHERS[kind]
    with pytest.raises(ValueError, match=says) as caught:
        delta_rule(**GOOD | {name: make_other(GOOD[name])})
    assert str(caught.value).count("\n") == 0
    # Of q on another device, the first that is not there is named.
    assert str(caught.value).startswith("k is" if (name, kind) == ("q", "meta") else name)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [kind for kind in OTHERS if kind != "meta"])
def test_layers_and_models_name_them_too(kind):
    make_other, says = OTHERS[kind]
    with pytest.raises(ValueError, match=rf"x must .*{says}|x must have 3 axes"):
        DeltaNet(32, num_heads=2)(make_other(torch.randn(2, 3, 32)))
    config = ModelConfig(
        vocab_size=9, hidden_size=32, num_layers=1, num_heads=2, layer_types="deltanet"
    )
    with pytest.raises(ValueError, match=r"^tokens must "):
        CausalLM(config)(make_other(ONE(2, 3, dtype=torch.long)))
    with pytest.raises(ValueError, match=r"^(v|q) (must|is) "):
        attention_matrix(make_other(GOOD["q"]), make_other(GOOD["k"]), beta=None)
    for name, x in {"state": STEP_GOOD["state"], "state_indices": torch.tensor([0, 1])}.items():
        with pytest.raises(ValueError, match=f"^{name} must "):
            recurrent_step(**STEP_GOOD | twice(0, 1) | {name: make_other(x)})


def test_what_python_itself_refuses():
    with pytest.raises(TypeError, match="beta"):
        delta_rule(GOOD["q"], GOOD["k"], GOOD["v"])
    with pytest.raises(TypeError, match="chunk_size"):
        delta_rule(**GOOD, chunk_size=64)


@pytest.mark.parametrize("length", [-1, 2.0, True, "3", np.float32(2), ONE(()), [2]], ids=repr)
def test_pack_wants_lengths(length):
    with pytest.raises(ValueError, match="lengths must be integers of 0 or more"):
        pack([3, length])


@pytest.mark.parametrize("lengths", [None, 3, ONE(()).long()], ids=repr)
def test_pack_wants_a_list(lengths):
    with pytest.raises(ValueError, match="lengths must be a list of integers of 0 or more, got "):
        pack(lengths)


def test_pack():
    assert pack([]).tolist() == [0]
    assert pack([2, 0, 3]).tolist() == [0, 2, 2, 5]
    assert pack([2]).dtype == torch.int64
    assert pack(np.array([2, 0, 3])).tolist() == [0, 2, 2, 5]
    assert pack([np.uint8(200), 100]).tolist() == [0, 200, 300]
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert pack(mask.sum(1)).tolist() == [0, 2, 5]


def test_explain_names_what_runs():
    rows = explain(GOOD["q"], GOOD["k"], GOOD["v"], beta=GOOD["beta"])
    runs = [(row.impl, row.runs) for row in rows]
    assert runs == [("triton", False), ("gluon", False), ("torch", True), ("reference", False)]
    assert "CUDA" in rows[0].reason
    assert all(row.reason for row in rows)


def test_explain_takes_what_decides_and_says_what_does_not():
    taken, *operators = (inspect.signature(x).parameters for x in (explain, delta_rule, dplr))
    left_out = {*operators[0], *operators[1]} - {*taken, "impl"}
    assert left_out
    assert all(name in explain.__doc__ for name in left_out)


def test_a_matrix_of_no_tokens():
    assert attention_matrix(GOOD["q"][:, :0], GOOD["k"][:, :0], beta=None).shape == (2, 2, 0, 0)


def test_a_context_needs_processes():
    with pytest.raises(ValueError, match="group can be None after init_process_group"):
        make_context(16)
