"""A training step as one call: forward, backward, clipping, optimizer; on a GPU as a CUDA graph.

    g = mean_parts d loss / d w        g <- g min(1, clip / |g|)        w <- optimizer(w, g)

A step whose loss or gradient is not finite leaves weights and optimizer as they are, and the device
decides that alone: the host waits for nothing.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule.nn.linears import MOVES
from deltarule.ops.dispatch import is_plain_eager
from deltarule.ops.runtime.capture import capturing
from deltarule.train.optimizer import EPSILON, gradient_norm
from deltarule.train.spread import Spread

Part = Sequence[Tensor]
# Steps of one kind before its capture: kernels are compiled and libraries take their memory.
WARM_UP = 3
# Graphs that are kept, those that were replayed last: lengths that grow leave others behind.
MOST = 8


class Captured(NamedTuple):
    """A graph, what it reads and what it reports."""

    graph: torch.cuda.CUDAGraph
    parts: list[list[Tensor]]
    report: Tensor


class TrainingStep:
    """One optimizer step on one or more parts of a batch.

    On a GPU the first steps of each kind (number of parts, shapes and dtypes) run eagerly; then one
    is captured, and every further one copies its tensors and replays the graph. The results are
    those of eager steps, bit for bit. On a CPU all steps are eager.

    Args:
        loss: A function of the tensors of a part that returns the loss to minimise, a scalar, or a
            vector of it and of figures to report. It must not read anything else that changes.
        optimizer: Fused (`fused=True`), and `capturable=True` where graphs are used. With a tensor
            for its rate, `set_rate` changes it between steps.
        clip: Largest norm of the gradient. 0 never clips.
        cuda_graphs: Capture on a GPU. False runs every step eagerly.
        spread: Where the model is on several processes, whose parts of the batch make one step. All
            steps are then eager: collectives of a process that hangs must be able to time out.

    Raises:
        ValueError: The optimizer is not fused, or cannot be captured.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
        >>> step = TrainingStep(lambda x: (weight * x).square().sum(), optimizer)
        >>> loss, norm = step([torch.tensor([3.0, 4.0])]).tolist()
        >>> loss
        25.0
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        clip: float = 0.0,
        cuda_graphs: bool = True,
        spread: Spread | None = None,
    ) -> None:
        self.loss, self.optimizer, self.clip = loss, optimizer, clip
        self.spread = None if spread is None or spread.plan is None else spread
        groups = optimizer.param_groups
        self.parameters: list[Tensor] = [p for group in groups for p in group["params"]]
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ValueError(
                "optimizer must have fused=True, which skips steps whose gradient is not finite, "
                f"got {type(optimizer).__name__} without it"
            )
        self.graphs = cuda_graphs and self.spread is None and self.parameters[0].is_cuda
        if self.graphs and not all(group.get("capturable", True) for group in groups):
            raise ValueError(
                "optimizer must be capturable for CUDA graphs, got capturable=False: give it "
                "capturable=True, or TrainingStep cuda_graphs=False"
            )
        self.seen: dict[object, int] = {}
        self.captured: dict[object, Captured] = {}
        # Its type has no public name.
        self.pool: Any = None

    def __call__(self, *parts: Part) -> Tensor:
        """Take one step.

        Args:
            parts: The tensors of each part of the batch, as `loss` takes them.

        Returns:
            The means over the parts on the device: loss, norm of the gradient before clipping, and
            the figures.
        """
        if not self.graphs or not is_plain_eager():
            return self.eager(parts)
        # A graph knows addresses: parameters that were moved since need another, and so do those
        # that the optimizer does not know of.
        places = MOVES[0], *[parameter.data_ptr() for parameter in self.parameters]
        key = places, tuple(tuple((x.shape, x.dtype) for x in part) for part in parts)
        if (known := self.captured.pop(key, None)) is None:
            if (seen := self.seen.pop(key, 0)) < WARM_UP:
                self.seen[key] = seen + 1
                return self.aside(parts)
            known = self.capture(parts)
            if len(self.captured) >= MOST:
                del self.captured[next(iter(self.captured))]
        self.captured[key] = known
        for mine, given in zip(chain(*known.parts), chain(*parts), strict=True):
            mine.copy_(given, non_blocking=True)
        known.graph.replay()
        return known.report.clone()

    def eager(self, parts: Sequence[Part]) -> Tensor:
        total, spread = None, self.spread
        count = len(parts) if spread is None else spread.count
        for part in parts:
            if spread is not None:
                spread.before_backward(part is parts[-1])
            figures = self.loss(*part).reshape(-1)
            torch.autograd.backward(figures[0] / count)
            share = figures.detach() / count
            total = share if total is None else total + share
        assert total is not None
        if spread is None:
            norm = gradient_norm(self.parameters)
        else:
            total, norm = spread.summed(total)
        # The optimizer divides the gradient in the pass that reads it anyway. A tensor of one axis
        # would have to be spread over a mesh, too.
        divisor = ((norm + EPSILON) / self.clip).clamp(min=1).float() if self.clip > 0 else None
        found = torch.cat([total[:1], norm.reshape(1), total[1:]])
        self.update((~found[:2].isfinite().all()).float(), divisor)
        return found

    def update(self, skipped: Tensor, divisor: Tensor | None) -> None:
        """Move the weights unless `skipped` is 1, as a scaler of 16-bit gradients asks for it."""
        optimizer: torch.optim.Optimizer = self.optimizer
        optimizer.grad_scale, optimizer.found_inf = divisor, skipped  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        optimizer.zero_grad(set_to_none=True)

    def aside(self, parts: Sequence[Part]) -> Tensor:
        """An eager step off the stream of other work, as one before a capture has to be."""
        device = self.parameters[0].device
        here, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            report = self.eager(parts)
        here.wait_stream(side)
        report.record_stream(here)
        return report

    def capture(self, parts: Sequence[Part]) -> Captured:
        """Record a step on copies of the parts; nothing is computed."""
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        mine = [[x.clone() for x in part] for part in parts]
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self.pool):
            report = self.eager(mine)
        return Captured(graph, mine, report)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group of an optimizer a learning rate, in place where it is a tensor.

    Examples:
        >>> rate = torch.tensor(0.1)
        >>> optimizer = torch.optim.AdamW([torch.ones(2)], lr=rate, fused=True, capturable=True)
        >>> set_rate(optimizer, 0.5)
        >>> optimizer.param_groups[0]["lr"]
        tensor(0.5000)
    """
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
