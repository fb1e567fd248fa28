"""S4D against tests/oracles/s4.py, and its chunks against `selective_scan`."""

import pytest
import torch

import deltarule
from deltarule.nn import S4D, s4d
from deltarule.nn.complex_filters import filtered
from deltarule.nn.layout import make_layout
from deltarule.nn.rotation import turned
from nn.layers import HIDDEN, inputs, make
from nn.test_scan import block, end_of_block
from oracles import s4
from tolerance import relative_rms

DOUBLE = torch.float64


@torch.no_grad()
def test_by_its_oracle():
    layer, x, v = block("s4d")
    y, state = layer(x)
    parts = [p.flatten(0, 1) for p in (layer.A_log, layer.frequency, layer.B, layer.C)]
    kept, rows = state["recurrent"][0].flatten(0, 1), []
    for channel, (rate, frequency, B, C) in enumerate(zip(*parts, strict=True)):
        A = torch.complex(-rate.exp(), frequency)
        B, C = (torch.complex(*p) for p in (B, C))
        dA, dB = s4.discretise(A, B, layer.log_step.flatten()[channel].exp())
        o, last = s4.recurrence(v[:, channel], dA, dB, C, 0.0)
        rows.append(o)
        found = torch.complex(*kept[channel].chunk(2))
        assert relative_rms(torch.view_as_real(found), torch.view_as_real(last)) <= 1e-12
    assert relative_rms(y[0], end_of_block(layer, x, v, torch.stack(rows, 1))) <= 1e-12


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 2, 64, 200])
def test_chunks_are_the_scan(tokens):
    layer, v = make("s4d", DOUBLE), torch.randn(2, tokens, 2, HIDDEN, dtype=DOUBLE)
    given = layer.filters()
    layout, state = make_layout(v.flatten(2), None, None), layer.init_state(2)["recurrent"]
    y, last = filtered(v, given, state, layout)
    expected = deltarule.selective_scan(**s4d.arguments(v, given), impl="reference")
    assert relative_rms(y, expected.o.view_as(y)) <= 1e-12
    turned_back = turned(expected.final_state.view_as(last), tokens * given.angle)
    assert relative_rms(last, turned_back) <= 1e-11


@torch.no_grad()
def test_it_is_a_convolution():
    """Nothing depends on the input: `long_convolution` with the filter of each channel."""
    layer, x, v = block("s4d")
    y, _ = deltarule.ops.long_convolution(v[None, ..., None], layer.taps(len(v)))
    assert relative_rms(layer(x)[0][0], end_of_block(layer, x, v, y[0, ..., 0])) <= 1e-11


def test_spectra_are_those_of_the_paper():
    assert relative_rms(s4d.legs(16), s4.legs(32).imag) <= 1e-10
    assert relative_rms(s4d.evenly_spaced(16), s4.lin(32).imag) <= 1e-12
    assert relative_rms(s4d.inverse(16), s4.inv(32).imag.flip(0)) <= 1e-12
    for name, spectrum in s4d.IMAGINARY_PARTS.items():
        layer = S4D(HIDDEN, num_heads=2, spectrum=name)
        assert layer.frequency.shape == (2, HIDDEN, 32)
        torch.testing.assert_close(layer.frequency[1, 5].double(), spectrum(32))
    assert torch.allclose(layer.A_log.exp(), torch.tensor(0.5))


@torch.no_grad()
def test_small_steps_are_held_without_cancellation():
    layer = make("s4d")
    layer.log_step.fill_(-12.0)
    exact = make("s4d", DOUBLE)
    exact.load_state_dict(layer.state_dict())
    assert relative_rms(layer.filters().b, exact.filters().b) <= 1e-6


@torch.no_grad()
def test_float32_keeps_its_precision_over_many_turns():
    layer, x = make("s4d", head_k_dim=32), inputs(1, 3000)
    exact = make("s4d", DOUBLE, head_k_dim=32)
    exact.load_state_dict(layer.state_dict())
    assert relative_rms(layer(x)[0], exact(x.double())[0]) <= 3e-6
