"""The formal languages draw lengths alike, and refuse the same."""

import pytest

from deltarule.tasks import bracket_arithmetic, modular_arithmetic, parity


@pytest.mark.parametrize("task", [bracket_arithmetic, modular_arithmetic, parity])
@pytest.mark.parametrize(("lengths", "name"), [((2, 40), "shortest"), ((9, 8), "longest")])
def test_lengths_that_hold_no_question_are_refused(task, lengths, name):
    with pytest.raises(ValueError, match=f"^{name} must"):
        task.Config(*lengths)


def test_an_expression_needs_five_places():
    with pytest.raises(ValueError, match="longest must be 5 or more, got 4"):
        bracket_arithmetic.Config(3, 4)
