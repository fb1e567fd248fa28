"""What `deltarule doctor` found wrong on this GPU: calls that are refused at run time."""

from functools import cache

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.tile_sizes import power_of_two
from deltarule.ops.eager import constant_when_compiled
from deltarule.ops.runtime.machine import kept, kept_file

KIND = "doctor"


def configuration_name(inputs: Inputs) -> str:
    """A name for all calls that run the same compiled kernels, up to packing and unit norm.

    Examples:
        >>> import torch
        >>> q = torch.zeros(1, 4, 2, 100)
        >>> call = Inputs(q, q, q, None, None, None, None, None, None, 1, 1.0, False, False)
        >>> configuration_name(call)
        'erase none, decay none, n_steps 1, float32, K to 128, V to 128'
    """
    dtype = str(inputs.q.dtype).removeprefix("torch.")
    return (
        f"erase {inputs.erase}, decay {inputs.decay}, n_steps {inputs.n_steps}, {dtype}, "
        f"K to {power_of_two(inputs.q.shape[-1])}, V to {power_of_two(inputs.v.shape[-1])}"
    )


def refusal(inputs: Inputs) -> str | None:
    """Why the doctor's findings forbid this call; None if they do not."""
    return refusal_of(configuration_name(inputs)) if anything_failed() else None


@constant_when_compiled
def anything_failed() -> bool:
    """Whether there is any failure to look for: mostly there is none."""
    return bool(failures())


@constant_when_compiled
def refusal_of(name: str) -> str | None:
    """The reason against one configuration, from the file of this machine."""
    if (error := failures().get(name)) is None:
        return None
    return (
        f"`deltarule doctor` found the kernels of ({name}) wrong on this GPU: {error}; it is kept "
        f'in {kept_file(KIND)}: use impl="torch", or another version of Triton'
    )


@cache
def failures() -> dict[str, str]:
    """Names of the configurations that failed on this machine, with their errors."""
    return {
        name: str(verdict.get("error"))
        for name, verdict in kept(KIND).items()
        if isinstance(verdict, dict) and not verdict.get("passed")
    }
