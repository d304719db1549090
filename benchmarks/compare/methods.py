"""What is compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Kind(Enum):
    """Who trains."""

    COMPUTE = "the bare model, without communication"
    DEEPSPEED = "DeepSpeed's engine, or ACCO's in its place"
    DDP = "PyTorch DDP and ZeroRedundancyOptimizer"
    FSDP2 = "PyTorch fully_shard"


@dataclass(frozen=True)
class Method:
    """One row.

    Attributes:
        rule: its name in the cost model.
        kind: who trains.
        acco: the `acco` section; None is plain DeepSpeed.
        zero: keys of `zero_optimization`.
        exact: every update is that of synchronous AdamW.
    """

    rule: str
    kind: Kind = Kind.DEEPSPEED
    acco: dict[str, Any] | None = None
    zero: dict[str, Any] = field(default_factory=dict)
    exact: bool = False

    @property
    def chooses(self) -> bool:
        """Something is chosen from measurements of the first updates."""
        return "auto" in (self.acco or {}).values()

    @property
    def estimate_bits(self) -> int | None:
        """Of a quantized estimate."""
        return (self.acco or {}).get("estimate_bits")

    @property
    def local_estimates(self) -> bool:
        """Estimates are made without communication, there being one rank to a host."""
        return (self.acco or {}).get("estimate_group") == "node"

    @property
    def most_per_half(self) -> int:
        """Limit of adaptive accumulation."""
        return (self.acco or {}).get("max_micro_batches_per_half", 0)


METHODS: dict[str, Method] = {
    "compute": Method("compute", Kind.COMPUTE),
    "zero1": Method("zero1", zero={"overlap_comm": False}, exact=True),
    "zero1-overlap": Method("zero1-overlap", zero={"overlap_comm": True}, exact=True),
    # Reduces the gradients of every micro-batch, as DeepSpeed does with partitioned gradients.
    "zero2": Method("zero2", zero={"stage": 2}, exact=True),
    "ddp": Method("ddp", Kind.DDP, exact=True),
    "fsdp2": Method("fsdp2", Kind.FSDP2, exact=True),
    "sync": Method("sync", acco={"mode": "sync"}, exact=True),
    "dpu": Method("dpu", acco={"mode": "dpu"}),
    "wp": Method("wp", acco={"mode": "wp"}),
    "acco": Method("acco", acco={"mode": "acco"}),
    "adaptive": Method(
        "adaptive", acco={"mode": "acco", "accumulation": "adaptive", "max_micro_batches_per_half": 256}
    ),
    "auto": Method("auto", acco={"mode": "acco", "fallback": "auto"}),
    "acco-8-bit": Method("acco-coarse", acco={"mode": "acco", "estimate_bits": 8, "estimate_fraction": "auto"}),
    "acco-node": Method("acco-node", acco={"mode": "acco", "estimate_group": "node", "estimate_fraction": "auto"}),
    "acco-4-bit": Method("acco-coarse", acco={"mode": "acco", "estimate_bits": 4, "estimate_fraction": "auto"}),
}
BASELINES = ("zero1", "zero1-overlap")
DEFAULT = ("compute", *BASELINES, "zero2", "ddp", "fsdp2", "sync", "dpu", "wp", "acco", "adaptive")
