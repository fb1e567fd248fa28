import json
import sys
import time

import pytest

from bench import adapters
from bench.processes import empty_caches, run_cases
from bench.worker import Setting

SETTING = Setting("deltarule", "torch", "cpu", 2)
# A worker that does what its cases say.
SCRIPT = """
import json, os, sys, time
plan = json.loads(open(sys.argv[1]).read())
with open(sys.argv[2], "a") as lines:
    def write(line):
        lines.write(json.dumps(line) + "\\n")
        lines.flush()
    for index, case in enumerate(plan["cases"]):
        write({"start": index})
        if case["do"] == "crash":
            print("an illegal access", file=sys.stderr, flush=True)
            os._exit(7)
        if case["do"] == "hang":
            time.sleep(60)
        write({"done": index, "row": {"was": case["do"], "seen": os.environ.get("SEEN")}})
        if case["do"] == "lose":
            os._exit(3)
"""


@pytest.fixture
def run(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT)

    def run(*cases, limit_s=20.0):
        return list(
            run_cases(
                SETTING,
                [{"do": case} for case in cases],
                limit_s=limit_s,
                environment={"SEEN": "yes"},
                command=(sys.executable, str(script)),
            )
        )

    return run


def done(case):
    return {"do": case}, {"was": case, "seen": "yes"}


def test_all_cases_in_order(run):
    assert run("one", "two", "three") == [done("one"), done("two"), done("three")]


def test_a_crash_loses_one_case(run):
    first, crash, last = run("one", "crash", "three")
    assert (first, last) == (done("one"), done("three"))
    assert crash == (
        {"do": "crash"}, {"error": "the process ended with code 7: an illegal access"}
    )  # fmt: skip


def test_every_case_may_crash(run):
    assert [case["do"] for case, row in run("crash", "crash") if "error" in row] == ["crash"] * 2


def test_a_process_may_leave_after_a_case(run):
    assert run("lose", "two") == [done("lose"), done("two")]


def test_a_case_that_hangs_is_given_up(run):
    start = time.monotonic()
    first, hung, last = run("one", "hang", "three", limit_s=1.0)
    assert time.monotonic() - start < 15
    assert (first, last) == (done("one"), done("three"))
    assert hung == ({"do": "hang"}, {"error": "took more than 1 s"})


def test_a_worker_that_cannot_start_fails_all_cases(tmp_path):
    command = (sys.executable, "-c", "raise SystemExit('no such module')")
    cases = [{"do": "one"}, {"do": "two"}]
    rows = list(run_cases(SETTING, cases, limit_s=20.0, environment={}, command=command))
    assert [row["error"] for _, row in rows] == [
        "the process ended with code 1: no such module"
    ] * 2  # fmt: skip


def test_the_real_worker():
    case = {"kind": "error", "operation": "gdn", "shape": ["small", 1, 8, 1, 1, 8, 8]}
    refused = {"kind": "error", "operation": "softmax", "shape": ["small", 1, 8, 1, 1, 8, 8]}
    rows = list(run_cases(SETTING, [case, refused], limit_s=60.0, environment={}))
    assert json.dumps(rows)
    assert rows[0][1]["errors"]["o"] < 2**-8
    assert rows[1][1] == {"error": "ValueError: deltarule has no softmax attention"}


def test_cold_starts_find_no_cache(tmp_path):
    variables = empty_caches(tmp_path)
    assert set(variables) == {"TRITON_CACHE_DIR", "TILELANG_CACHE_DIR"}
    assert len(set(variables.values())) == 2
    assert not set(variables) & set(adapters.PEERS["fla"].environment)
