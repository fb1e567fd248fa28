"""Every linear rule beside the recurrence of its paper: one value head at a time.

What each function takes is the slices of one head: q, k, v [T, channels], logits of gates [T, ..]
and parameters, by the names that rules read them under; it returns o [T, V].
"""

import math
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

import deltarule
from deltarule.nn import MIXERS, RULES, Lightning
from deltarule.nn.rotation import turned
from deltarule.nn.rule import Projections
from nn.layers import HV, B, K, T, V, draw, draw_projections, inputs, largest_error, make, run
from nn.test_by_hand import BY_HAND
from nn.test_rules import gates, key_heads
from oracles import comba, gate_loop, gdn2, kda, lightning, mlstm
from oracles import decaying_fast_weights as fast_weights
from oracles import gated_retention as retention
from oracles.lifted import unit

SCALE = K**-0.5


def heads(p: Projections):
    """Rows, value heads and what each of them reads, of shared heads and parameters too."""
    given = {f.name: x for f in fields(p) if isinstance(x := getattr(p, f.name), Tensor)}
    others = {f.name: getattr(p, f.name) for f in fields(p) if f.name not in given}
    for row in range(B):
        for head in range(HV):
            own = {
                name: x[row, :, head * x.shape[2] // HV]
                if x.shape[:1] == (B,) and x.ndim > 2
                else x[head * len(x) // HV]
                for name, x in given.items()
            }
            yield row, head, SimpleNamespace(**(others | own), head=head)


def by_hand(recurrence, p: Projections) -> Tensor:
    rows = [[recurrence(h) for i, _, h in heads(p) if i == row] for row in range(B)]
    return torch.stack([torch.stack(row, 1) for row in rows])


def step_size(h) -> Tensor:
    return softplus(h.decay_logits + h.dt_bias)


def log_decay(h) -> Tensor:
    return -h.A_log.exp() * step_size(h)


def by_key(q, k, v, decay) -> Tensor:
    return fast_weights.recurrence(q, k, v, decay, torch.ones_like(v))[0]


def by_head(h, decay) -> Tensor:
    return retention.recurrence(h.q * SCALE, h.k, h.v, decay)[0]


def constant(decay: float) -> Tensor:
    return torch.full((T,), decay, dtype=torch.float64)


def turning(h):
    return gate_loop.transition(h.decay_logits, h.phase)


def gated_rfa(h):
    """arXiv 2103.02143, section 3.2: two gated sums, divided."""
    g = h.decay_logits.sigmoid()[:, None]
    decay = g.expand(T, K)
    sums = (by_key(h.q, h.k, (1 - g) * x, decay) for x in (h.v, torch.ones_like(h.v)))
    return next(sums) / next(sums)


def hgrn2(h):
    """arXiv 2404.07904: the keys are what is forgotten, and no gate is below its bound."""
    f = h.lower_bound + (1 - h.lower_bound) * h.decay_logits.sigmoid()
    return by_key(h.q * SCALE, 1 - f, h.v, f)


def with_unit_keys(recurrence, h, *gates):
    return recurrence(unit(h.q) * SCALE, unit(h.k), h.v, *gates)[0]


def kimi(h):
    log_a = log_decay(h)
    if h.gate_lower_bound is not None:
        log_a = kda.bounded_log_decay(h.decay_logits, h.A_log, h.dt_bias, h.gate_lower_bound)
    return with_unit_keys(kda.recurrence, h, log_a, h.beta_logits.sigmoid())


def longhorn(h):
    """Its objective minimised by a solve: the gradient of |S - S'|^2 + b |S k - v|^2 is zero."""
    S, o = torch.zeros(V, K, dtype=torch.float64), []
    for t in range(T):
        b, k = h.beta_max * h.beta_logits[t].sigmoid(), h.k[t]
        left = torch.eye(K, dtype=torch.float64) + b * torch.outer(k, k)
        S = torch.linalg.solve(left, S + b * torch.outer(h.v[t], k), left=False)
        o.append(S @ h.q[t] * SCALE)
    return torch.stack(o)


def delta_product(h):
    """arXiv 2502.10297: the delta rule on n steps a token, of which the first decays."""
    n, beta = h.n_steps, h.beta_max * h.beta_logits.sigmoid()
    log_a = torch.zeros(T * n, K, dtype=torch.float64)
    if h.gated:
        log_a[::n] = log_decay(h)[:, None]
    q = unit(h.q).repeat_interleave(n, 0) * SCALE
    return kda.recurrence(q, unit(h.k), h.v, log_a, beta)[0][n - 1 :: n]


def comba_released(h):
    """It corrects the query before the norms, and norms the key that erases as well."""
    q, k, erasing = comba.released_inputs(h.q, h.k, h.erase_scale, h.D)
    alpha, beta = log_decay(h).exp(), h.beta_logits.sigmoid()
    return comba.with_feedback_key(q * SCALE, k, h.v, erasing, alpha, beta)[0]


def mlstm_cell(h, cap=lambda logits: logits):
    return mlstm.recurrence(h.q, h.k, h.v, cap(h.beta_logits), cap(h.decay_logits), eps=1e-6)[0]


RECURRENCES = {
    "linear_attention": lambda h: by_head(h, constant(1.0)),
    "retnet": lambda h: by_head(h, constant(1 - 2.0 ** (-5 - h.head))),
    "gated_retnet": lambda h: by_head(h, retention.gate(h.decay_logits)),
    "lightning": lambda h: by_head(
        h, constant(math.exp(-lightning.released_slopes(HV, 0, 1)[h.head]))
    ),
    # The state-space model h = e^{dt A} h + dt B x, y = C h + D x.
    "mamba2": lambda h: h.D * h.v + retention.recurrence(
        h.q, h.k, step_size(h)[:, None] * h.v, log_decay(h).exp()
    )[0],
    "gla": lambda h: by_key(h.q * SCALE, h.k, h.v, h.decay_logits.sigmoid() ** (1 / 16)),
    "gated_rfa": gated_rfa, "hgrn2": hgrn2,
    "gate_loop": lambda h: gate_loop.recurrence(h.q * SCALE, h.k, h.v, turning(h))[0],
    "deltanet": lambda h: with_unit_keys(
        kda.recurrence, h, torch.zeros(T, K).double(), h.beta_max * h.beta_logits.sigmoid()
    ),
    "gated_deltanet": lambda h: with_unit_keys(
        kda.recurrence, h, log_decay(h)[:, None].expand(T, K), h.beta_logits.sigmoid()
    ),
    "kda": kimi, "longhorn": longhorn,
    "gated_deltanet2": lambda h: with_unit_keys(
        gdn2.recurrence, h, log_decay(h), h.erase_logits.sigmoid(), h.write_logits.sigmoid()
    ),
    "comba": lambda h: SCALE * comba.recurrence(
        unit(h.q), unit(h.k), h.v, log_decay(h).exp(), h.beta_logits.sigmoid(),
        h.erase_scale.sigmoid() * h.beta_logits.sigmoid(), d=h.D,
    )[0],
    "comba_released": comba_released, "mlstm": mlstm_cell,
    "xlstm_7b": lambda h: mlstm_cell(h, lambda logits: mlstm.soft_cap(logits, 15)),
}  # fmt: skip


def drawn(name: str, **changes: object) -> Projections:
    p = draw_projections(heads=key_heads(RULES[name]), **gates(RULES[name]))
    if name == "gated_rfa":
        # Positive features, so that no divisor is near zero.
        p = replace(p, q=p.q.abs(), k=p.k.abs())
    return replace(p, **changes)


@pytest.mark.parametrize("name", RECURRENCES)
def test_by_the_recurrence(name):
    p = drawn(name)
    assert largest_error(run(RULES[name], p), by_hand(RECURRENCES[name], p)) <= 1e-10


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deltanet", {"beta_max": 2.0}), ("kda", {"gate_lower_bound": -5.0}),
        ("hgrn2", {"lower_bound": torch.zeros(HV, K, dtype=torch.float64)}),
        ("hgrn2", {"decay_logits": 100 * draw(B, T, HV, K)}),
        ("longhorn", {"beta_logits": 1e4 * draw(B, T, HV), "beta_max": 2.0}),
        *(("mlstm", {"beta_logits": size * draw(B, T, HV)}) for size in (5.0, 50.0)),
        ("xlstm_7b", {"decay_logits": 20 * draw(B, T, HV)}),
    ],
)  # fmt: skip
def test_with_options_and_strong_gates(name, changes):
    p = drawn(name, **changes)
    assert largest_error(run(RULES[name], p), by_hand(RECURRENCES[name], p)) <= 1e-10


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_products_of_householders(n, gated):
    rule = RULES["gated_delta_product" if gated else "delta_product"]
    p = draw_projections(n, beta_max=2.0, **gates(rule, n))

    def recurrence(h):
        h.gated = gated
        return delta_product(h)

    assert largest_error(run(rule, p), by_hand(recurrence, p)) <= 1e-12


