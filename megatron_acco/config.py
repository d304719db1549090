"""The `acco` section of a DeepSpeed JSON: parsed once, validated once, frozen."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum, StrEnum
from typing import Any

SECTION = "acco"
AUTO = "auto"
# The first of them is not quantized.
ESTIMATE_BITS = (32, 16, 8, 4)
# Values of estimate_group that are no size.
ALL, NODE = "all", "node"
# Options of which "auto" is a value.
MAY_BE_AUTO = ("estimate_fraction",)


class Mode(StrEnum):
    """Which rounds an update is made of (DESIGN: modes)."""

    ACCO = "acco"
    DPU = "dpu"
    WP = "wp"
    SYNC = "sync"


class Accumulation(StrEnum):
    """How many micro-batches make a half."""

    FIXED = "fixed"
    ADAPTIVE = "adaptive"


class Fallback(StrEnum):
    """What to do when communication cannot be hidden and synchronous rounds would be faster."""

    WARN = "warn"
    AUTO = "auto"


def _option(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class AccoConfig:
    """Options of the `acco` section. Unknown keys, wrong types and values out of range raise ValueError.

    The field documentation below is the source of the JSON reference in docs/configuration.md.
    """

    enabled: bool = _option(
        True,
        "`false` leaves the run on DeepSpeed's own ZeRO stage 1, exactly as if the section were absent.",
    )
    mode: Mode = _option(
        Mode.ACCO,
        "`acco`: an estimate round and a commit round per update, both hidden behind compute. "
        "`dpu`: one hidden round per update, every gradient one update stale (delayed parameter update). "
        "`wp`: `dpu` with the weights shown to compute predicted by a second application of the optimizer. "
        "`sync`: one round per update, waited for (the ZeRO-1 rule in ACCO's buffers).",
    )
    accumulation: Accumulation = _option(
        Accumulation.FIXED,
        "`fixed`: `gradient_accumulation_steps` is the number of micro-batches per rank and update, as in "
        "ZeRO-1; batch size, learning-rate schedule and global steps mean what they mean there. "
        "`adaptive`: that is the smallest update; a half goes on until the exchange in flight is done, so that no "
        "rank ever waits. Fast ranks then contribute more micro-batches than slow ones, the batch grows with the "
        "exchange, and runs are not bit-reproducible.",
    )
    max_micro_batches_per_half: int = _option(
        64,
        "`adaptive` only: a rank that has done this many micro-batches in a half waits for the exchange. Bounds the "
        "batch on a link that is too slow for the model.",
    )
    lr_batch_scaling: bool = _option(
        False,
        "`adaptive` only: multiply the learning rate of every update by the square root of its batch over the "
        "configured one (`train_batch_size`).",
    )
    fallback: Fallback = _option(
        Fallback.WARN,
        "What happens when the exchanges of an update take longer than compute can hide, so that ZeRO-1's rule would "
        "be faster: `warn` says so in the log; `auto` changes to `sync` rounds at an update boundary, on all ranks "
        "together, and back when `mode` would be faster again.",
    )
    estimate_fraction: float | str = _option(
        0.5,
        "Mode `acco` only. Share of an update's micro-batches in its first half, 0 < f < 1. The first half takes "
        "floor(f * gradient_accumulation_steps) micro-batches, at least one, and leaves at least one. "
        '`"auto"` starts with equal halves and then follows the measured times of compute and of the two exchanges: '
        "the first half covers the commit's, the second the estimate's. The choice depends on timings, so runs are not "
        "bit-reproducible.",
    )
    estimate_bits: int = _option(
        32,
        "Mode `acco` only. Bits of a value in the estimate's exchange: 32 (not quantized: the communication dtype), "
        "16, 8 or 4. Only the weights at which the next first half is computed depend on it; the commit stays exact.",
    )
    estimate_block_size: int = _option(
        256,
        "Values that share one fp32 scale in a quantized estimate; a multiple of 8.",
    )
    estimate_stochastic_rounding: bool = _option(
        False,
        "Round the values of a quantized estimate up or down at random, right on average, instead of to the nearest "
        "step.",
    )
    estimate_group: int | str = _option(
        ALL,
        "Mode `acco` only. The data-parallel ranks that exchange an estimate: `all`; `node`, those of a host; or a "
        "number n, n consecutive ranks. Each group then makes an estimate of its own, from its gradients, and holds "
        "all of the optimizer state (12 P / n bytes per rank with Adam, instead of 12 P / N). Commits go over all "
        "ranks (docs/BEYOND_THE_PAPER.md).",
    )
    warmup_updates: int = _option(
        0,
        "Number of updates at the start of training made with `sync` rounds before `mode` takes over. Early in "
        "training curvature limits the learning rate of every overlapped mode below ZeRO-1's: cover the "
        "learning-rate warm-up (docs/how-it-works.md).",
    )
    abort_after_skipped_updates: int = _option(
        0,
        "End the run when this many updates in a row were skipped because a gradient was not finite; 0 never does.",
    )

    @classmethod
    def from_dict(cls, section: Any, where: str = SECTION) -> AccoConfig:
        """Build from the parsed JSON section.

        Args:
            section: the value of the `acco` key (a mapping).
            where: how to name the section in messages.

        Raises:
            ValueError: naming the key, the value found and what is accepted.
        """
        if not isinstance(section, Mapping):
            raise ValueError(f'"{where}" must be an object such as {{"mode": "acco"}}, got {section!r}')
        known = {f.name: f for f in fields(cls)}
        for key in section:
            if key not in known:
                raise ValueError(unknown_key_message(f"{where}.{key}", key, known))
        values = {name: _parse(f"{where}.{name}", known[name].default, value) for name, value in section.items()}
        config = cls(**values)
        config._check(where)
        return config

    def _check(self, where: str) -> None:
        if not self.auto_fraction and not 0.0 < float(self.estimate_fraction) < 1.0:
            raise ValueError(
                f'"{where}.estimate_fraction" must lie strictly between 0 and 1, or be "auto", got '
                f"{self.estimate_fraction}"
            )
        if self.estimate_bits not in ESTIMATE_BITS:
            choices = ", ".join(map(str, ESTIMATE_BITS))
            raise ValueError(f'"{where}.estimate_bits" must be one of {choices}, got {self.estimate_bits}')
        if self.estimate_block_size < 8 or self.estimate_block_size % 8:
            raise ValueError(
                f'"{where}.estimate_block_size" must be a multiple of 8, 8 or more, got {self.estimate_block_size}'
            )
        if self.estimate_stochastic_rounding and self.estimate_bits == ESTIMATE_BITS[0]:
            raise ValueError(
                f'"{where}.estimate_stochastic_rounding" rounds what "{where}.estimate_bits" quantizes, which is 32 '
                f"(not quantized); set it to 16, 8 or 4"
            )
        size = self.estimate_group
        if size not in (ALL, NODE) and (isinstance(size, str) or size < 1):
            raise ValueError(f'"{where}.estimate_group" must be "{ALL}", "{NODE}" or a number of ranks, got {size!r}')
        for name in ("warmup_updates", "abort_after_skipped_updates"):
            if getattr(self, name) < 0:
                raise ValueError(f'"{where}.{name}" must be 0 or more, got {getattr(self, name)}')
        if self.max_micro_batches_per_half < 1:
            raise ValueError(
                f'"{where}.max_micro_batches_per_half" must be 1 or more, got {self.max_micro_batches_per_half}'
            )
        if self.lr_batch_scaling and not self.adaptive:
            raise ValueError(
                f'"{where}.lr_batch_scaling" needs "accumulation": "adaptive"; with a fixed batch set the learning rate'
            )

    @property
    def adaptive(self) -> bool:
        """Whether halves end when the exchange in flight does."""
        return self.accumulation is Accumulation.ADAPTIVE

    @property
    def coarse(self) -> bool:
        """Whether there are estimates and their exchange is quantized."""
        return self.mode is Mode.ACCO and self.estimate_bits != ESTIMATE_BITS[0]

    @property
    def estimating_ranks(self) -> int | str:
        """Which data-parallel ranks exchange an estimate together: "all", "node" or a number of them."""
        return self.estimate_group if self.mode is Mode.ACCO else ALL

    def check_data_parallel(self, ranks: int) -> None:
        """Raise ValueError if `ranks` data-parallel ranks cannot be cut into the groups of `estimate_group`."""
        size = self.estimating_ranks
        if isinstance(size, int):
            check_equal_groups(size, [min(size, ranks - first) for first in range(0, ranks, size)])

    @property
    def auto_fraction(self) -> bool:
        """Whether the split of an update is chosen from measurements."""
        return self.estimate_fraction == AUTO

    def check_accumulation_steps(self, steps: int) -> None:
        """Raise ValueError if an update of `steps` micro-batches per rank cannot be split into two halves."""
        if self.enabled and self.mode is Mode.ACCO and steps < 2:
            raise ValueError(
                f'"acco.mode": "acco" splits the micro-batches of an update into two halves, so '
                f"gradient_accumulation_steps must be at least 2, got {steps}. Use a smaller micro-batch with more "
                f'accumulation steps, or "mode": "dpu" / "wp" / "sync".'
            )

    def first_half_micro_batches(self, steps: int, fraction: float | None = None) -> int:
        """Micro-batches of the first half of an update of `steps` micro-batches per rank (at least 1, leaves 1).

        Args:
            fraction: the first half's share, if it was chosen; else the configured one, to begin with one half.
        """
        if fraction is None:
            fraction = 0.5 if self.auto_fraction else float(self.estimate_fraction)
        # The small term keeps products such as 0.29 * 100 = 28.999999999999996 from losing a micro-batch.
        return min(max(1, math.floor(fraction * steps + 1e-9)), max(1, steps - 1))


def check_equal_groups(choice: int | str, sizes: Sequence[int]) -> None:
    """Raise ValueError if the groups of `sizes` data-parallel ranks that `estimate_group` asks for are not equal."""
    if len(set(sizes)) > 1:
        hint = "a size that divides them" if choice != NODE else "as many ranks on every node, or a group size"
        raise ValueError(
            f'"acco.estimate_group" {choice} cuts the {sum(sizes)} data-parallel ranks into groups of '
            f'{", ".join(map(str, sizes))}, which must be equal; give {hint}, or "{ALL}"'
        )


def acco_config(deepspeed_config: Mapping[str, Any]) -> AccoConfig | None:
    """The enabled `acco` section of a parsed DeepSpeed JSON, or None if it is absent or disabled.

    Raises:
        ValueError: if the section is there and malformed (also when it is disabled).
    """
    if SECTION not in deepspeed_config:
        return None
    config = AccoConfig.from_dict(deepspeed_config[SECTION])
    return config if config.enabled else None


def unknown_key_message(path: str, key: str, known: Any) -> str:
    """One-line refusal of an unknown key, with the nearest right name if there is one."""
    close = difflib.get_close_matches(key, list(known), n=1)
    hint = f'; did you mean "{close[0]}"?' if close else f"; known keys: {', '.join(sorted(known))}"
    return f'unknown key "{path}"{hint}'


def _parse(path: str, default: Any, value: Any) -> Any:
    """`value` as the type of `default`; no conversions, so that a wrong type is an error here and not later."""
    assert default is not MISSING
    if value == AUTO and path.rpartition(".")[2] in MAY_BE_AUTO:
        return AUTO
    if value == AUTO and not isinstance(default, Fallback):
        raise ValueError(f'"{path}" is "auto", which nothing resolves; give a value')
    if isinstance(default, Enum):
        choices = [member.value for member in type(default)]
        if value not in choices:
            hint = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
            raise ValueError(
                f'"{path}" must be one of {", ".join(choices)}, got {value!r}'
                + (f'; did you mean "{hint[0]}"?' if hint else "")
            )
        return type(default)(value)
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError(f'"{path}" must be true or false, got {value!r}')
        return value
    if isinstance(default, str):
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ValueError(f'"{path}" must be a name or a whole number, got {value!r}')
        return value
    if isinstance(default, int):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f'"{path}" must be a whole number, got {value!r}')
        return value
    # Compared, not converted: an integer of 400 digits is no float.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise ValueError(f'"{path}" must be a finite number, got {value!r}')
    return float(value)
