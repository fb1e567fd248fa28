import json

import pytest
import torch

from bench import adapters, command, cpu
from bench.cases import OPERATIONS, SHAPES
from bench.command import BenchRun, ModelBenchRun
from deltarule.cli import FAILED, main
from deltarule.processes import Done

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no GPU")


@without_gpu
@pytest.mark.parametrize("words", [["bench"], ["bench", "model"]])
def test_without_a_gpu_it_says_so(words, capsys):
    assert main(words) == FAILED
    message = capsys.readouterr().err
    assert "PyTorch sees no CUDA device" in message
    assert "bench --cpu" in message


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["bench", "--op", "gdm"], "gdn"),
        (["bench", "--peer", "flo"], "fla"),
        (["bench", "--shape", "9x"], "8x4096-h16"),
    ],
)
def test_an_unknown_name_is_answered_with_those_that_exist(words, named, capsys):
    assert main(words) == FAILED
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"), [(["--batch", "3"], "'16'"), (["--peer", "flashinfer"], "'fla'")]
)
def test_the_model_has_few_batches_and_peers(words, named, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "model", *words])
    assert named in capsys.readouterr().err


def test_the_cpu_flag_runs_the_comparison_with_transformers(monkeypatch, tmp_path):
    called = []
    monkeypatch.setattr(cpu, "main", lambda *given, impl: called.append((*given, impl)))
    words = ["bench", "--cpu", "--output", str(tmp_path / "x.json")]
    assert main(words) == 0
    assert main([*words, "--impl", "reference", "--repeats", "2"]) == 0
    assert called == [(tmp_path / "x.json", 5, "auto"), (tmp_path / "x.json", 2, "reference")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--op", "kda"], "--cpu has cases of its own"),
        (["--forward-only"], "--cpu has cases of its own"),
        (["--repeats", "0"], "repeats must be 1 or more, got 0"),
    ],
)
def test_the_cpu_flag_leaves_no_other_flag_unread(words, said, capsys):
    assert main(["bench", "--cpu", *words]) == FAILED
    assert said in capsys.readouterr().err


def timed(run, peer="deltarule"):
    cases = [case for case in command.cases_of(run, peer) if case["kind"] == "time"]
    return [(case["operation"], case["shape"][0]) for case in cases if not case["backward"]]


def test_shapes_are_what_their_names_say():
    for name, shape in SHAPES.items():
        if name.startswith("decode"):
            assert name == f"decode-{shape.batch}"
            assert shape.tokens == 1
            continue
        heads = f"{shape.heads}/{shape.value_heads}".removesuffix(f"/{shape.heads}")
        size = "" if shape.key_size == 128 else f"-d{shape.key_size}"
        assert name == f"{shape.batch}x{shape.tokens}-h{heads}{size}"
        assert shape.key_size == shape.value_size
    for operation in OPERATIONS.values():
        assert set(operation.quick) <= set(operation.shapes) <= set(SHAPES)


def test_everything_is_timed_once():
    ours = {name: x for name, x in OPERATIONS.items() if name != "softmax"}
    expected = [(name, shape) for name, x in ours.items() for shape in x.shapes]
    assert timed(BenchRun()) == expected
    assert timed(BenchRun(), "flash_qla") == [x for x in expected if x[0] == "gdn"]
    assert timed(BenchRun(), "torch") == [("softmax", x) for x in OPERATIONS["softmax"].shapes]


def test_shapes_are_picked_by_name_or_part():
    gated = BenchRun(op=("gdn",))
    quick = [("gdn", "8x4096-h16"), ("gdn", "2x16384-h16")]
    assert timed(BenchRun(op=("gdn",), quick=True)) == quick
    whole = BenchRun(op=("gdn",), shape=("8x4096-h16",))
    assert timed(whole) == [("gdn", "8x4096-h16")]
    part = BenchRun(op=("gdn",), shape=("h16/64",), quick=True)
    assert [shape for _, shape in timed(part)] == [x for x in SHAPES if "h16/64" in x]
    assert len(timed(gated)) == len(OPERATIONS["gdn"].shapes)


def test_kinds_of_figures():
    run = BenchRun(op=("gdn", "decode"), quick=True, measure=("error", "overhead", "cold"))
    kinds = [(case["kind"], case["operation"]) for case in command.cases_of(run, "deltarule")]
    assert kinds == [("error", "gdn"), ("error", "decode"), ("overhead", "gdn"), ("cold", "gdn")]


def test_decoding_and_forward_only_have_no_backward_pass():
    both = command.cases_of(BenchRun(op=("gdn", "decode"), measure=("time",)), "deltarule")
    assert {case["operation"] for case in both if case["backward"]} == {"gdn"}
    assert {case["operation"] for case in both if not case["backward"]} == {"gdn", "decode"}
    forward = command.cases_of(BenchRun(forward_only=True, measure=("time",)), "deltarule")
    assert not any(case["backward"] for case in forward)


def test_installed_peers_are_compared():
    assert command.chosen_peers((), ("torch",)) == ["deltarule", "torch"]
    assert command.chosen_peers(("fla", "deltarule"), ("torch",)) == ["fla", "deltarule"]


