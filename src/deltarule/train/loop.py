"""The training loop: steps drive everything, time only stops it early, nothing done is lost."""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor

from deltarule.errors import INTERRUPTED, DivergedError, StoppedRunError
from deltarule.json_file import fitted
from deltarule.models import CausalLM, compile_blocks
from deltarule.models.decoder import as_written
from deltarule.models.files import naming
from deltarule.models.late import Late
from deltarule.parallel import World
from deltarule.train import checkpoint
from deltarule.train.device import choose_device
from deltarule.train.job import Job
from deltarule.train.job import LoopOptions as LoopOptions
from deltarule.train.metrics import Best, Metrics, Sink
from deltarule.train.optimizer import OptimizerOptions, learning_rate, make_optimizer
from deltarule.train.progress import Progress, make_progress
from deltarule.train.run_folder import DIVERGED
from deltarule.train.spread import Spread
from deltarule.train.step import TrainingStep, set_rate

# Windows has no hangup.
HANGUP = getattr(signal, "SIGHUP", signal.SIGTERM)


class Interrupt:
    """While open, the first SIGINT, SIGTERM or SIGHUP sets `requested`, and SIGTERM also
    `terminated`; the second acts at once.
    """

    def __init__(self) -> None:
        self.requested = self.terminated = False
        self._before: dict[int, Any] = {}
        streams = (stream for stream in (sys.stdout, sys.stderr) if stream.isatty())
        self._screens = [stream.fileno() for stream in streams]

    def __enter__(self) -> Self:
        """Take over the signals; only the main thread may, elsewhere nothing changes."""
        if threading.current_thread() is threading.main_thread():
            for number in {signal.SIGINT, signal.SIGTERM, HANGUP}:
                # What nohup has set to be ignored stays so.
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _request(self, number: int, frame: FrameType | None) -> None:
        if number == HANGUP != signal.SIGTERM:
            # To print on a terminal that is gone would fail before all is saved.
            for screen in self._screens:
                os.dup2(os.open(os.devnull, os.O_WRONLY), screen)
        elif self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self.terminated = self.terminated or number == signal.SIGTERM


class InterruptedRunError(StoppedRunError):
    """Ctrl-C, SIGTERM or SIGHUP stopped the run in `folder`; what it had done is saved."""

    def __init__(self, step: int, folder: Path, *, terminated: bool = False) -> None:
        """Name the step and the folder; terminated: a scheduler asked, and all is in order."""
        code = 0 if terminated else INTERRUPTED
        super().__init__(f"stopped after step {step:,}, which is saved in {folder}", folder, code)
        self.terminated = terminated


@dataclass(frozen=True)
class Saved:
    """What a checkpoint's state.json holds."""

    position: dict[str, int]
    random: dict[str, Any]
    seconds: float
    stopped: bool = False
    best: Best = field(default_factory=Best)


