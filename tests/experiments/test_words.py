"""Words and settings are read as they are written."""

import pytest

from experiments.experiment import figures, merged, read_settings, read_words

TEXT = """# A title

What a reader sees, in
two lines.

From a paper (2030),
figure 1.

- laptop: a minute: or
  two
- published: hours

## Remark

Said below
the table.

## Published

Read off the figure.

| | 64 | far |
|---|---|---|
| gla | 0.22 | - |

## Differences: laptop

- One.

## Differences: laptop, published

- Both: of
  them.

## Differences: published

- Hours.
"""


def test_every_part_of_the_words_is_read(tmp_path):
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "x.md").write_text(TEXT)
    read = read_words("x", tmp_path)
    assert (read.title, read.shows) == ("A title", "What a reader sees, in two lines.")
    assert read.source == "a paper (2030), figure 1"
    assert read.needs == {"laptop": "a minute: or two", "published": "hours"}
    assert read.deviations == {
        "laptop": ["One.", "Both: of them."],
        "published": ["Both: of them.", "Hours."],
    }
    assert read.remark == "Said below the table."
    assert read.published == {"gla": {64: 0.22}}
    assert figures("") == {}


def test_a_form_has_what_holds_for_all_unless_it_says_otherwise():
    forms = read_settings("mqar")
    assert list(forms) == ["laptop", "gpu", "published"]
    assert forms["published"]["model"] == {"num_layers": 2, "mlp_size": 0, "norm_eps": 1e-5}
    assert forms["gpu"]["model"]["norm_eps"] == 1e-2
    common, own = {"a": {"b": 1, "c": 2}, "d": [1, 2]}, {"a": {"b": 3}, "d": [4]}
    assert merged(common, own) == {"a": {"b": 3, "c": 2}, "d": [4]}


def test_a_setting_that_no_class_has_is_refused():
    from experiments.groups import make_cell

    wrong = merged(read_settings("groups")["laptop"], {"model": {"num_head": 4}})
    with pytest.raises(TypeError, match="num_head"):
        make_cell(wrong, "S_3", 2, 2.0, 0)
