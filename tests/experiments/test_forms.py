"""What the JSON files do not pin of the experiments' cells: tables, forms to run, short runs."""

from dataclasses import replace

import pytest
import torch

from deltarule.nn import DeltaNet, Mamba2
from experiments import mqar, regbench
from experiments.experiment import Result, load_experiment, merged, read_settings
from experiments.figures import title_of
from experiments.groups import make_cell
from experiments.records import plain
from experiments.signed_mamba2 import SignedMamba2

CPU = torch.device("cpu")
CAUSES, GROUPS, MQAR, REGBENCH, TRACKING = map(
    load_experiment, ("causes", "groups", "mqar", "regbench", "state-tracking")
)
BY_SYSTEM = [cell for cell in MQAR.cells("published") if "-d64-lr0.0001-" in cell.name]


def test_exact_weights_are_run_on_long_rows(tmp_path):
    cell = next(c for c in GROUPS.cells("laptop") if c.name == "exact-A_5-rotations")
    figures = replace(cell, tokens=500).run(tmp_path, CPU)
    assert (figures["n_steps"], figures["accuracy"]) == (2, 1.0)
    assert figures["error"] < 1e-10


def recalled(rate, seed, accuracy):
    figures = {"evaluations": {mqar.LABEL: {"accuracy": accuracy}}, "steps": 100}
    name = f"deltanet-d64-lr{rate:g}-seed{seed}"
    return Result(name, {"optimizer": {"lr": rate}}, figures)


def test_an_entry_of_recall_is_of_the_rate_that_is_best_in_the_mean_over_seeds():
    lucky = [recalled(1e-2, 0, 0.99), recalled(1e-2, 1, 0.1)]
    steady = [recalled(1e-3, 0, 0.8), recalled(1e-3, 1, 0.7)]
    assert mqar.best([*lucky, *steady], "deltanet", 64) == steady
    assert mqar.best(lucky, "deltanet", 128) == mqar.best(lucky, "gla", 64) == []
    assert mqar.entry(steady) == "75.0% (70.0% to 80.0%) in 100 and 100 steps"
    assert mqar.entry(steady[:1]) == "80.0% in 100 steps"
    assert mqar.entry([]) == "-"


def test_published_recall_has_a_convolution_where_the_name_says_so():
    bare = {}
    for cell in BY_SYSTEM:
        with torch.device("meta"):
            weights = "".join(dict(cell.build().named_parameters()))
        bare[cell.name.split("-d")[0]] = "conv.weight" in weights
    assert bare["mamba2"]
    assert not bare["mamba2-no-conv"]


def test_a_table_tells_a_system_from_the_one_without_its_convolution():
    results = []
    for cell in BY_SYSTEM:
        evaluations = {mqar.LABEL: {"accuracy": 0.5 + 0.25 * ("no-conv" in cell.name)}}
        figures = {"evaluations": evaluations, "steps": 9, "curve": [[9, 1.0, 0.5]]}
        results.append(Result(cell.name, plain(cell), figures))
    lines = MQAR.table("published", results).splitlines()
    assert any(x.startswith("| Mamba-2 | 50.0% in 9 steps") for x in lines)
    assert any(x.startswith(f"| {title_of('mamba2-no-conv')} | 75.0% in 9 steps") for x in lines)


def test_a_short_run_is_better_than_any_letter(tmp_path):
    task = {"longest_word": 4, "most_words": 12}
    model = {"hidden_size": 32, "num_layers": 1, "head_k_dim": 16, "head_v_dim": 16}
    small = {"task": task, "epochs": 1, "model": model, "cell": {"watched_rows": 50}}
    cell = regbench.make_cell(merged(REGBENCH.forms["laptop"], small), "deltanet", 2_500)
    evaluation = replace(cell.evaluations[0], rows=50)
    figures = replace(cell, evaluations=(evaluation,)).run(tmp_path, CPU)
    score = figures["evaluations"][regbench.LABEL]
    assert score["accuracy"] > 2 * score["uniform"]
    assert len(figures["curve"]) >= 20


def test_published_state_tracking_is_that_of_the_papers_code():
    cells = TRACKING.cells("published")
    assert len(cells) == 36
    assert {(cell.rows, cell.loop.steps) for cell in cells} == {(1024, 100_000)}
    assert cells[0].task == "modular_arithmetic"


def test_a_layer_has_signs_where_its_name_says_so():
    kinds = {"deltanet01": DeltaNet, "deltanet11": DeltaNet, "mamba01": Mamba2}
    for cell in TRACKING.cells("laptop")[:4]:
        mixer = cell.build().blocks[0].mixer
        assert type(mixer) is kinds.get(cell.name.split("-")[1], SignedMamba2)


def test_causes_that_wait_for_a_gpu_change_one_thing():
    cells = {cell.name: plain(cell) for cell in CAUSES.cells("gpu")}
    assert len(cells) == 6
    for seed in range(3):
        one, other = (cells[f"text-{x}-gated_deltanet-seed{seed}"] for x in ("drawn", "spread"))
        apart = {name for name in one if one[name] != other[name]} - {"name"}
        within = {k: v for k, v in other["model"].items() if one["model"][k] != v}
        assert (apart, within) == ({"model"}, {"longest_horizon": one["length"]})


def test_a_setting_that_no_class_has_is_refused():
    wrong = merged(read_settings("groups")["laptop"], {"model": {"num_head": 4}})
    with pytest.raises(TypeError, match="num_head"):
        make_cell(wrong, "S_3", 2, 2.0, 0)
