"""Steps whose gates come as logits, and the same steps with the gates made first, in float64."""

from typing import NamedTuple

import torch
from torch import Tensor

from deltarule import BetaLogits, DecayLogits, RecurrentOutput, recurrent_step
from oracle import Case, make_case, on


class Logits(NamedTuple):
    """A call whose own gates are replaced by what these logits make of it."""

    case: Case
    beta: BetaLogits
    decay: DecayLogits

    def step(self, state: Tensor, **options: object) -> Tensor:
        """The step with the logits."""
        return self.call(state, self.beta, self.decay, **options)

    def call(self, state: Tensor, beta: object, log_decay: object, **options: object) -> Tensor:
        """The step with any gates."""
        x = self.case.tensors
        return recurrent_step(
            x["q"], x["k"], x["v"], beta=beta, log_decay=log_decay, n_steps=self.case.n_steps,
            normalize_qk=self.case.normalize_qk, state=state, **options,
        )  # fmt: skip

    def exact(self) -> RecurrentOutput:
        """The definition in float64."""
        beta, log_decay = self.gates()
        case = on("cpu", self.case.to(torch.float64))
        return case.changed(beta=beta.cpu(), log_decay=log_decay.cpu()).run("reference")

    def gates(self) -> tuple[Tensor, Tensor]:
        """Both gates in float64, written out."""
        logits, A_log, dt_bias = (x.double() for x in self.decay[:3])
        x, bound = logits + dt_bias, self.decay.lower_bound
        rate = A_log.exp().reshape(-1, *[1] * (x.ndim - 3))
        log_decay = -rate * torch.logaddexp(x, torch.zeros_like(x))
        log_decay = log_decay if bound is None else bound / (1 + (-rate * x).exp())
        return self.beta.beta_max / (1 + (-self.beta.logits.double()).exp()), log_decay

    def state(self) -> Tensor:
        """The state before, to be overwritten."""
        return self.case.tensors["initial_state"].clone()

    def to(self, device: str) -> "Logits":
        """The same on another device."""
        beta = self.beta._replace(logits=self.beta.logits.to(device))
        return Logits(
            on(device, self.case), beta,
            DecayLogits(*(x.to(device) for x in self.decay[:3]), self.decay.lower_bound),
        )  # fmt: skip


def make_logits(
    decay: str = "head", n_steps: int = 1, dtype: torch.dtype = torch.float32, *,
    strided: bool = False, tokens: int = 2, **sizes: int,
) -> Logits:  # fmt: skip
    """Draw logits in the dtype of q, from a wider projection if strided; parameters in float32."""
    case = make_case(decay, "tied", n_steps=n_steps, tokens=tokens, normalize_qk=True, **sizes)
    full = torch.promote_types(dtype, torch.float32)
    shapes = case.tensors["beta"].shape, case.tensors["log_decay"].shape
    beta, logits = (2 * torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)
    if strided:
        beta, logits = (
            torch.stack([x, torch.full_like(x, torch.nan)], -1).transpose(0, 1).contiguous()
            .transpose(0, 1)[..., 0] for x in (beta, logits)
        )  # fmt: skip
    A_log, dt_bias = (torch.randn(shapes[1][2:3]), torch.randn(shapes[1][2:]))
    parameters = (x.to(full) for x in (A_log, dt_bias))
    return Logits(case.to(dtype), BetaLogits(beta, 1.5), DecayLogits(logits, *parameters))
