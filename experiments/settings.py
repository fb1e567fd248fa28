"""The settings of an experiment: a file settings/NAME.toml with a table for each of its forms.

What stands under `all` holds for every form that does not say otherwise. `model`, `optimizer`,
`loop` and `cell` are arguments of `ModelConfig`, `OptimizerOptions`, `LoopOptions` and `TaskCell`.
"""

import tomllib
from pathlib import Path
from typing import Any

Form = dict[str, Any]
HERE = Path(__file__).parent


def read_settings(name: str, folder: Path = HERE) -> dict[Any, Form]:
    """The forms of the experiment of this name.

    Examples:
        >>> read_settings("groups")["gpu"]["loop"]["steps"]
        3000
    """
    path = folder / "settings" / f"{name}.toml"
    forms: dict[Any, Form] = tomllib.loads(path.read_text(encoding="utf-8"))
    common = forms.pop("all", {})
    return {scale: merged(common, form) for scale, form in forms.items()}


def merged(common: Any, own: Any) -> Any:
    """The own value, or of two tables the entries of both.

    Examples:
        >>> merged({"loop": {"keep": 1, "steps": 9}}, {"loop": {"steps": 5}})
        {'loop': {'keep': 1, 'steps': 5}}
    """
    if isinstance(common, dict) and isinstance(own, dict):
        return common | {key: merged(common.get(key), value) for key, value in own.items()}
    return own
