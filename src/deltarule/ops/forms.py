"""The table of an operator that has the three usual forms."""

from collections.abc import Callable

from deltarule.ops.dispatch import Arguments, Implementation, Result, Table, always


def forms(
    why_not_triton: Callable[[Arguments], str | None],
    run: Callable[[Arguments, str], Result],
    reference: Callable[[Arguments], Result],
) -> Table[Arguments, Result]:
    """Kernels in Triton, the same in PyTorch on any device, and the definition.

    The order is that in which impl="auto" prefers them; `run` is also given "triton" or "torch".
    """
    return {
        "triton": Implementation(why_not_triton, lambda call: run(call, "triton")),
        "torch": Implementation(always, lambda call: run(call, "torch")),
        "reference": Implementation(always, reference),
    }
