"""ACCO ("Accumulate while you Communicate", arXiv 2406.02613) on DeepSpeed ZeRO stage 1, for Megatron models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_acco.config import AccoConfig

if TYPE_CHECKING:
    from megatron_acco.zero.engine import (
        AccoEngine,
        drain,
        initialize,
        real_parameters,
        register,
        round_reports,
        unregister,
    )
    from megatron_acco.zero.optimizer import AccoZeroOptimizer
    from megatron_acco.zero.report import RoundReport

__version__ = "0.1.0"

__all__ = [
    "AccoConfig",
    "AccoEngine",
    "AccoZeroOptimizer",
    "RoundReport",
    "drain",
    "initialize",
    "real_parameters",
    "register",
    "round_reports",
    "unregister",
]

_MODULES = {"AccoZeroOptimizer": "megatron_acco.zero.optimizer", "RoundReport": "megatron_acco.zero.report"}


def __getattr__(name: str) -> Any:
    # Importing DeepSpeed takes seconds and prints: the command-line tools that do not need it do without.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES.get(name, "megatron_acco.zero.engine")), name)
    globals()[name] = value
    return value
