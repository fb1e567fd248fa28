"""Which calls are refused, since `deltarule doctor` found their kernels wrong on this machine."""

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.tile_sizes import power_of_two
from deltarule.ops.dispatch import constant_when_compiled
from deltarule.ops.runtime.machine import failures, findings_file


def refusal(inputs: Inputs) -> str | None:
    """The reason against the kernels of this call, or None."""
    return refusal_of(configuration_name(inputs))


@constant_when_compiled
def refusal_of(name: str) -> str | None:
    """The reason against one configuration, from the file of this machine."""
    if (error := failures().get(name)) is None:
        return None
    return (
        f"`deltarule doctor` found the kernels of ({name}) wrong on this GPU: {error}; it is kept "
        f'in {findings_file()}: use impl="torch", or another version of Triton'
    )


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
