"""Figures of several systems are whole, in fixed looks, and survive what is missing."""

from deltarule.models import PATTERNS
from deltarule.nn import SYSTEMS
from experiments import figures
from experiments.figures import INK, LOOKS, SYSTEM_LOOKS, Curve, looks_of


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
    bare = looks_of([Curve("gla", {}), Curve("gla-no-conv", {})])
    assert bare["gla-no-conv"] == SYSTEM_LOOKS["gla"]._replace(line=":")
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
