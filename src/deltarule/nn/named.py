"""A table by name that says which name was meant."""

import difflib
from typing import TypeVar

Row = TypeVar("Row")


class Named(dict[str, Row]):
    """A dict whose missing keys suggest the nearest that there is.

    Examples:
        >>> Named(deltanet=1, gla=2)["delta_net"]
        Traceback (most recent call last):
        ...
        KeyError: "there is no 'delta_net': did you mean 'deltanet'?"
    """

    def __missing__(self, name: object) -> Row:
        """Raise a KeyError that names the nearest key, or all of them."""
        near = difflib.get_close_matches(str(name), list(self), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(self)}"
        raise KeyError(f"there is no {name!r}: {hint}")
