"""ACCO ("Accumulate while you Communicate", arXiv 2406.02613) on DeepSpeed ZeRO stage 1, for Megatron models."""

from megatron_acco.config import AccoConfig
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
