"""Cases in a process of their own, and cold ones each in a new one."""

import json

from bench import adapters, command
from bench.command import empty_caches, measured
from bench.worker import Setting

SETTING = Setting("deltarule", "torch", "cpu", 2)
SHAPE = ["small", 1, 8, 1, 1, 8, 8]
CASE = {"kind": "error", "operation": "gdn", "shape": SHAPE, "backward": False}


def test_figures_and_reasons_by_case():
    refused = {**CASE, "operation": "softmax"}
    rows = dict(zip(("gdn", "softmax"), measured(SETTING, [CASE, refused], 60.0), strict=True))
    assert json.dumps(rows)
    assert rows["gdn"][0] == CASE
    assert rows["gdn"][1]["errors"]["o"] < 2**-8
    assert rows["softmax"][1] == {"error": "ValueError: deltarule has no softmax attention"}


def dies(case, setting):
    """Stands in for the worker."""
    raise SystemExit(7)


def test_a_case_that_ends_its_process_has_a_reason(monkeypatch):
    monkeypatch.setattr(command, "attempt", dies)
    cold = {**CASE, "kind": "cold"}
    assert list(measured(SETTING, [CASE, cold], 60.0)) == [
        (case, {"error": "the process ended with code 7"}) for case in (CASE, cold)
    ]


def test_cold_starts_find_no_cache(tmp_path):
    variables = empty_caches(tmp_path)
    assert set(variables) == {"TRITON_CACHE_DIR", "TILELANG_CACHE_DIR"}
    assert len(set(variables.values())) == 2
    assert not set(variables) & set(adapters.PEERS["fla"].environment)
