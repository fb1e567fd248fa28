"""Comba against arXiv 2506.02475, eq. 5: the erase reads the state before its decay."""

import math

import torch
from torch.nn.functional import softplus

from deltarule.nn import MIXERS, RULES
from nn.drawn import HV, B, H, K, T, draw, draw_projections, largest_error, run
from oracles import comba
from oracles.lifted import each_head


def drawn(**changes):
    gates = {"decay_logits": draw(B, T, HV), "A_log": draw(HV), "dt_bias": draw(HV)}
    others = {"beta_logits": draw(B, T, HV), "erase_scale": draw(H), "D": draw(H)}
    return draw_projections(**(gates | others | changes))


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def per_value_head(x):
    """[..., H, K] or [H] to value heads: head h reads key head h * H // HV."""
    axis = -2 if x.ndim > 1 else 0
    return x.repeat_interleave(HV // H, dim=axis)


def gates(p):
    """Alpha and beta, [B, T, HV]."""
    rate = p.A_log.exp() * softplus(p.decay_logits + p.dt_bias)
    return torch.exp(-rate), torch.sigmoid(p.beta_logits)


def test_equation_5():
    p = drawn()
    alpha, beta = gates(p)
    b, d = torch.sigmoid(per_value_head(p.erase_scale)), per_value_head(p.D)
    q, k = (per_value_head(unit(x)) for x in (p.q, p.k))
    inputs = q, k, p.v, alpha, beta, b * beta, d.expand_as(beta)

    def looped(*given):
        *rest, correction = given
        return comba.recurrence(*rest, d=correction[0])

    expected, _ = each_head(looped, *inputs)
    assert largest_error(run(RULES["comba"], p), expected / math.sqrt(K)) <= 1e-12


def test_released_layer():
    """It corrects the query before the norms, and norms the key that erases as well."""
    p = drawn()
    q, k, erasing = comba.released_inputs(p.q, p.k, p.erase_scale[:, None], p.D[:, None])
    expected, _ = each_head(
        comba.with_feedback_key,
        *map(per_value_head, (q, k)),
        p.v,
        per_value_head(erasing),
        *gates(p),
    )
    assert largest_error(run(RULES["comba_released"], p), expected / math.sqrt(K)) <= 1e-12
    assert largest_error(run(RULES["comba"], p), expected / math.sqrt(K)) > 1e-2


def test_without_decay_and_correction_the_whole_key_erases_as_in_deltanet():
    open_gate = torch.full((B, T, HV), -1e3).double()
    p = drawn(
        erase_scale=torch.full((H,), 1e3).double(),
        D=torch.zeros(H).double(),
        decay_logits=open_gate,
    )
    assert largest_error(run(RULES["comba"], p), run(RULES["deltanet"], p)) <= 1e-12


def test_with_decay_it_is_no_gated_deltanet():
    """Gated DeltaNet erases from the decayed state: the erased part differs by alpha."""
    p = drawn(erase_scale=torch.full((H,), 1e3).double(), D=torch.zeros(H).double())
    assert largest_error(run(RULES["comba"], p), run(RULES["gated_deltanet"], p)) > 1e-2


def test_both_layers_have_the_same_parameters():
    made = [MIXERS[name](32, num_heads=2) for name in ("comba", "comba_released")]
    shapes = [{name: p.shape for name, p in layer.named_parameters()} for layer in made]
    assert shapes[0] == shapes[1]
