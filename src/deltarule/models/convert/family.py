"""A family of checkpoints: its config.json and its names, both ways."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deltarule.models.config import ModelConfig
from deltarule.models.convert.fields import Fields
from deltarule.models.convert.names import Tensors
from deltarule.models.convert.options import Table, read, write


def as_it_is(config: ModelConfig) -> None:
    """Refuse no configuration."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What config.json and the tensors of a family are called, and what they are here.

    Args:
        model_type: In config.json.
        architecture: The class that reads it elsewhere, for config.json.
        options: What config.json says, entry by entry.
        tensors: What the tensors are called.
        aliases: Further values of model_type that are read.
        ignored: How names of tensors begin that belong to no language model.
        derived: How names of tensors end that follow from config.json; none is written.
        unwritten: Options that are read, and that what reads them elsewhere does not want.
        check: Refuses, with a ValueError, configurations that the options alone cannot say.
    """

    model_type: str
    architecture: str
    options: Table
    tensors: Tensors
    aliases: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()
    check: Callable[[ModelConfig], None] = as_it_is

    def leaves_out(self, name: str) -> bool:
        return name.startswith(self.ignored) or name.endswith(self.derived)

    def config(self, stored: Mapping[str, Any]) -> ModelConfig:
        fields = Fields(stored)
        config = ModelConfig(**read(self.options, fields))
        fields.done()
        return config

    def fields(self, config: ModelConfig) -> dict[str, Any]:
        """Return what config.json holds for a configuration with every option written out."""
        head = {"model_type": self.model_type, "architectures": [self.architecture]}
        said = head | write(self.options, config)
        self.check(config)
        return {name: value for name, value in said.items() if name not in self.unwritten}
