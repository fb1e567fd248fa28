"""The accuracy of one cell in training, as a curve of a figure."""

from experiments.experiment import Result
from experiments.figures import Curve


def training_curve(label: str, result: Result, *, look: str | None = None) -> Curve:
    """Watched accuracy against steps.

    Args:
        label: Of the curve.
        result: Of a `TaskCell` that did not fail.
        look: The system that it is drawn as; None goes by the label.

    Examples:
        >>> result = Result("a", {}, {"curve": [[100, 2.5, 0.25], [200, 1.5, 0.75]]}, None, 9.0)
        >>> training_curve("deltanet", result).y
        [0.25, 0.75]
    """
    points = result.figures["curve"]
    steps, accuracies = [step for step, _, _ in points], [right for _, _, right in points]
    return Curve(label, steps, accuracies, look=look)
