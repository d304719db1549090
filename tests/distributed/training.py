"""Small trainings for the distributed tests: model, data, engine, and a recorder of every round.

`Run` describes a training as data, `train` (a job, on every rank) carries it out and returns what each round left on
that rank, `assemble` puts the ranks' shards together by parameter name. What the oracle says to it: reference.py.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.oracle import Params

LR, WEIGHT_DECAY = (1e-2, 3e-3), (0.1, 0.0)
"""Of the group of matrices and of the group of vectors."""
BETAS, EPS, MOMENTUM = (0.9, 0.95), 1e-6, 0.9


class Lion(torch.optim.Optimizer):
    """A torch optimizer that the product has no special case for."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = BETAS, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["calls"] = torch.zeros_like(p), 0
                state["calls"] += 1
                beta1, beta2 = group["betas"]
                direction = torch.sign(beta1 * state["exp_avg"] + (1 - beta1) * p.grad)
                p.add_(direction + group["weight_decay"] * p, alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Net(nn.Module):
    """Two-layer tanh MLP with a mean squared loss; odd sizes, so that every partition has padding."""

    def __init__(self, sizes: Sequence[int] = (5, 7, 2), seed: int = 1, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)).to(dtype)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return (self.layers[-1](x) - y).float().pow(2).mean()


def batch(update: int, rank: int, micro: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Micro-batch `micro` of an update on a rank: 4 samples."""
    generator = torch.Generator().manual_seed(1_000_003 * update + 1009 * rank + micro + 17)
    x = torch.randn(4, 5, generator=generator)
    y = torch.randn(4, 2, generator=generator) + x[:, :2]
    return x.to(dtype), y.to(dtype)


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices and vectors, each with its own learning rate and decay."""
    parts = [[p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() <= 1]]
    return [{"params": p, "lr": LR[i], "weight_decay": WEIGHT_DECAY[i]} for i, p in enumerate(parts)]


RULES = {
    "torch_adamw": "adamw",
    "ds_adamw": "adamw",
    "cpu_adamw": "adamw",
    "torch_adam": "adam",
    "ds_adam": "adam",
    "cpu_adam": "adam",
    "sgd": "sgd",
    "lion": "lion",
}
OPTIMIZERS = tuple(RULES)


def client_optimizer(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
    """The optimizer object that the user hands over; None if the JSON names it."""
    adam = {"lr": LR[0], "betas": BETAS, "eps": EPS}
    if name == "torch_adamw":
        return torch.optim.AdamW(groups, **adam)
    if name == "torch_adam":
        return torch.optim.Adam(groups, **adam)
    if name in ("cpu_adamw", "cpu_adam"):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, adamw_mode=name == "cpu_adamw", **adam)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=LR[0], momentum=MOMENTUM)
    if name == "lion":
        return Lion(groups, lr=LR[0])
    return None


def json_config(
    mode: str | None, *, gas: int = 4, clip: float = 0.0, optimizer: str | None = None, **extra: Any
) -> dict[str, Any]:
    """A DeepSpeed JSON of ZeRO stage 1. `mode` None leaves the acco section out."""
    acco = extra.pop("acco", {})
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": 1, **extra.pop("zero", {})},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **extra,
    }
    params = {"lr": LR[0], "betas": list(BETAS), "eps": EPS}
    if optimizer == "ds_adamw":
        config["optimizer"] = {"type": "AdamW", "params": params}
    elif optimizer == "ds_adam":
        config["optimizer"] = {"type": "Adam", "params": {**params, "adam_w_mode": False}}
    if mode is not None:
        config["acco"] = {"mode": mode, **acco}
    return config


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        mode: acco mode, or None for DeepSpeed's own ZeRO-1.
        optimizer: one of OPTIMIZERS.
        acco: further keys of the acco section.
        extra: further keys of the JSON.
        delay_seed: if set, the lane sleeps 0 to 0.3 s before each round, by rank and seed.
    """

    mode: str | None
    optimizer: str = "torch_adamw"
    updates: int = 12
    gas: int = 4
    clip: float = 0.0
    bf16: bool = False
    acco: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    model_seed: int = 1
    delay_seed: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    def config(self) -> dict[str, Any]:
        extra = {**self.extra, **({"bf16": {"enabled": True}} if self.bf16 else {})}
        kinds = {"gas": self.gas, "clip": self.clip, "optimizer": self.optimizer}
        return json_config(self.mode, acco=self.acco, **kinds, **extra)


@dataclass
class Round:
    """What one round left behind; arrays are this rank's shards (a list per group) or, assembled, dicts by name."""

    kind: str
    update: int
    shown: Any
    masters: Any
    state: Any
    steps: list[Any]
    grad_norm: float
    micro_batches: int
    applied: bool
    lr: float
    bytes_sent: int