class Trainer:
    """One run in one folder: model, job, optimizer, checkpoints and metrics.

    `stop_when` is given what the job's `evaluate` returned, and ends training when it says so.
    `patience` ends it after so many short evaluations in a row that were no better than the best,
    whose checkpoint is kept; 0 does neither. A checkpoint is written, too, when `save_seconds` have
    passed since the last. What `max_seconds` counts began at `began`, by `time.monotonic`, or when
    training does; `reserve` says, given the seconds of a step, how many to leave for what follows.
    `also` takes the metrics, too. Of several processes each is given the same arguments; without a
    `world` there are as many as torchrun has started.
    """

    def __init__(
        self,
        model: CausalLM,
        job: Job,
        *,
        options: LoopOptions,
        optimizer_options: OptimizerOptions,
        folder: Path,
        resume: bool = False,
        stop_when: Callable[[dict[str, float]], bool] | None = None,
        patience: int = 0,
        save_seconds: float = math.inf,
        began: float | None = None,
        reserve: Callable[[float], float] | None = None,
        also: Sequence[Sink] = (),
        world: World | None = None,
    ) -> None:
        self.world = World(choose_device(options.device)) if world is None else world
        self.device = self.world.device
        self.model, self.job, self.options = model.to(self.device), job, options
        self.optimizer_options = optimizer_options
        model.activation_checkpointing = options.activation_checkpointing
        low, count = options.dtype == "bfloat16", options.accumulate
        tokens = job.batch_tokens // count
        self.spread = Spread(model, self.world, bfloat16=low, count=count, tokens=tokens)
        self.optimizer = make_optimizer(model, optimizer_options)
        if options.compile:
            compile_blocks(model)
        self.checkpoints = self.spread.checkpoints(folder / "checkpoints", options.keep)
        self.folder, self.stop_when, self.stopped = folder, stop_when, False
        self.step, self.saved, self.seconds = 0, -1, 0.0
        # A running mean over about twenty steps, and over how many it is.
        self.speed, self.speeds = 0.0, 0
        self.save_seconds, self.saved_at = save_seconds, time.monotonic()
        self.patience, self.best = patience, Best()
        self.began, self.reserve, self.also = began, reserve, also
        if resume:
            self.restore()
        self.update = TrainingStep(
            self._loss, self.optimizer, clip=optimizer_options.clip,
            cuda_graphs=options.cuda_graphs, spread=self.spread,
        )  # fmt: skip
        # What the last step told, on its way to the host: step, when it began, rate and tokens.
        self.unread: tuple[int, float, float, int, Late] | None = None
        # Seconds of the fastest step: the first ones wait for much else.
        self.fastest = math.inf
        self.read_at = 0.0

    def restore(self) -> None:
        """Take everything that the next step depends on from the newest complete checkpoint."""
        newest = self.checkpoints.newest()
        if newest is None:
            return
        wanted = checkpoint.weights_and_moments(self.model, self.optimizer)
        self.checkpoints.fill(newest.folder, wanted)
        for moments in self.optimizer.state.values():
            moments["step"].fill_(newest.step)
        with naming(newest.folder / checkpoint.STATE):
            saved: Saved = fitted(Saved, newest.state)
            self.job.seek(saved.position)
            checkpoint.restore_random_state(saved.random)
        self.step = self.saved = newest.step
        self.seconds, self.stopped, self.best = saved.seconds, saved.stopped, saved.best
        self.checkpoints.spared = self.best.step if self.patience else 0

    def save(self) -> None:
        if self.saved == self.step:
            return
        position = self.job.position()
        saved = Saved(position, checkpoint.random_state(), self.seconds, self.stopped, self.best)
        tensors = checkpoint.weights_and_moments(self.model, self.optimizer)
        self.checkpoints.save(self.step, tensors, asdict(saved))
        self.saved, self.saved_at = self.step, time.monotonic()

    def run(self) -> bool:
        """Train to the last step or until `stop_when` is content; False if the time was over first.

        A checkpoint of the last step is written before an `InterruptedRunError` of Ctrl-C or
        SIGTERM. A loss or gradient that is not finite is a `DivergedError`.
        """
        began, before = time.monotonic(), self.seconds
        path = self.folder / "metrics.jsonl"
        quiet = not self.world.first
        progress = make_progress(self.options.steps, first=self.step, quiet=quiet)
        if self.options.compile:
            progress.note("compiling the model: the first step takes a minute or more")
        metrics_file, stop = Metrics(path, after=self.step, quiet=quiet, also=self.also), False
        with metrics_file as metrics, Interrupt() as interrupt, progress:
            while not self.complete:
                with self.world.attended(self.step):
                    self._step(metrics, progress)
                    self.seconds = before + time.monotonic() - began
                    late = time.monotonic() - self.saved_at >= self.save_seconds
                    over = self._is_over(began)
                    stop, terminated, over, late = self.world.agree(
                        interrupt.requested, interrupt.terminated, over, late
                    )
                if over and not stop:
                    seconds = self.options.max_seconds
                    progress.note(f"--max-seconds {seconds:g}: training ends at step {self.step:,}")
                if over or stop:
                    break
                if late or self.step % self.options.save_every == 0:
                    self._read(metrics, progress)
                    self.save()
            self._read(metrics, progress)
            self.save()
            self.checkpoints.wait()
        if stop:
            raise InterruptedRunError(self.step, self.folder, terminated=terminated)
        return self.complete

    def _is_over(self, began: float) -> bool:
        """Whether what follows training needs the time that is left, at most half of all."""
        limit = self.options.max_seconds
        if limit is None:
            return False
        needed = 0.0 if self.reserve is None else min(self.reserve(self.fastest), limit / 2)
        passed = time.monotonic() - (began if self.began is None else self.began)
        return passed + needed >= limit

    @property
    def complete(self) -> bool:
        impatient = 0 < self.patience <= self.best.waited
        return self.stopped or impatient or self.step >= self.options.steps

    def take_best(self) -> int:
        """Take the weights of the best evaluation, where they were kept; return their step."""
        if self.patience and self.best.step not in (0, self.step):
            best = self.checkpoints.folder / f"step-{self.best.step}"
            self.checkpoints.read(best, optimizer=False)
            self.checkpoints.fill(best, dict(self.model.state_dict()))
            return self.best.step
        return self.step

    def _step(self, metrics: Metrics, progress: Progress) -> None:
        began = time.monotonic()
        rate = learning_rate(self.step, self.options.steps, self.optimizer_options)
        set_rate(self.optimizer, rate)
        # Every process goes through all rows and takes its own: the data never depend on them.
        batches = [self.job.next() for _ in range(self.options.accumulate)]
        parts = [self.job.tensors(batches[row], self.device) for row in self.spread.rows]
        figures = Late(self.update(*parts))
        self.step += 1
        # The step before is read while the GPU is at this one, so that it never waits.
        self._read(metrics, progress)
        self.unread = self.step, began, rate, self.job.batch_tokens, figures
        every = self.options.evaluate_every
        evaluated = every and (self.step % every == 0 or self.step == self.options.steps)
        if evaluated or self.device.type == "cpu":
            self._read(metrics, progress)
        if evaluated:
            # Sharded weights come in bfloat16: autocast alone multiplies them with the stream.
            with evaluating(self.model), self.spread.autocast:
                measured = self.job.evaluate(self.model)
            metrics.write({"step": self.step, **measured})
            self.stopped = self.stop_when is not None and self.stop_when(measured)
            self.best = self.best.after(self.step, measured)
            if self.patience and self.best.step == self.step:
                self.checkpoints.spared = self.step
                self.save()

    def _read(self, metrics: Metrics, progress: Progress) -> None:
        """Wait for the figures of a step that was not read yet, and write them down."""
        if self.unread is None:
            return
        (step, began, rate, tokens, late), self.unread = self.unread, None
        loss, norm, *figures = late.tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            what = "gradient" if math.isfinite(loss) else "loss"
            steps = self.checkpoints.steps()
            last = f"the last good checkpoint is step-{steps[-1]}" if steps else "no checkpoint yet"
            reason = (
                f"the {what} is not finite at step {step} (loss {loss}); {last}; "
                "start again under another --name, with a lower --lr or a longer --warmup-steps"
            )
            if self.spread.plan is not None and self.world.first:
                (self.folder / DIVERGED).write_text(reason)
            raise DivergedError(reason)
        seconds = time.monotonic() - max(began, self.read_at)
        self.read_at, speed = time.monotonic(), tokens / seconds
        self.fastest = min(self.fastest, seconds)
        self.speeds = min(self.speeds + 1, 20)
        self.speed += (speed - self.speed) / self.speeds
        shown = {"loss": loss, **self.job.shown(figures), "tokens/s": self.speed}
        row = {"step": step, **shown, "lr": rate, "gradient_norm": norm}
        row["seconds"] = round(self.seconds, 3)
        progress.update(step, {name: _brief(value) for name, value in shown.items()})
        metrics.write({key.replace("/", "_per_").replace(" ", "_"): v for key, v in row.items()})

    def _loss(self, *tensors: Tensor) -> Tensor:
        bfloat16 = self.options.dtype == "bfloat16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=bfloat16):
            loss, figures = self.job.loss(self.model, *tensors)
        return torch.cat([loss.reshape(1), figures.detach().reshape(-1)])


@contextlib.contextmanager
def evaluating(model: CausalLM) -> Iterator[None]:
    """Within it, the model is in evaluation mode and keeps nothing for a backward pass."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), as_written(model):
            yield
    finally:
        model.train(training)


def _brief(value: float) -> str:
    # One digit behind the point where three would read like thousands.
    decimals = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 3
    return f"{value:,.{decimals}f}"
