"""Causality holds for every value: a NaN or an infinity never reaches an earlier token."""

import pytest
import torch

from deltarule import delta_rule, dplr, pack, selective_scan

T, BAD, H, HV, K, V = 75, 37, 2, 4, 8, 6


def drawn(name: str, decay: str | None, n_steps: int) -> dict[str, torch.Tensor]:
    """Every tensor of a call; a decay is -inf at one token."""
    rows = T * n_steps
    x = {
        "q": torch.randn(1, T, H, K),
        "k": torch.nn.functional.normalize(torch.randn(1, rows, H, K), dim=-1),
        "v": torch.randn(1, rows, HV, V),
    }
    if name == "delta_rule":
        x["beta"] = torch.rand(1, rows, HV)
    if name == "dplr":
        x["a"] = -torch.nn.functional.normalize(torch.randn(1, T, HV, K), dim=-1)
        x["b"] = -0.5 * x["a"]
    if decay is not None:
        x["log_decay"] = -torch.rand(1, T, HV, *([K] if decay == "channel" else []))
        x["log_decay"][:, 11] = -torch.inf
    return x


def run(name: str, x: dict[str, torch.Tensor], impl: str, n_steps: int, **options: object):
    if name == "dplr":
        return dplr(**x, impl=impl, **options)
    return delta_rule(**({"beta": None} | x), impl=impl, n_steps=n_steps, **options)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("decay", [None, "head", "channel"])
@pytest.mark.parametrize(
    ("name", "n_steps"), [("linear", 1), ("delta_rule", 1), ("delta_rule", 2), ("dplr", 1)]
)
def test_earlier_tokens_do_not_see_what_is_not_finite(name, n_steps, decay, value):
    clean = drawn(name, decay, n_steps)
    expected = run(name, clean, "torch", n_steps).o[:, :BAD]
    for tensor in clean.keys() - {"q"}:
        x = {key: y.clone() for key, y in clean.items()}
        steps = x[tensor].shape[1] // T
        bad = float("nan") if tensor == "log_decay" else value
        x[tensor][0, BAD * steps, 0].fill_(bad)
        out = run(name, x, "torch", n_steps)
        torch.testing.assert_close(out.o[:, :BAD], expected)
        assert not out.o[:, BAD:].isfinite().all(), f"{tensor} was not seen at all"


def test_what_is_not_finite_is_where_the_definition_has_it():
    x = drawn("delta_rule", "head", 1)
    x["v"][0, BAD, 1, 2] = torch.nan
    offsets = pack((20, 30, 25))
    found, expected = (
        run("delta_rule", x, impl, 1, cu_seqlens=offsets) for impl in ("torch", "reference")
    )
    assert found.o.isnan().sum() == 50 - BAD
    torch.testing.assert_close(found.o, expected.o, equal_nan=True, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        found.final_state, expected.final_state, equal_nan=True, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", ["k", "v", "log_decay", "value_log_decay"])
def test_the_products_of_selective_scan(name):
    q, k, a = torch.randn(3, 1, T, HV, K).unbind()
    v, b = torch.randn(2, 1, T, HV, V).unbind()
    x = {"q": q, "k": k, "v": v, "log_decay": -a.exp(), "value_log_decay": -b.exp()}
    expected = selective_scan(**x, impl="torch").o[:, :BAD]
    x[name][0, BAD, 0] = torch.nan
    o = selective_scan(**x, impl="torch").o
    torch.testing.assert_close(o[:, :BAD], expected)
    assert not o[:, BAD:].isfinite().all()
