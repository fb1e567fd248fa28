"""The cells of the experiments are the papers' where they say so, and keep what forms promise."""

from dataclasses import replace

import pytest
import torch

from crash import crash_at
from deltarule.models import CausalLM, count_parameters
from deltarule.nn import DeltaNet, Mamba2
from deltarule.tasks import load_task, parity
from deltarule.tasks.mqar import Config
from experiments import mqar, niah, regbench, state_tracking
from experiments.experiment import Result, load_experiment, merged
from experiments.figures import title_of
from experiments.records import plain
from experiments.signed_mamba2 import SignedMamba2
from experiments.task_cell import TaskCell

CPU = torch.device("cpu")
ABLATION, CAUSES, GROUPS, MQAR, NIAH, REGBENCH, TRACKING = map(
    load_experiment,
    ("ablation", "causes", "groups", "mqar", "niah", "regbench", "state-tracking"),
)
BY_SYSTEM = [cell for cell in MQAR.cells("published") if "-d64-lr0.0001-" in cell.name]
both_forms = pytest.mark.parametrize("scale", ["laptop", "gpu"])


@both_forms
def test_variants_of_the_ablation_have_equal_parameters(scale):
    sizes = [count_parameters(cell.model) for cell in ABLATION.cells(scale)]
    assert max(sizes) < 1.01 * min(sizes)


def test_each_variant_is_another_layer():
    models = {cell.name: cell.model for cell in ABLATION.cells("gpu") if cell.loop.seed == 0}
    assert len({x.to_json() for x in models.values()}) == len(ABLATION.forms["gpu"]["variants"])
    head = models["gated-head-256-seed0"]
    assert (head.num_heads, head.head_k_dim, head.head_v_dim) == (1, 256, 256)
    with torch.device("meta"):
        mixer = CausalLM(models["gated-no-gate-seed0"]).blocks[0].mixer
        assert mixer.g_proj is None
        assert CausalLM(models["gated-no-conv-seed0"]).blocks[0].mixer.conv_size == 0


@pytest.mark.parametrize(("scale", "factor"), [("laptop", 16), ("gpu", 32)])
def test_models_are_read_far_past_the_length_of_training(scale, factor):
    for cell in load_experiment("extrapolation").cells(scale):
        assert cell.lengths == (cell.length, factor * cell.length)
        assert cell.rows * cell.length == (1024, 8192)[scale == "gpu"]


def trained(scale):
    return [cell for cell in GROUPS.cells(scale) if isinstance(cell, TaskCell)]


def test_groups_are_all_there_at_the_lengths_of_the_paper():
    cells = trained("gpu")
    assert {cell.training.group for cell in cells} == {"S_3", "S_4", "A_5", "S_5"}
    for cell in cells:
        assert (cell.training.length, cell.evaluations[0].config.length) == (128, 512)
        assert cell.model.layer_types == ("delta_product",)
        assert (cell.model.num_layers, cell.model.hidden_size) == (1, 128)
    writes = {cell.model.n_steps for cell in cells if cell.training.group == "S_5"}
    assert writes == {1, 2, 3, 4}


@both_forms
def test_names_say_what_a_cell_of_groups_is(scale):
    for cell in trained(scale):
        least = 1 - cell.model.beta_max
        group, writes = cell.training.group, cell.model.n_steps
        assert cell.name == f"{group}-n{writes}-from{least:g}-seed{cell.loop.seed}"


def test_exact_weights_are_run_on_long_rows(tmp_path):
    cell = next(c for c in GROUPS.cells("laptop") if c.name == "exact-A_5-rotations")
    assert cell.tokens == 20_000
    figures = replace(cell, tokens=500).run(tmp_path, CPU)
    assert figures["n_steps"] == 2
    assert figures["accuracy"] == 1.0
    assert figures["error"] < 1e-10


