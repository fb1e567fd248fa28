"""What `help` says of a layer beside its own words, and errors of its options."""

import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

EXAMPLE = """\
    >>> layer = {}(32, num_heads=2)
    >>> y, state = layer(torch.zeros(1, 5, 32))
    >>> y, state = layer(torch.zeros(1, 1, 32), state)  # the sixth token"""


def described(text: str, defaults: str, state: str, options: Sequence[str], name: str) -> str:
    """A layer's docstring with all these parts; its own example, if any, replaces the usual one.

    Examples:
        >>> text = described("A layer.", "no gate", "HV V", ["    x: Channels."], "KDA")
        >>> "Defaults: no gate." in text, "State: H K numbers" in text
        (True, True)
    """
    head, _, example = text.partition("Examples:\n")
    defaults = textwrap.fill(f"Defaults: {defaults}.", 96)
    args = "\n".join(["Args:", *options])
    example = "Examples:\n" + (example.rstrip() or EXAMPLE.format(name))
    # Value heads and their channels are those of keys where they are no options.
    for option, letter, key in (("num_v_heads", "HV", "H"), ("head_v_dim", "V", "K")):
        if f"{option}:" not in args:
            state = re.sub(rf"\b{letter}\b", key, state)
    others = "without those of convolutions, token shifts and counts of tokens"
    state = textwrap.fill(f"State: {state} numbers for each sequence, {others}.", 96)
    return "\n\n".join((head.rstrip(), defaults, state, args, example))


def check_given(layer: type[Any], given: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Refuse arguments by the name of their layer; the constructor is one that layers share."""
    try:
        inspect.signature(layer.__init__).bind_partial(None, *given, **options)
    except TypeError as error:
        shown = ", ".join(inspect.signature(layer).parameters)
        raise TypeError(f"{layer.__name__}: {error}; it takes {shown}") from None
