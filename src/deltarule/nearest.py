"""A name that is not known, answered with the one that was probably meant."""

import difflib
from collections.abc import Collection, Iterable
from typing import TypeVar

Row = TypeVar("Row")
# Letters in common, two in three as of "gal" and "gla": another name than "llama" is "jamba".
ALIKE = 0.66


def nearest(given: object, known: Iterable[str], *, before: str = "", otherwise: str = "") -> str:
    """The known name most like the one given, as a question after `before`; else `otherwise`.

    Examples:
        >>> nearest("delta_net", ["deltanet", "gla"], before=": ")
        ": did you mean 'deltanet'?"
        >>> nearest("GLA", ["deltanet", "gla"])
        "did you mean 'gla'?"
    """
    names = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(str(given).lower(), names, n=1, cutoff=ALIKE)
    return f"{before}did you mean {names[matches[0]]!r}?" if matches else otherwise


def check_known(name: str, given: object, known: Collection[str], or_else: str = "") -> None:
    """Refuse what is not among the known names, and ask for the nearest of them."""
    if given not in list(known):
        hint = nearest(given, known, before=": ")
        raise ValueError(f"{name} must be one of {', '.join(known)}{or_else}, got {given!r}{hint}")


class Named(dict[str, Row]):
    """A dict whose missing keys suggest the nearest that there is."""

    def __missing__(self, name: object) -> Row:
        """Raise a KeyError that names the nearest key, or all of them."""
        hint = nearest(name, self, otherwise=f"known are {', '.join(self)}")
        raise KeyError(f"there is no {name!r}: {hint}")