def start(
    model: nn.Module, config: dict[str, Any], optimizer: Any = None, groups: Any = None, **kwargs: Any
) -> tuple[Any, Any]:
    """initialize -> engine, optimizer. A JSON without an acco section goes to DeepSpeed itself, past the product."""
    import deepspeed

    initialize = deepspeed.initialize
    if "acco" in config:
        import megatron_acco

        initialize = megatron_acco.initialize
    parameters = None if optimizer is not None else (groups or parameter_groups(model))
    engine, zero, _, _ = initialize(
        model=model, optimizer=optimizer, model_parameters=parameters, config=config, **kwargs
    )
    return engine, zero


@contextlib.contextmanager
def engine_for(model: nn.Module, config: dict[str, Any], optimizer: Any = None, **kwargs: Any) -> Iterator[Any]:
    """(engine, optimizer) of `start`, destroyed at the end."""
    engine, zero = start(model, config, optimizer, **kwargs)
    try:
        yield engine, zero
    finally:
        engine.destroy()


@contextlib.contextmanager
def running(run: Run, **kwargs: Any) -> Iterator[Any]:
    """(engine, optimizer) for `run`, destroyed at the end."""
    model = Net(seed=run.model_seed, dtype=run.dtype)
    with engine_for(model, run.config(), client_optimizer(run.optimizer, parameter_groups(model)), **kwargs) as pair:
        if run.delay_seed is not None:
            delay_lane(pair[1], run.delay_seed)
        yield pair


def delay_lane(zero: Any, seed: int, longest: float = 0.3) -> None:
    """Sleep before each round in the lane thread, differently on each rank."""
    import time

    generator = np.random.default_rng(1000 * seed + torch.distributed.get_rank())
    zero.lane.before_round = lambda label: time.sleep(longest * generator.random())


def one_update(engine: Any, update: int, data: Callable[..., Any] = batch, dtype: torch.dtype = torch.float32) -> None:
    """The user's loop for one update."""
    rank = torch.distributed.get_rank()
    for micro in range(engine.gradient_accumulation_steps()):
        loss = engine(*data(update, rank, micro, dtype))
        engine.backward(loss)
        engine.step()


def numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy as numpy (bfloat16 widened)."""
    return tensor.detach().float().cpu().numpy().copy()


def shards(zero: Any) -> tuple[list[np.ndarray], list[dict[str, np.ndarray]], list[Any]]:
    """Copies of this rank's masters, moments and step counts, a list entry per group."""
    # DeepSpeed's BF16_Optimizer has other names for the same.
    partitions = getattr(zero, "single_partition_of_fp32_groups", None) or zero.fp32_groups_flat_partition
    masters = [numpy(p) for p in partitions]
    states, steps = [], []
    for p, group in zip(partitions, zero.optimizer.param_groups, strict=True):
        state = zero.optimizer.state.get(p, {})
        states.append({k: numpy(v) for k, v in state.items() if torch.is_tensor(v) and v.numel() == p.numel() > 1})
        counters = {k: float(v) for k, v in state.items() if k not in states[-1] and v is not None}
        steps.append({**counters, **({"group_step": float(group["step"])} if "step" in group else {})})
    return masters, states, steps


def record_rounds(zero: Any) -> list[Round]:
    """Fill the returned list with a Round at the end of every round (in the lane thread)."""
    rounds: list[Round] = []

    def observe(spec: Any, update: int, shown: list[torch.Tensor], report: Any) -> None:
        masters, state, steps = shards(zero)
        rounds.append(
            Round(
                kind=spec.kind.value,
                update=update,
                shown=[numpy(s) for s in shown],
                masters=masters,
                state=state,
                steps=steps,
                grad_norm=float(report.grad_norm),
                micro_batches=report.micro_batches,
                applied=report.applied,
                lr=report.learning_rate,
                bytes_sent=report.bytes_sent,
            )
        )

    zero.round_observer = observe
    return rounds


