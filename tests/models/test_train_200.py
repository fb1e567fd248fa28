"""Every mixer learns text: 200 steps of `deltarule train text`, run by `pytest -m slow`."""

import json
import math
from pathlib import Path

import pytest

from deltarule.nn import MIXERS
from models.train_200 import STEPS, train, train_all

# Of the first loss, which is that of a model that knows nothing.
LEARNED = 0.6


@pytest.mark.slow
def test_200_steps_lower_the_loss_of_every_mixer():
    rows = list(train_all(list(MIXERS)))
    assert [row["name"] for row in rows] == list(MIXERS)
    for row in rows:
        assert "error" not in row, row
        assert row["steps"] == STEPS
        assert math.isfinite(row["last_loss"])
        assert row["last_loss"] < LEARNED * row["first_loss"], row


def test_the_figures_that_are_kept_are_of_every_mixer():
    docs = Path(__file__).parents[2] / "docs"
    rows = json.loads((docs / "figures" / "train_200.json").read_text())
    assert sorted(row["name"] for row in rows) == sorted(MIXERS)
    assert all(row["steps"] == STEPS for row in rows)
    assert all(row["last_loss"] < LEARNED * row["first_loss"] for row in rows)
    first, last = ([row[name] for row in rows] for name in ("first_loss", "last_loss"))
    page = " ".join((docs / "training.md").read_text().split())
    assert f"{min(first):.1f} to {max(first):.1f} nats per byte" in page
    for end in (min, max):
        assert f"{end(last):.2f} (" in page


def test_a_row_says_what_the_losses_did_or_that_it_failed(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} bottles of beer on the wall\n" for i in range(400)))
    row = train("linear_attention", steps=12, data=str(text))
    assert (row["name"], row["steps"]) == ("linear_attention", 12)
    assert row["last_loss"] < row["first_loss"]
    assert row["parameters"] > 100_000
    assert row["seconds"] > 0
    row = train("linear_attention", steps=1, data=str(tmp_path / "missing"))
    assert row["error"].startswith("DataError")
