"""DeltaNet by a parallel scan over matrices, against the definition and paper 001's loop."""

import pytest
import torch

from deltarule import delta_rule
from deltarule.ops.delta_rule.parallel_scan import parallel_scan
from oracles import delta_scan
from tolerance import relative_rms

B, T, H, HV, K, V = 2, 13, 2, 4, 5, 3
DECAYS = {"none": None, "constant": (HV,), "head": (B, T, HV), "channel": (B, T, HV, K)}


def draw(*sizes):
    return torch.randn(*sizes, dtype=torch.float64)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("carried", [False, True])
def test_by_the_definition(decay, carried):
    q, k, v = draw(B, T, H, K), draw(B, T, H, K) / 3, draw(B, T, HV, V)
    given = {"beta": 2 * torch.rand(B, T, HV, dtype=torch.float64)}
    given["log_decay"] = None if DECAYS[decay] is None else -draw(*DECAYS[decay]).abs()
    given["initial_state"] = draw(B, HV, V, K) if carried else None
    found, exact = parallel_scan(q, k, v, **given), delta_rule(q, k, v, **given, impl="reference")
    assert relative_rms(found.o, exact.o) <= 1e-12
    assert relative_rms(found.final_state, exact.final_state) <= 1e-12


def test_as_the_paper_has_it():
    q, k, v, beta = draw(T, K), draw(T, K) / 2, draw(T, V), torch.rand(T, dtype=torch.float64)
    expected, last = delta_scan.recurrence(q, k, v, beta)
    rows = (x[None, :, None] for x in (q, k, v))
    o, state = parallel_scan(*rows, beta=beta[None, :, None], scale=1.0)
    assert relative_rms(o[0, :, 0], expected) <= 1e-12
    assert relative_rms(state[0, 0], last) <= 1e-12
