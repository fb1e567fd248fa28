"""What `help` says of a layer beside its own words: defaults, options, its state, an example."""

import textwrap
from collections.abc import Sequence

EXAMPLE = """\
    >>> layer = {}(32, num_heads=2)
    >>> y, state = layer(torch.zeros(1, 5, 32))
    >>> y, state = layer(torch.zeros(1, 1, 32), state)  # the sixth token"""


def described(text: str, defaults: str, state: str, options: Sequence[str], name: str) -> str:
    """A docstring with all of it; an example of its own takes the place of the usual one.

    Examples:
        >>> described("A layer.", "no gate", "HV V", ["    x: Channels."], "KDA").splitlines()[2:5]
        ['Defaults: no gate.', '', 'State: HV V numbers for each sequence.']
    """
    head, _, example = text.partition("Examples:\n")
    defaults = textwrap.fill(f"Defaults: {defaults}.", 96)
    args = "\n".join(["Args:", *options])
    example = "Examples:\n" + (example.rstrip() or EXAMPLE.format(name))
    state = f"State: {state} numbers for each sequence."
    return "\n\n".join((head.rstrip(), defaults, state, args, example))