@pytest.fixture
def calls(monkeypatch):
    """What is measured, by which peer, without a GPU."""
    calls = []

    def each_apart(work, cases, *, limit_s, environment):
        calls.append((work.keywords["setting"].peer, [case["kind"] for case in cases], environment))
        for case in cases:
            if case["kind"] == "ceilings":
                yield Done(case, {"device": "Example GPU", "copy_TB_s": 4.2, "matrix_TFLOP_s": 780})
            elif case["kind"] == "time" and not case["backward"] and case["operation"] != "gla":
                yield Done(case, {"forward": {"graph_ms": 1.0, "eager_ms": 2.0}})
            else:
                yield Done(case, error="it crashed")

    monkeypatch.setattr(command, "each_apart", each_apart)
    monkeypatch.setattr(command, "need_gpu", lambda: None)
    return calls


def test_a_whole_run_leaves_figures_and_a_picture(calls, tmp_path, capsys):
    output = tmp_path / "new folder" / "bench.json"
    peers, kinds = ("deltarule", "fla"), ("time", "error", "cold")
    command.bench(BenchRun(op=("gdn",), peer=peers, quick=True, output=output, measure=kinds))
    report = json.loads(output.read_text())
    assert report["device"] == "Example GPU"
    told = [(peer, kind) for peer in peers for kind in ("time", *kinds)]
    assert [(row["peer"], row["kind"]) for row in report["rows"]] == told
    # The forward pass is kept though the backward pass crashed.
    first = report["rows"][0]
    assert first["forward"]["graph_ms"] == 1.0
    assert first["forward_backward"]["error"] == "it crashed"
    assert output.with_suffix(".png").stat().st_size > 0
    shown = capsys.readouterr().out
    assert "peer=fla kind=time operation=gdn shape=8x4096-h16 forward=(graph_ms=1 eager" in shown
    assert "it crashed" in shown
    # The cold case has a process, and empty caches, of its own.
    assert [call[:2] for call in calls] == [
        ("deltarule", ["ceilings", *["time"] * 4, "error"]),
        ("deltarule", ["cold"]),
        ("fla", [*["time"] * 4, "error"]),
        ("fla", ["cold"]),
    ]
    assert ["TRITON_CACHE_DIR" in environment for *_, environment in calls] == [False, True] * 2
    assert calls[2][2] == dict(adapters.PEERS["fla"].environment)


@pytest.mark.parametrize(
    ("operation", "peers", "why"),
    [
        ("softmax", ("deltarule", "torch"), "deltarule has no such operator"),
        ("kda", ("fla",), "--peer leaves deltarule out"),
        ("gla", ("deltarule", "fla"), "it crashed"),
    ],
)
def test_an_operator_without_times_of_ours_says_why_it_has_no_table(
    calls, operation, peers, why, tmp_path, capsys
):
    command.bench(BenchRun(op=(operation, "gdn"), peer=peers, output=tmp_path / "x.json"))
    shown = capsys.readouterr().out
    assert f"{operation}: no table, nothing of deltarule was timed: {why}\n" in shown
    assert ("gdn: no table" in shown) == ("deltarule" not in peers)


def test_what_no_peer_has_is_refused(tmp_path):
    run = BenchRun(op=("kda",), peer=("flash_qla",), shape=("decode",), measure=("time",))
    with pytest.raises(ValueError, match="nothing to measure: none of flash_qla has --op kda at "):
        command.bench(run)


def test_a_run_of_the_model(calls, tmp_path):
    output = tmp_path / "model.json"
    command.bench_model(ModelBenchRun(peer=("deltarule", "fla"), batch=(8,), output=output))
    rows = json.loads(output.read_text())["rows"]
    assert [(row["peer"], row["batch"], row["tokens"]) for row in rows] == [
        ("deltarule", 8, 4096),
        ("fla", 8, 4096),
    ]


@pytest.mark.gpu
def test_a_run_on_a_gpu(tmp_path):
    output = tmp_path / "bench.json"
    few = {"op": ("gdn", "decode"), "shape": ("1x2048-h16", "decode-8"), "peer": ("deltarule",)}
    command.bench(BenchRun(**few, repeats=3, output=output))
    report = json.loads(output.read_text())
    assert report["ceilings"]["copy_TB_s"] > 0
    timed = {row["operation"]: row for row in report["rows"] if row["kind"] == "time"}
    for figures in (timed["gdn"]["forward"], timed["gdn"]["forward_backward"]):
        names = {"graph_ms", "eager_ms", "extra_MiB", "TFLOP_s", "GB_s", "times_floor"}
        assert names <= set(figures)
        assert figures["times_floor"] > 1
        assert figures["extra_MiB"] > 0
    assert timed["decode"]["forward"]["graph_ms"] > 0
    rest = [row for row in report["rows"] if row["kind"] != "time"]
    assert [row["kind"] for row in rest] == ["error", "error", "overhead"]
    assert not any("error" in row or "backward_error" in row for row in rest)
