"""A family of checkpoints: its config.json and its names, both ways."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deltarule.models.config import ModelConfig
from deltarule.models.convert.fields import Fields
from deltarule.models.convert.piece import Has, Piece, Shapes


@dataclass(frozen=True, kw_only=True)
class Family:
    """What config.json and the tensors of a family are called, and what they are here.

    Args:
        model_type: In config.json.
        architecture: The class that reads it elsewhere, for config.json.
        read: From the options of config.json to a configuration; options left over are refused
            afterwards.
        write: From a configuration with every option written out to config.json.
        pieces: The stored tensors, from a configuration, the shapes of a model's parameters and,
            where a family has names to choose from, what is there.
        ignored: How names of tensors begin that belong to no language model.
    """

    model_type: str
    architecture: str
    read: Callable[[Fields], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    pieces: Callable[[ModelConfig, Shapes, Has], list[Piece]]
    ignored: tuple[str, ...] = ()

    def config(self, stored: Mapping[str, Any]) -> ModelConfig:
        """Read config.json.

        Raises:
            ValueError: An option is missing, unknown or has a value that nothing here says.
        """
        fields = Fields(stored)
        config = self.read(fields)
        fields.done()
        return config

    def options(self, config: ModelConfig) -> dict[str, Any]:
        """Return what config.json holds for a configuration with every option written out."""
        head = {"model_type": self.model_type, "architectures": [self.architecture]}
        return head | self.write(config)
