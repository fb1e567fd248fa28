"""A table by name that says which name was meant."""

from typing import TypeVar

from deltarule.nearest import nearest

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
        hint = nearest(name, self, otherwise=f"known are {', '.join(self)}")
        raise KeyError(f"there is no {name!r}: {hint}")
