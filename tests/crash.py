"""A training run that dies in the middle, as a crash would end it."""

from collections.abc import Callable

import pytest

from deltarule.train.loop import Trainer


class Stop(Exception):
    """What a test raises in the middle of a run."""


def crash_at(step: int, monkeypatch: pytest.MonkeyPatch, train: Callable[[], object]) -> None:
    """Train until so many steps are done; no handler of the library sees what comes then."""

    def die(trainer, metrics, progress, update=Trainer._step):
        if trainer.step == step:
            raise Stop
        update(trainer, metrics, progress)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", die)
        with pytest.raises(Stop):
            train()