def test_every_rule_is_here_or_has_a_file_of_its_own():
    others = {name for name, rule in RULES.items() if rule.page == "multi_head"}
    assert set(RULES) - {*RECURRENCES} - others == {
        # Their value heads have key heads of their own: the layer by hand, and the model in
        # models/fla_oracle.py, say all of the rule.
        *("rwkv6", "rwkv7"),
        *("delta_product", "gated_delta_product"),
    }
    assert "rwkv6" in BY_HAND


# ---- ranges and states --------------------------------------------------------------------------


def test_the_state_of_gate_loop_is_the_papers_in_a_turning_frame():
    p = drawn("gate_loop")
    state = deltarule.delta_rule(**RULES["gate_loop"].arguments(p)).final_state
    found = turned(state, p.phase.sum(1).unsqueeze(2))
    for row, head, h in heads(p):
        _, state = gate_loop.recurrence(h.q, h.k, h.v, turning(h))
        assert largest_error(found[row, head], torch.cat([state.real, state.imag], -1)) <= 1e-12


@pytest.mark.parametrize("turns", [1e3, 1e6])
def test_far_from_the_start_a_frame_is_as_good_as_any(turns):
    """A sequence that has turned this often reads what one at its start does."""
    layer, x = make("gate_loop"), inputs(1, 30)
    y, _ = layer(x)
    state = layer.init_state(1)
    state["phase"] += torch.tensor(turns * torch.pi)
    torch.testing.assert_close(layer(x, state)[0], y, rtol=1e-4, atol=1e-6)


def test_both_layers_of_comba_have_the_same_parameters():
    made = [MIXERS[name](32, num_heads=2) for name in ("comba", "comba_released")]
    shapes = [{name: p.shape for name, p in layer.named_parameters()} for layer in made]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("heads", [1, 2, 6, 12, 64])
@pytest.mark.parametrize(("layer", "layers"), [(0, 1), (0, 80), (40, 80), (79, 80)])
def test_slopes_of_lightning_attention(heads, layer, layers):
    """By what an empty token leaves of the state; MiniMax-01 has 64 heads and 80 layers."""
    made = Lightning(heads * 4, num_heads=heads, layer_index=layer, num_layers=layers).double()
    _, state = made(torch.randn(1, 3, heads * 4, dtype=torch.float64))
    _, after = made(torch.zeros(1, 1, heads * 4, dtype=torch.float64), state)
    slopes = -(after["recurrent"] / state["recurrent"])[0].flatten(1).mean(-1).log().detach()
    expected = lightning.released_slopes(heads, layer, layers)
    torch.testing.assert_close(slopes, expected, rtol=0, atol=1e-13)
