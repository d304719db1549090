"""The batch triple of a DeepSpeed JSON and what it means under ACCO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_acco.config import ALL, NODE, AccoConfig, Mode
from megatron_acco.ds_json.check import AUTO, describe

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def resolve_batch(config: Mapping[str, Any], dp_world_size: int, tensor_parallel: int = 1) -> dict[str, Any]:
    """A copy of `config` with all three batch sizes, by DeepSpeed's rules: two given, the third follows.

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp_world_size. With one of the
    first two alone, gradient_accumulation_steps is 1.

    Args:
        dp_world_size: data-parallel size (all ranks / tensor_parallel).
        tensor_parallel: for the message only.

    Raises:
        ValueError: a size is not a whole number above 0, too few are given, or they do not multiply.
    """
    sizes = {key: _size(key, config.get(key)) for key in (TRAIN, MICRO, STEPS)}
    train, micro, steps = sizes[TRAIN], sizes[MICRO], sizes[STEPS]
    if train is None and micro is None:
        raise ValueError(
            f'the batch size is not given; set "{MICRO}" and "{STEPS}" (or "{TRAIN}") in the DeepSpeed JSON'
        )
    if steps is None and (train is None or micro is None):
        steps = 1
    if train is None:
        assert micro is not None and steps is not None
        train = micro * steps * dp_world_size
    elif micro is None:
        assert steps is not None
        micro = _divide(train, steps, dp_world_size, tensor_parallel, MICRO, STEPS)
    elif steps is None:
        steps = _divide(train, micro, dp_world_size, tensor_parallel, STEPS, MICRO)
    assert micro is not None and steps is not None
    if train != micro * steps * dp_world_size:
        raise ValueError(
            f'"{TRAIN}" {train} is not "{MICRO}" {micro} x "{STEPS}" {steps} x data-parallel size '
            f"{_data_parallel(dp_world_size, tensor_parallel)} = {micro * steps * dp_world_size}; "
            f"change one of them, or leave one of the three out and it follows from the others"
        )
    return {**config, TRAIN: train, MICRO: micro, STEPS: steps}


def drop_derivable(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config` without the one batch size that is "auto" although the other two are given."""
    sizes = {key: config.get(key) for key in (TRAIN, MICRO, STEPS)}
    auto = [key for key, value in sizes.items() if value == AUTO]
    if len(auto) != 1 or None in sizes.values():
        return dict(config)
    return {key: value for key, value in config.items() if key != auto[0]}


def describe_batch(config: Mapping[str, Any], dp_world_size: int, acco: AccoConfig | None) -> str:
    """One line for the log: the sizes of a resolved config, and what one update is made of."""
    train, micro, steps = config[TRAIN], config[MICRO], config[STEPS]
    line = (
        f"batch: {train} samples per update = {micro} per micro-batch x {steps} micro-batches per rank "
        f"({STEPS}) x {dp_world_size} data-parallel ranks"
    )
    if acco is None or not acco.enabled:
        return f"{line}; DeepSpeed's own rule, one exchange per update"
    if acco.adaptive:
        first = acco.first_half_micro_batches(steps) if acco.mode is Mode.ACCO else 0
        most = acco.max_micro_batches_per_half
        if most > min(first or steps, steps - first):
            line += f", and more while an exchange is under way (at most {most} per half)"
        else:
            line += f', and never more: "acco.max_micro_batches_per_half" is {most}; raise it'
    if acco.mode is not Mode.ACCO:
        waited = " and waited for" if acco.mode is Mode.SYNC else " behind the next update's compute"
        return f"{line}; mode {acco.mode.value}, one exchange per update{waited}"
    first = acco.first_half_micro_batches(steps)
    kind = f"an estimate in {acco.estimate_bits} bits" if acco.coarse else "an estimate"
    if acco.estimating_ranks != ALL:
        who = "a node's ranks" if acco.estimating_ranks == NODE else f"{acco.estimating_ranks} ranks"
        kind += f" of {who}"
    return (
        f"{line}; mode acco, {STEPS} counts a whole update: {kind} after the first {first} and a commit after "
        f"the other {steps - first} of each rank's {steps} micro-batches"
        + (", until measured times say where to split" if acco.auto_fraction else "")
    )


def _size(key: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f'"{key}" must be a whole number above 0, got {describe(value)}')
    return value


def _divide(train: int, other: int, dp: int, tensor_parallel: int, missing: str, other_key: str) -> int:
    if train % (other * dp):
        raise ValueError(
            f'"{missing}" cannot be derived: "{TRAIN}" {train} is not divisible by "{other_key}" {other} x '
            f"data-parallel size {_data_parallel(dp, tensor_parallel)} = {other * dp} (quotient {train / other / dp:g})"
        )
    return train // (other * dp)


def _data_parallel(dp: int, tensor_parallel: int) -> str:
    """The data-parallel size, told apart from the number of ranks where they differ."""
    if tensor_parallel == 1:
        return str(dp)
    return f"{dp} (not all {dp * tensor_parallel} ranks: tensor-parallel size {tensor_parallel})"
