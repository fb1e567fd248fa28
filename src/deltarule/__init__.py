"""Delta-rule linear recurrent networks: one recurrence, its layers, and the models made of them."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltarule.ops import *
    from deltarule.ops.context import Context, make_context
    from deltarule.shapes import (
        MesaOutput,
        MesaState,
        RecurrentOutput,
        TitansOutput,
        TitansState,
        TransitionOutput,
        TTTOutput,
        TTTState,
    )

__version__ = "0.1.0"

__all__ = [
    "BetaLogits", "Context", "DecayLogits", "MesaOutput", "MesaState", "RecurrentOutput",
    "TTTOutput", "TTTState", "TitansOutput", "TitansState", "TransitionOutput", "attention_matrix",
    "delta_rule", "dplr", "explain", "long_convolution", "make_context", "mesa", "pack",
    "recurrent_step", "selective_scan", "slstm", "titans", "ttt", "two_memories", "warmup",
]  # fmt: skip

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The first public name that is asked for imports them all, and PyTorch with them.

        Without one `deltarule --help` need not wait for PyTorch, and Ctrl-C meanwhile is caught.
        """
        if name in ("models", "nn", "ops", "shapes"):
            return importlib.import_module(f"deltarule.{name}")
        if name not in __all__:
            raise AttributeError(f"module 'deltarule' has no attribute {name!r}")
        for home in ("deltarule.ops", "deltarule.ops.context", "deltarule.shapes"):
            module = importlib.import_module(home)
            globals().update({x: getattr(module, x) for x in __all__ if hasattr(module, x)})
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
