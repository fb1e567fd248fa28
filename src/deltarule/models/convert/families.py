"""Every family of checkpoints that is read and written, by the `model_type` of its config.json."""

from typing import Any

from deltarule.models.config import MODEL_TYPE, RENAMED
from deltarule.models.convert import (
    fla,
    gated_deltanet,
    kimi_linear,
    mamba1,
    mamba2,
    minimax,
    rwkv7,
    xlstm,
)
from deltarule.models.convert.options import Family
from deltarule.nearest import check_known

_ALL = (
    *fla.FAMILIES, *gated_deltanet.FAMILIES, *mamba2.FAMILIES, kimi_linear.FAMILY, minimax.FAMILY,
    xlstm.FAMILY, rwkv7.FAMILY, *mamba1.FAMILIES,
)  # fmt: skip
FAMILIES: dict[str, Family] = {
    name: family for family in _ALL for name in (*family.aliases, family.model_type)
}


def family_of(stored: dict[str, Any]) -> Family | None:
    """The family of a config.json; None for this library's own."""
    model_type = stored.get("model_type", MODEL_TYPE)
    if not {"model_type", "layer_types", RENAMED["layer_types"]} & {*stored}:
        raise ValueError("no model_type: not a checkpoint of this library or of a known family")
    return None if model_type == MODEL_TYPE else named(model_type, "model_type")


def named(name: object, option: str) -> Family:
    """The family of that name; `option` is what the name was given for."""
    check_known(option, name, (MODEL_TYPE, *FAMILIES))
    return FAMILIES[str(name)]
