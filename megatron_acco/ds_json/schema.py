"""Which keys DeepSpeed reads, and the type of each, taken from the installed DeepSpeed itself.

DeepSpeed ignores what it does not know outside its pydantic sections, so a misspelt key trains something else
without a word. Two sources, neither of them a list kept here:

- sections that are pydantic models: the fields and aliases of the model;
- everything else: a `DeepSpeedConfig` is built from a dictionary that notes every key asked of it, and the default
  that goes with the question (its type is the type of the key).
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from megatron_acco.config import SECTION

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

# Keys whose default is None, so that DeepSpeed does not tell their type.
_SCALAR_TYPES: dict[str, type] = {
    **dict.fromkeys(BATCH_KEYS, int),
    "steps_per_print": int,
    "vocabulary_size": int,
    "log_level": str,
    "communication_data_type": str,
    "seq_parallel_communication_data_type": str,
}
# Read by deepspeed.initialize or in places that the probe below does not reach.
_READ_ELSEWHERE: dict[str, Any] = {"sequence_parallel_size": 1, "data_parallel_size": 1, "allgather_size": 0}
# Sections whose keys belong to somebody else (an optimizer's or a data set's arguments).
_FREE = frozenset({"optimizer.params", "scheduler.params", "datastates_ckpt"})
_FREE_BELOW = ("data_efficiency.data_sampling.", "data_efficiency.data_routing.")


@dataclass(frozen=True)
class Leaf:
    """A key that is not a section.

    Attributes:
        kind: bool, int, float or str where DeepSpeed says so, otherwise None (any value).
        nullable: JSON null is accepted.
        auto: DeepSpeed's own default is "auto", so that "auto" is a value and not something left to fill in.
        integral_float: 5e8 is accepted for an int (the model converts it).
    """

    kind: type | None = None
    nullable: bool = True
    auto: bool = False
    integral_float: bool = False


@dataclass
class Section:
    """A JSON object. `free`: any key. `model`: the pydantic model that DeepSpeed builds from it."""

    keys: dict[str, Leaf | Section] = field(default_factory=dict)
    free: bool = False
    nullable: bool = False
    model: type[BaseModel] | None = None

    def child(self, key: str) -> Leaf | Section:
        """What `key` holds; an unchecked leaf if it is not known."""
        return self.keys.get(key, Leaf())


@contextmanager
def quiet_deepspeed() -> Iterator[None]:
    """DeepSpeed's logger off: it logs again when the engine is built, and not about our probes."""
    from deepspeed.utils import logger

    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@lru_cache(maxsize=1)
def deepspeed_schema() -> Section:
    """The known keys of a DeepSpeed JSON, with the `acco` section (free here: AccoConfig checks it)."""
    top = Section()
    for path, default in _probe().items():
        _insert(top, path, default)
    for key, default in _READ_ELSEWHERE.items():
        top.keys.setdefault(key, Leaf(type(default), nullable=False))
    for key, kind in _SCALAR_TYPES.items():
        if key in top.keys:
            top.keys[key] = Leaf(kind)
    for name, model in _models().items():
        *parents, last = name.split(".")
        section = top
        for parent in parents:
            section = section.keys.setdefault(parent, Section())  # type: ignore[assignment]
        section.keys[last] = _from_model(model)
    top.keys[SECTION] = Section(free=True)
    return top


def _models() -> dict[str, type[BaseModel]]:
    """The sections that DeepSpeed parses with a pydantic model."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    monitors = {name: info.annotation for name, info in DeepSpeedMonitorConfig.model_fields.items()}
    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "bfloat16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "comms_logger": CommsLoggerConfig,
        "hybrid_engine": HybridEngineConfig,
        "compile": CompileConfig,
        "tensor_parallel": TPTrainingConfig,
        "weight_quantization": WeightQuantConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
        **{name: model for name, model in monitors.items() if _is_model(model)},
    }


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _from_model(model: type[BaseModel], nullable: bool = False) -> Section:
    section = Section(nullable=nullable, model=model)
    for name, info in model.model_fields.items():
        optional, annotation = _strip_optional(info.annotation)
        child: Leaf | Section
        if _is_model(annotation):
            child = _from_model(annotation, nullable=optional)
        else:
            kind = annotation if annotation in (bool, int, float, str) else None
            child = Leaf(kind, nullable=optional or kind is None, auto=info.default == "auto", integral_float=True)
        for key in filter(None, (name, info.alias)):
            section.keys[key] = child
    return section


def _strip_optional(annotation: Any) -> tuple[bool, Any]:
    """(whether None is allowed, the annotation without it)."""
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [argument for argument in get_args(annotation) if argument is not type(None)]
        if len(rest) < len(get_args(annotation)):
            return True, rest[0] if len(rest) == 1 else None
    return False, annotation


def _insert(section: Section, path: tuple[str, ...], default: Any) -> None:
    for depth, key in enumerate(path[:-1]):
        child = section.keys.get(key)
        if not isinstance(child, Section):
            child = section.keys[key] = Section(free=".".join(path[: depth + 1]) in _FREE)
        section = child
    name, last = ".".join(path), path[-1]
    if isinstance(section.keys.get(last), Section):
        return
    if name in _FREE or (name.startswith(_FREE_BELOW) and isinstance(default, (Mapping, _Absent))):
        section.keys[last] = Section(free=True)
        return
    kind = type(default) if isinstance(default, (bool, int, float, str)) and default != "auto" else None
    section.keys[last] = Leaf(kind, nullable=default is None or isinstance(default, _Absent), auto=default == "auto")


class _Absent:
    """The default of a key that was only tested for (`key in section`)."""


class _Asked(dict[str, Any]):
    """A dictionary that notes the keys asked of it, present or not, and their defaults."""

    def __init__(self, content: Mapping[str, Any], path: tuple[str, ...], asked: dict[tuple[str, ...], Any]) -> None:
        self._path, self._asked = path, asked
        super().__init__({k: _Asked(v, (*path, k), asked) if isinstance(v, dict) else v for k, v in content.items()})
        for key in content:
            self._note(key)

    def _note(self, key: Any, default: Any = None) -> None:
        before = self._asked.get((*self._path, key), _Absent())
        if isinstance(before, _Absent):
            self._asked[(*self._path, key)] = _Absent() if default is None else default

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key, default)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> _Asked:
        return _Asked(dict(self), self._path, self._asked)


# Sections that must be there for DeepSpeed to ask for what is in them.
_SKELETON: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "adamw", "params": {}},
    "scheduler": {"type": "WarmupLR", "params": {}},
    "checkpoint": {"writer": {}, "parallel_write": {}},
    "data_types": {},
    "torch_autocast": {},
    "activation_checkpointing": {},
    "flops_profiler": {},
    "aio": {},
    "autotuning": {"model_info": {}},
    "data_efficiency": {"data_sampling": {"curriculum_learning": {}}, "data_routing": {"random_ltd": {}}},
    "timers": {"throughput": {}},
    "expert_parallel": {"enabled": False},
}


def _probe() -> dict[tuple[str, ...], Any]:
    """Every key that DeepSpeedConfig asks for, as a path, with the default it uses."""
    from deepspeed.runtime.config import DeepSpeedConfig, get_pipeline_config

    asked: dict[tuple[str, ...], Any] = {}
    with quiet_deepspeed():
        DeepSpeedConfig(_Asked(_SKELETON, (), asked))
        pipeline = get_pipeline_config({})
    asked.update({("pipeline", key): default for key, default in pipeline.items()})
    return asked