def layout(engine: Any, zero: Any) -> list[list[tuple[str, int, tuple[int, ...]]]]:
    """Per group: (name, offset in the flat group, shape) of its parameters."""
    names = {p: name for name, p in engine.module.named_parameters()}
    result = []
    own = hasattr(zero, "bit16_groups")
    groups = (zero.bit16_groups_flat, zero.bit16_groups) if own else (zero.bf16_groups_flat, zero.bf16_groups)
    for flat, params in zip(*groups, strict=True):
        origin, size = flat.data_ptr(), flat.element_size()
        offsets = [(p.data_ptr() - origin) // size if p.numel() else 0 for p in params]
        result.append([(names[p], o, tuple(p.shape)) for p, o in zip(params, offsets, strict=True)])
    return result


def train(run: Run) -> tuple[list[Round], list[Any]]:
    """Job: the training `run`; every round of this rank, and the layout."""
    with running(run) as (engine, zero):
        return run_updates(engine, zero, range(run.updates), dtype=run.dtype)


def train_model(
    make_model: Callable[[], nn.Module],
    config: dict[str, Any],
    updates: int,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    data: Callable[..., Any] = batch,
) -> tuple[list[Round], list[Any]]:
    """Job: as `train`, for another model, optimizer or data (functions at module level)."""
    model = make_model()
    with engine_for(model, config, make_optimizer(model)) as (engine, zero):
        return run_updates(engine, zero, range(updates), data)


def run_updates(
    engine: Any,
    zero: Any,
    updates: Iterable[int],
    data: Callable[..., Any] = batch,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[Round], list[Any]]:
    """The user's loop over whole updates, drained at the end; this rank's rounds and the layout."""
    ours = "acco" in engine.config
    rounds = record_rounds(zero) if ours else []
    for update in updates:
        one_update(engine, update, data, dtype)
        if not ours:
            masters, state, steps = shards(zero)
            norm = float(engine.get_global_grad_norm() or 0.0)
            rounds.append(Round("commit", update, masters, masters, state, steps, norm, 0, True, 0.0, 0))
    drain(engine)
    return rounds, layout(engine, zero)


def drain(engine: Any) -> None:
    """Settle what is in flight (nothing is, in DeepSpeed's own engine)."""
    if "acco" in engine.config:
        import megatron_acco

        megatron_acco.drain(engine)


def named(parts: Sequence[Sequence[np.ndarray]], where: list[Any]) -> Params:
    """Shards of all ranks (rank, group) -> arrays by parameter name. Asserts that padding is zero."""
    result: Params = {}
    for index, group in enumerate(where):
        flat = np.concatenate([rank[index] for rank in parts])
        padding = np.ones(len(flat), dtype=bool)
        for name, offset, shape in group:
            size = int(np.prod(shape))
            result[name] = flat[offset : offset + size].reshape(shape)
            padding[offset : offset + size] = False
        assert not flat[padding].any(), "padding is not zero"
    return result


def assemble(per_rank: Sequence[tuple[list[Round], list[Any]]]) -> list[Round]:
    """Rounds of all ranks -> rounds with whole tensors by name. Asserts that the ranks agree on the figures."""
    where = per_rank[0][1]
    result = []
    for ranks in zip(*(rounds for rounds, _ in per_rank), strict=True):
        first = ranks[0]
        for other in ranks:
            for figure in ("kind", "update", "micro_batches", "applied", "lr", "steps", "grad_norm"):
                a, b = getattr(first, figure), getattr(other, figure)
                assert a == b or (a != a and b != b), (figure, a, b)
        moments = sorted({key for r in ranks for state in r.state for key in state})
        state = {key: named([[s[key] for s in r.state] for r in ranks], where) for key in moments}
        whole = {
            "shown": named([r.shown for r in ranks], where),
            "masters": named([r.masters for r in ranks], where),
            "state": state,
        }
        result.append(Round(**{**vars(first), **whole}))
    return result