def test_recall_has_the_task_of_the_figure_and_6_of_its_64_epochs():
    cells = MQAR.cells("gpu")
    assert len(cells) == 7 * 2 * 2
    for cell in cells:
        assert cell.training == Config(length=512, pairs=64, vocab_size=8192)
        assert (cell.rows, cell.examples, cell.evaluations[0].rows) == (128, 100_000, 3000)
        assert (cell.model.num_layers, cell.model.mlp_size, cell.model.conv_size) == (2, 0, 0)
        assert cell.loop.steps == 6 * (100_000 // 128)
    sizes = {
        (cell.model.num_heads, cell.model.head_k_dim, cell.model.head_v_dim)
        for cell in cells
        if cell.model.hidden_size == 64 and cell.model.layer_types[0] != "attention"
    }
    assert sizes == {(2, 32, 32)}


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


def test_published_recall_has_the_figures_epochs_and_rates_and_the_usual_epsilon():
    cells = MQAR.cells("published")
    assert len(cells) == len({cell.name for cell in cells}) == 8 * 3 * 4
    assert {cell.loop.steps for cell in cells} == {64 * (100_000 // 128)}
    assert {cell.optimizer.lr for cell in cells} == {1e-4, 4.6e-4, 2.15e-3, 1e-2}
    assert {cell.model.norm_eps for cell in cells} == {1e-5}
    with torch.device("meta"):
        bare = {
            cell.name.split("-d")[0]: "conv.weight"
            in "".join(dict(cell.build().named_parameters()))
            for cell in BY_SYSTEM
        }
    assert bare["mamba2"]
    assert not bare["mamba2-no-conv"]
    assert next(c for c in BY_SYSTEM if c.name.startswith("retnet")).model.num_heads == 8


def test_a_table_tells_a_system_from_the_one_without_its_convolution():
    results = []
    for cell in BY_SYSTEM:
        evaluations = {mqar.LABEL: {"accuracy": 0.5 + 0.25 * ("no-conv" in cell.name)}}
        figures = {"evaluations": evaluations, "steps": 9, "curve": [[9, 1.0, 0.5]]}
        results.append(Result(cell.name, plain(cell), figures))
    lines = mqar.table(MQAR.forms["published"], results).splitlines()
    assert any(x.startswith("| Mamba-2 | 50.0% in 9 steps") for x in lines)
    assert any(x.startswith(f"| {title_of('mamba2-no-conv')} | 75.0% in 9 steps") for x in lines)


def test_needles_are_all_there_at_the_lengths_of_the_paper():
    for cell in NIAH.cells("gpu"):
        configs = [one.config for one in cell.evaluations]
        assert {(c.haystack, c.value) for c in configs} == set(niah.NEEDLES.values())
        assert {c.length for c in configs} == {1024, 2048, 4096, 8192}
        assert {one.rows for one in cell.evaluations} == {500}
        assert all(c.instructions for c in configs)


@both_forms
def test_needles_of_the_test_lie_in_other_prose_and_states_are_of_one_size(scale):
    cells = NIAH.cells(scale)
    for cell in cells:
        assert cell.training.split == "training"
        assert {one.config.split for one in cell.evaluations} == {"validation"}
    sizes = {
        tuple(tuple(state["recurrent"].shape) for state in cell.build().init_state(1))
        for cell in cells
    }
    heads = NIAH.forms[scale]["model"]["num_heads"]
    assert sizes == {((1, heads, 64, 64), (1, heads, 64, 64))}


def test_a_run_that_starts_by_the_papers_draw_differs_in_nothing_else():
    cells = {cell.name: cell for cell in NIAH.cells("gpu")}
    spread, drawn = cells["mamba2-seed1"], cells["mamba2-drawn-seed1"]
    assert (spread.model.longest_horizon, drawn.model.longest_horizon) == (1024, None)
    model = replace(drawn.model, longest_horizon=1024)
    assert replace(drawn, name=spread.name, model=model) == spread
    assert {cell.model.longest_horizon for cell in NIAH.cells("laptop")} == {None}


@both_forms
def test_names_say_what_has_a_convolution(scale):
    for cell in REGBENCH.cells(scale):
        bare = cell.model.layer_types[0] == "attention" or "no-conv" in cell.name
        assert (cell.model.conv_size == 0) == bare
        # Whole epochs of the rows that fill a batch.
        assert cell.loop.steps % (cell.examples // cell.rows) == 0


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


def test_state_tracking_is_the_setting_of_the_paper():
    cells = TRACKING.cells("gpu")
    assert len(cells) == 3 * 4 * 3
    for cell in cells:
        config = load_task(cell.task).Config
        assert cell.training == config(3, 40)
        assert cell.evaluations[0].config == config(40, 256)
        assert cell.evaluations[0].rows == 8192
        assert cell.model.num_layers == (2 if cell.task == "parity" else 3)
        assert (cell.model.hidden_size, cell.model.num_heads, cell.model.conv_size) == (128, 4, 4)
        assert cell.optimizer.weight_decay == (0.0 if cell.task == "parity" else 0.1)
        assert (cell.rows, cell.loop.steps) == (256, 6000)
    published = TRACKING.cells("published")
    assert len(published) == 36
    assert {(cell.rows, cell.loop.steps) for cell in published} == {(1024, 100_000)}
    assert published[0].task == "modular_arithmetic"


def test_the_range_of_eigenvalues_is_the_only_difference():
    cells = {cell.name: cell for cell in TRACKING.cells("laptop")}
    for layer, positive, signed in (("deltanet", 1.0, 2.0), ("mamba", None, None)):
        first, second = (cells[f"parity-{layer}{kind}-seed0"] for kind in ("01", "11"))
        assert first.model.beta_max == positive
        assert second.model.beta_max == signed
        assert replace(first.model, beta_max=None) == replace(second.model, beta_max=None)
        assert second.signed == (layer == "mamba")


def test_parity_on_a_laptop_asks_after_every_bit_of_the_layer_that_it_names():
    cells = TRACKING.cells("laptop")
    assert {cell.training for cell in cells} == {parity.Config(33, 33, every_position=True)}
    kinds = {"deltanet01": DeltaNet, "deltanet11": DeltaNet, "mamba01": Mamba2}
    for cell in cells[:4]:
        mixer = cell.build().blocks[0].mixer
        assert type(mixer) is kinds.get(cell.name.split("-")[1], SignedMamba2)


@pytest.mark.parametrize(
    ("scale", "accuracy", "scaled"), [("laptop", 0.5, 0), ("laptop", 0.75, 0.5), ("gpu", 0.2, 0)]
)
def test_accuracy_is_scaled_by_chance(scale, accuracy, scaled):
    cell = TRACKING.cells(scale)[0]
    figures = {"evaluations": {"length 32": {"accuracy": accuracy}}}
    result = Result(cell.name, plain(cell), figures)
    assert state_tracking.scaled(result, "length 32") == pytest.approx(scaled)


@pytest.mark.parametrize(
    "cell", [BY_SYSTEM[0], BY_SYSTEM[3], TRACKING.cells("published")[1]], ids=lambda cell: cell.name
)
def test_a_published_cell_starts_and_goes_on_to_the_same_figures(cell, tmp_path, monkeypatch):
    watched = cell.evaluations[0]
    if cell.task == "mqar":
        config = replace(cell.training, length=32, pairs=4, vocab_size=64)
    else:
        config = replace(cell.training, longest=8)
    short = replace(
        cell,
        training=config,
        rows=4,
        watched_rows=4,
        examples=cell.examples and 16,
        evaluations=(replace(watched, config=config, rows=8),),
        model=replace(cell.model, hidden_size=32, head_k_dim=None, head_v_dim=None),
        loop=replace(cell.loop, steps=4, evaluate_every=2, save_every=1),
    )
    straight = short.run(tmp_path / "straight", CPU)
    crash_at(2, monkeypatch, lambda: short.run(tmp_path / "stopped", CPU))
    resumed = short.run(tmp_path / "stopped", CPU)
    assert straight | {"training_seconds": 0} == resumed | {"training_seconds": 0}


def apart(one, other):
    """The settings that tell two cells apart, with those of the second."""
    one, other = plain(one), plain(other)
    differ = {name for name in one if one[name] != other[name]} - {"name", "model"}
    within = {k: v for k, v in other["model"].items() if one["model"][k] != v}
    return differ, within


def test_causes_change_one_thing_each():
    cells = {cell.name: cell for cell in CAUSES.cells("laptop")}
    assert len(cells) == 25
    for cell in MQAR.cells("laptop"):
        if cell.model.hidden_size == 64:
            found = apart(cell, cells[f"recall-epsilon-{cell.name}"])
            assert found == (set(), {"norm_eps": 1e-5})
    (plain_mamba,) = (c for c in MQAR.cells("laptop") if c.name.startswith("mamba2-d64"))
    found = apart(plain_mamba, cells[f"recall-convolution-{plain_mamba.name}"])
    assert found == (set(), {"conv_size": 4})
    drawn, spread = (cells[f"needles-{x}-gated_deltanet-seed1"] for x in ("drawn", "spread"))
    assert apart(drawn, spread) == (set(), {"longest_horizon": 256})
    large = {cell.name: cell for cell in CAUSES.cells("gpu")}
    assert len(large) == 6
    for found in (cells, large):
        drawn, spread = (found[f"text-{x}-gated_deltanet-seed1"] for x in ("drawn", "spread"))
        assert apart(drawn, spread) == (set(), {"longest_horizon": drawn.length})
    longest = cells["arithmetic-steps16k-modular_arithmetic-deltanet11-seed0"]
    for change in ("steps1k", "steps4k"):
        shorter = cells[f"arithmetic-{change}-modular_arithmetic-deltanet11-seed0"]
        assert apart(longest, shorter) == ({"loop"}, {})
