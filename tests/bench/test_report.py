import json
from pathlib import Path

import pytest

from bench import neighbours, report, results, scans, sides, timing
from bench.cases import CHECKED, SHAPES
from bench.command import case

TRAIN = SHAPES["8x4096-h16"]


def example_report(date="2030-01-02T03:04+00:00", ours=0.25):
    """A small report, as `deltarule bench` writes one; the figures are made up."""
    report = results.new_report(["bench", "--quick"]) | {"date": date}
    ceilings = {"device": "Example GPU", "copy_TB_s": 4.2, "matrix_TFLOP_s": 780.0}
    results.add(report, "deltarule", {"kind": "ceilings"}, ceilings)
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


def test_a_report_survives_its_file(tmp_path):
    path = tmp_path / "new folder" / "bench.json"
    original = example_report()
    results.save(original, path)
    assert results.load(path) == json.loads(path.read_text()) == original


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 99}'])
def test_what_is_no_report_is_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json"):
        results.load(path)


def test_rates_come_from_the_graphs_time():
    row = example_report()["rows"][0]
    forward = row["forward"]
    # 1032 bytes for each of 524,288 tokens and heads, and the state.
    assert forward["GB_s"] == pytest.approx((1032 * 524288 + 4 * 128 * 128**2) / 0.25e-3 / 1e9)
    assert forward["TFLOP_s"] == pytest.approx(163840 * 524288 / 0.25e-3 / 1e12)
    assert forward["times_floor"] == pytest.approx(0.25 / forward["floor_ms"])
    assert "times_floor" not in results.with_rates(row | {"forward": {"eager_ms": 1.0}}, "forward")


def test_tables_hold_what_ran():
    lines = "\n".join(report.tables([example_report()])).splitlines()
    operators = [line for line in lines if "| forward |" in line]
    assert len(operators) == 3
    cells = "forward | 0.129 | **0.25** | 0.84 (3.4 x) | 0.34 (1.4 x) | - |"
    assert operators[0] == f"| gated delta rule, 8x4096, 16/16, 128 | {cells}"
    assert "| gated delta rule | deltarule | 1.0e-03 | 2.0e-03 | log_decay 4.0e-03 |" in lines
    assert any("57000" in line for line in lines)


def test_each_figure_is_a_line_and_the_report_is_written_again(tmp_path, capsys):
    rows = example_report()["rows"]
    path = tmp_path / "report.json"
    written = []

    def found():
        for number in range(3):
            written.append(len(results.load(path)["rows"]) if path.exists() else 0)
            yield "fla", {"kind": "step", "B": number}, {"us": 1.23456}

    results.file_each(results.new_report([]), found(), path)
    assert written == [0, 1, 2]
    assert capsys.readouterr().out.splitlines()[-1] == "peer=fla kind=step B=2 us=1.235"
    assert not any("\n" in results.brief(row) for row in rows)


@pytest.mark.parametrize("program", [neighbours, scans])
def test_a_program_is_run_from_the_command_line(program, tmp_path, monkeypatch):
    path, about = tmp_path / "figures.json", program.__doc__
    monkeypatch.setattr("sys.argv", ["", "--output", str(path)])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=f"{program.__name__} needs a CUDA device"):
        sides.run_cases(program.__name__, about, "step", program.CASES)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    for rate in ("copy_bandwidth", "matrix_rate"):
        monkeypatch.setattr(timing, rate, lambda: 1e12)
    monkeypatch.setattr(sides, "figures", lambda case, *rates: [("ours", "forward", case)])
    sides.run_cases(program.__name__, about, "step", {"small": lambda: {"ms": 2.0}})
    report = results.load(path)
    assert report["command"] == f"python -m {program.__name__} --output {path}"
    assert report["device"] == "a GPU"
    assert report["ceilings"] == {"copy_TB_s": 1.0, "matrix_TFLOP_s": 1.0}
    facts = {"kind": "step", "case": "small", "pass": "forward"}
    assert report["rows"] == [{"peer": "ours", **facts, "ms": 2.0}]


def test_a_ratio_is_taken_within_one_run_and_our_time_from_the_newest():
    old, new = example_report(date="2030-01-01", ours=0.5), example_report(date="2030-02-01")
    new["rows"], new["kernels"] = [row for row in new["rows"] if row["peer"] != "fla"], "others"
    found = {(x.operation, x.shape.name, x.passed): x for x in report.timings([new, old])}
    gated = found["gdn", TRAIN.name, "forward"]
    assert gated.ours_ms == 0.25
    assert gated.peers == {"fla": (0.84, None), "flash_qla": (0.34, pytest.approx(0.34 / 0.25))}
    assert [*gated.peers] == ["fla", "flash_qla"]


def test_a_ratio_is_kept_while_the_kernels_are_the_same_however_their_time_differs():
    old, new = example_report(date="2030-01-01", ours=0.3), example_report(date="2030-02-01")
    new["rows"] = [row for row in new["rows"] if row["peer"] != "fla"]
    assert report.timings([old, new])[0].peers["fla"] == (0.84, pytest.approx(0.84 / 0.3))
    new["kernels"] = "others"
    assert report.timings([old, new])[0].peers["fla"] == (0.84, None)


def test_a_gpu_has_times_of_its_own_and_that_with_most_ratios_is_first():
    old, new = example_report(date="2030-01-01"), example_report(date="2030-02-01", ours=0.5)
    old["device"], new["device"] = "one GPU", "another GPU"
    new["rows"] = [row for row in new["rows"] if row["peer"] == "deltarule"]
    found = report.by_device([old, new])
    assert [*found] == ["one GPU", "another GPU"]
    assert [passes[0].ours_ms for passes in found.values()] == [0.25, 0.5]


def test_peers_alone_do_not_replace_a_comparison():
    old, new = example_report(date="2030-01-01"), example_report(date="2030-02-01")
    new["rows"] = [row for row in new["rows"] if row["peer"] == "fla"]
    assert report.timings([old, new]) == report.timings([old])


def test_a_report_without_times_has_an_empty_picture(tmp_path):
    report.draw_figure([], tmp_path / "bench.png", "a GPU")
    assert (tmp_path / "bench.png").stat().st_size > 0


def test_the_page_of_this_repository_is_what_its_raw_figures_give(tmp_path):
    docs = Path(__file__).parents[2] / "docs"
    (tmp_path / "figures").mkdir()
    page = tmp_path / "performance.md"
    page.write_text((docs / "performance.md").read_text())
    reports = [results.load(path) for path in sorted((docs / "figures").glob("bench_*.json"))]
    report.write_page(reports, page, tmp_path / "figures" / "bench.png")
    assert page.read_text() == (docs / "performance.md").read_text()
