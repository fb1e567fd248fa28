"""Figures of runs: of those that differ in their seed alone the mean, the range, and noise."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.experiment import Result

# Differences of means below so many of their standard errors are called noise.
STANDARD_ERRORS = 3.0


class Runs(NamedTuple):
    """One figure of the runs of one setting, in the order of their seeds."""

    values: Sequence[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def __str__(self) -> str:
        spread = "" if self.deviation is None else f" ± {self.deviation:.3f}"
        return f"{self.mean:.3f}{spread}"

    def each(self, format_spec: str) -> str:
        """Every seed's, such as "0.98, 1.00"; a dash for no run.

        Examples:
            >>> Runs([0.981, 1]).each(".2f"), Runs([]).each(".2f")
            ('0.98, 1.00', '-')
        """
        return ", ".join(format(value, format_spec) for value in self.values) or "-"


def first_evaluation(result: Result) -> dict[str, Any]:
    return next(iter(result.figures["evaluations"].values()))


def accuracy(result: Result) -> float:
    return float(first_evaluation(result)["accuracy"])


def told(row: Mapping[Any, float], column: Any, format_spec: str = "") -> str:
    """A figure of a row, such as a published one; a dash for none."""
    return format(row[column], format_spec) if column in row else "-"


def by_setting(results: Sequence[Result]) -> dict[str, list[Result]]:
    runs: dict[str, list[Result]] = {}
    for result in results:
        runs.setdefault(result.name.partition("-seed")[0], []).append(result)
    return runs


def figures_of(results: Sequence[Result], figure: Callable[[Result], float]) -> dict[str, Runs]:
    """One figure of every setting."""
    return {name: Runs([*map(figure, runs)]) for name, runs in by_setting(results).items()}


def on_noise(runs: Mapping[str, Runs]) -> str:
    r"""What may be read from an order: the least difference of two means that is no noise.

    .. math::
        3 \sqrt{2 \bar{s^2} / n}

    with the mean variance between seeds over all settings, and the fewest seeds n of one.

    Examples:
        >>> on_noise({"a": Runs([1.0, 1.2]), "b": Runs([3.0, 3.2])})[:28]
        'Differences below 0.424 bits'
    """
    deviations = [run.deviation for run in runs.values() if run.deviation is not None]
    if len(deviations) < len(runs) or not deviations:
        return "One seed each: the order of neighbours means nothing."
    variance = statistics.fmean(deviation**2 for deviation in deviations)
    fewest = min(len(run.values) for run in runs.values())
    least = STANDARD_ERRORS * math.sqrt(2 * variance / fewest)
    return (
        f"Differences below {least:.3f} bits per byte are noise: three standard errors of a "
        "difference, from the spread of the seeds of all rows together."
    )
