"""A small report, as `deltarule bench` writes one; the figures are made up."""

from bench import results
from bench.cases import CHECKED, SHAPES
from bench.command import case


def example_report(date="2030-01-02T03:04+00:00", ours=0.25):
    report = results.new_report(["bench", "--quick"]) | {"date": date}
    results.add(
        report,
        "deltarule",
        {"kind": "ceilings"},
        {"device": "Example GPU", "copy_TB_s": 4.2, "matrix_TFLOP_s": 780.0},
    )
    timed = {
        "deltarule": {"forward": passed(ours), "forward_backward": passed(1.1)},
        "fla": {
            "forward": passed(0.84),
            "forward_backward": {"error": "RuntimeError: refuses on this version"},
        },
        "flash_qla": {"forward": passed(0.34), "forward_backward": passed(1.24)},
    }
    for name in ("8x4096-h16", "2x16384-h16", "1x2048-h16"):
        for peer, figures in timed.items():
            results.add(report, peer, case("time", "gdn", SHAPES[name], True), figures)
    errors = {"o": 1e-3, "state": 2e-3, "grad q": 3e-3, "grad log_decay": 4e-3}
    results.add(report, "deltarule", case("error", "gdn", CHECKED, True), {"errors": errors})
    for peer, speed in (("deltarule", 80000.0), ("fla", 57000.0)):
        step = {"tokens_per_s": speed, "peak_GiB": 50.0, "first_s": 9.0, "step_s": 0.4}
        results.add(report, peer, {"kind": "model", "batch": 8, "tokens": 4096}, step)
    return report


def passed(graph_ms):
    return {"first_s": 1.5, "extra_MiB": 800.0, "eager_ms": graph_ms + 0.1, "graph_ms": graph_ms}
