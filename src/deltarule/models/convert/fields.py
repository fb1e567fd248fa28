"""The options in a config.json of another project: each is taken once, and none is passed over."""

from collections.abc import Collection, Mapping
from typing import Any

from deltarule.models.config_names import THEIRS
from deltarule.nearest import check_known
from deltarule.nn.checks import check_integer, is_number

# What transformers and training code write for themselves; none changes what a model computes.
_SILENT = frozenset({
    *THEIRS, "_attn_implementation", "_name_or_path", "attn_mode", "auto_map", "chunk_size",
    "elementwise_affine", "fuse_cross_entropy", "fuse_linear_cross_entropy", "fuse_norm",
    "fuse_swiglu", "initializer_range", "max_position_embeddings", "model_type", "use_l2warp",
})  # fmt: skip


class Fields:
    """Options of a config.json by name, taken one after another."""

    def __init__(self, stored: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in stored.items() if name not in _SILENT}

    def take(self, name: str, default: Any = None) -> Any:
        """Return an option of any type; None and an absent one are the default."""
        value = self._left.pop(name, None)
        return default if value is None else value

    def has(self, name: str) -> bool:
        return self._left.get(name) is not None

    def integer(self, name: str, default: int | None = None, smallest: int = 0) -> int:
        """Return an integer; without a default it is required."""
        value = self._required(name, default)
        check_integer(name, value, smallest)
        return value

    def factor(self, name: str) -> float:
        """Return a number above 0; absent, it is 1."""
        if (value := self.number(name, 1.0)) <= 0:
            raise ValueError(f"{name} must be above 0, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number; without a default it is required."""
        value = self._required(name, default)
        if not is_number(value):
            raise ValueError(f"{name} must be a finite number, got {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")
        return value

    def word(self, name: str, default: str, known: Collection[str]) -> str:
        value = self.take(name, default)
        check_known(name, value, known)
        return value

    def inside(self, name: str) -> "Fields":
        value = self.take(name, {})
        if not isinstance(value, dict):
            raise ValueError(f"{name} must be an object, got {value!r}")
        return Fields(value)

    def go_on(self, inside: "Fields", over: Mapping[str, Any]) -> None:
        """Take further options from an object inside, where `over` does not have them."""
        self._left = {**inside._left, **over}

    def listed(self, name: str, default: list[Any]) -> list[Any]:
        """Return a list of integers, numbers or words; one of the length of the default, if any."""
        value = self.take(name, default)
        if not isinstance(value, list) or (default and len(value) != len(default)):
            size = f" of {len(default)}" if default else ""
            raise ValueError(f"{name} must be a list{size}, got {value!r}")
        return value

    def only(self, name: str, *known: object) -> None:
        """Take an option of which only some values can be said here; absent, it is the first."""
        value = self._left.pop(name, known[0])
        if value not in known:
            raise ValueError(
                f"{name} must be {' or '.join(map(repr, known))}, got {value!r}: "
                "no option of CausalLM says that"
            )

    def rename(self, names: Mapping[str, str]) -> None:
        """Take options by their older names, of which `names` gives the newer, where they stand."""
        for old, new in names.items():
            if old in self._left:
                self._left.setdefault(new, self._left.pop(old))

    def drop(self, *names: str) -> None:
        """Pass over options that change nothing of what the model computes."""
        for name in names:
            self._left.pop(name, None)

    def done(self) -> None:
        if self._left:
            names = ", ".join(map(repr, sorted(self._left)))
            raise ValueError(f"unknown option {names}: what it asks for may change the model")

    def _required(self, name: str, default: object) -> Any:
        value = self.take(name, default)
        if value is None:
            raise ValueError(f"missing key {name!r}")
        return value
