"""Figures of several systems are whole, in fixed looks, and survive what is missing."""

from deltarule.models import PATTERNS
from deltarule.nn import SYSTEMS
from deltarule.train.figures import save
from experiments import figures
from experiments.figures import INK, LOOKS, SYSTEM_LOOKS, Curve, Panel, draw_curves, looks_of


def test_panels_of_every_kind_are_drawn(tmp_path):
    path = tmp_path / "curves.png"
    seen = Curve.through("deltanet", {64: [0.4, 0.6], 128: [0.9, 1.0]})
    published = Curve("deltanet", {64: 1.0, 128: 1.0}, published=True)
    many, single = Curve("n = 1", {n: n + 1 for n in range(20)}), {3: [0.1, 0.9]}
    panels = [
        Panel([seen, published], "width", "accuracy", log_x=True, levels={"chance": 0.1}),
        Panel([seen], "task", "accuracy", ticks=("one", "two"), limits=(0, 1)),
        Panel([many], "x", "y", log_y=True, marks={"end": 9}),
        Panel([], "x", "y", log_x=True, ticks=()),
        Panel([Curve.through("gla", single)], "x", "y"),
    ]
    save(draw_curves(panels, title="All", columns=2), path)
    assert [file.name for file in tmp_path.iterdir()] == ["curves.png"]
    assert path.read_bytes().startswith(b"\x89PNG")


def test_labels_have_looks_of_their_own():
    labels = ["deltanet", "a", "b", "gla", "c", "lent"]
    given = [Curve(label, {}, look="kda" if label == "lent" else None) for label in labels]
    looks = looks_of(given)
    assert looks["deltanet"] == SYSTEM_LOOKS["deltanet"]
    assert looks["lent"] == SYSTEM_LOOKS["kda"]
    # Tones are for families of systems: a setting has none, and a second form is dotted.
    assert {looks[x].ink for x in "abc"} == {INK}
    both = looks_of([Curve("gla", {}), Curve("GLA, no convolution", {}, look="gla")])
    assert both["GLA, no convolution"] == SYSTEM_LOOKS["gla"]._replace(line=":")
    assert len(set(looks.values())) == len(labels)
    assert set(SYSTEM_LOOKS) <= {*SYSTEMS, *PATTERNS}
    one = looks_of([Curve("n = 2, [0, 1]", {}, look="n = 2"), Curve("n = 2", {})])
    assert {(look.mark, look.ink) for look in one.values()} == {("s", INK)}
    many = [Curve(str(i), {}) for i in range(3 * len(LOOKS))]
    assert len(looks_of(many)) == len(many)


def test_marks_tell_systems_apart_without_colour():
    looks = list(SYSTEM_LOOKS.values())
    assert len({look.mark for look in looks}) == len(looks)
    assert len(set(LOOKS)) == len(LOOKS)


def test_hollow_marks_are_explained_where_they_occur():
    looks = looks_of([Curve("gla", {})])
    labels = [entry.get_label() for entry in figures.legend_entries(looks, published=True)]
    assert labels == ["GLA", "ours", "published"]
    assert len(figures.legend_entries(looks, published=False)) == 1


def test_a_curve_goes_through_the_mean_of_seeds_within_their_range():
    curve = Curve.through("gla", {64: [0.5, 1.0], 128: [0.75]}, look="kda")
    assert curve.points == {64: 0.75, 128: 0.75}
    assert curve.ranges == [(0.5, 1.0), (0.75, 0.75)]
    assert (curve.look, curve.published) == ("kda", False)


def test_a_system_without_its_convolution_is_told_and_drawn_as_itself():
    assert figures.title_of("mamba2-no-conv") == "Mamba-2, no convolution"
    looks = looks_of([Curve("gla", {}), Curve("gla-no-conv", {})])
    assert looks["gla-no-conv"] == SYSTEM_LOOKS["gla"]._replace(line=":")
