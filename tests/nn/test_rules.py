"""What every row of the table promises, and gates at the far ends of their range."""

import dataclasses

import pytest
import torch

from deltarule.nn import MIXERS, RULES, SYSTEMS
from deltarule.nn.rule import Projections, Rule
from nn.layers import HV, OPERATORS, B, H, K, T, V, draw, draw_projections, run

# Each value head has a key head of its own.
OWN_HEADS = ("rwkv6", "rwkv7", "hgrn2", "gate_loop")
# What a row may leave empty, and then says nothing about.
OPTIONAL = {"normalizer", "forms", "page"}


def key_heads(rule: Rule) -> int:
    return HV if rule.name in OWN_HEADS else H


def gates(rule: Rule, n_steps: int = 1) -> dict[str, torch.Tensor]:
    """Every gate that any rule reads, in the shapes of this rule."""
    channels = (K,) if rule.decay == "channel" else ()
    heads = key_heads(rule)
    return {
        "decay_logits": draw(B, T, HV, *channels),
        "beta_logits": draw(B, T * n_steps, HV),
        "erase_logits": draw(B, T, HV, K),
        "write_logits": draw(B, T, HV, V),
        "phase": draw(B, T, HV, K),
        "A_log": draw(HV),
        "dt_bias": draw(HV, *channels),
        "D": draw(heads if rule.name.startswith("comba") else HV),
        "erase_scale": draw(heads) if rule.name.startswith("comba") else draw(heads, K),
        "lower_bound": torch.rand(HV, K, dtype=torch.float64),
        "replace_scale": draw(heads, K),
        "bonus": draw(heads, K),
    }


def projections_for(rule: Rule) -> Projections:
    return draw_projections(heads=key_heads(rule), **gates(rule))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_row_is_complete(rule):
    for field in dataclasses.fields(rule):
        assert getattr(rule, field.name) or field.name in OPTIONAL, field.name
    # Perhaps with an argument of it given.
    function = getattr(rule.arguments, "func", rule.arguments)
    assert function.__module__.startswith("deltarule.nn")


@pytest.mark.parametrize("table", [RULES, SYSTEMS, MIXERS])
def test_a_wrong_name_suggests_the_nearest(table):
    with pytest.raises(KeyError, match="there is no 'delta_net': did you mean 'deltanet'"):
        table["delta_net"]
    with pytest.raises(KeyError, match="there is no 'zzz': known are linear_attention, "):
        table["zzz"]
    assert "delta_net" not in table
    assert table.get("delta_net") is None


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_row_describes_its_arguments(rule):
    arguments = rule.arguments(projections_for(rule))
    log_decay = arguments.get("log_decay")
    shapes = {None: "none", 1: "constant", 3: "head", 4: "channel"}
    assert shapes[None if log_decay is None else log_decay.ndim] == rule.decay
    if rule.operator == "dplr":
        erase = "free"
    else:
        erase = "none" if arguments["beta"] is None else "tied"
    assert erase == rule.erase


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_gates_are_computed_in_float32(rule):
    values = vars(projections_for(rule))
    narrow = {k: v.bfloat16() if torch.is_tensor(v) else v for k, v in values.items()}
    arguments = rule.arguments(Projections(**narrow))
    for name in ("q", "k", "v"):
        assert arguments[name].dtype == torch.bfloat16
    for name in ("beta", "log_decay", "a", "b"):
        if arguments.get(name) is not None:
            assert arguments[name].dtype == torch.float32, name


@pytest.mark.parametrize("A_log", [-20.0, 0.0, 20.0])
@pytest.mark.parametrize("logit", [-200.0, 0.0, 200.0])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_extreme_gates_are_finite_and_so_are_their_gradients(rule, logit, A_log):
    values = vars(projections_for(rule))
    tensors = {k: v.float() for k, v in values.items() if torch.is_tensor(v)}
    for name, x in tensors.items():
        if name.endswith("_logits"):
            tensors[name] = torch.full_like(x, logit)
    tensors["A_log"] = torch.full_like(tensors["A_log"], A_log)
    leaves = {k: v.requires_grad_() for k, v in tensors.items()}
    p = Projections(**(values | leaves))
    arguments = rule.arguments(p)
    if (log_decay := arguments.get("log_decay")) is not None:
        assert (log_decay <= 0).all()
        assert log_decay.isfinite().all()
    run(rule, p).square().sum().backward()
    for name, x in leaves.items():
        assert x.grad is None or x.grad.isfinite().all(), name


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_missing_gate_is_named(rule):
    p = draw_projections(heads=key_heads(rule))
    if rule.decay in ("none", "constant") and rule.erase == "none":
        rule.arguments(p)
        return
    with pytest.raises(ValueError, match=r"\w+ must be a tensor for this rule, got None"):
        rule.arguments(p)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_gradients(rule):
    """Finite differences of all that a rule reads, through the definition of its operator."""
    p = projections_for(rule)
    names = [f.name for f in dataclasses.fields(p) if torch.is_tensor(getattr(p, f.name))]
    # One row and three tokens are enough, of tensors that have tokens.
    cut = {n: getattr(p, n)[:1, :3] for n in names if getattr(p, n).shape[:2] == (B, T)}
    leaves = [cut.get(n, getattr(p, n)).clone().requires_grad_() for n in names]

    def output(*given):
        q = dataclasses.replace(p, **dict(zip(names, given, strict=True)))
        found = OPERATORS[rule.operator](**rule.arguments(q))
        o = rule.read_out_function(found.o, q)
        # A stabiliser scales the state, and no gradient follows it there.
        scaled = rule.name in ("mlstm", "xlstm_7b")
        return o if scaled else (o, rule.final_state(found.final_state, q))

    assert torch.autograd.gradcheck(output, leaves)
