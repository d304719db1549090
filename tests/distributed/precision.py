"""Trainings in bf16 and fp16: the product's side (a job with faults injected into gradients), and the oracle's.

The oracle's gradients are those of the same model in the same dtype, on the weights as compute is shown them (rounded
to that dtype), so that what a comparison shows is the rounds and not the rounding of a matrix product. Sums, unscaling,
averages, clipping and the optimizer are the oracle's own, in float64.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.func import functional_call

from tests.distributed.reference import oracle_for
from tests.distributed.training import (
    Net,
    Round,
    Run,
    batch,
    client_optimizer,
    engine_for,
    layout,
    parameter_groups,
    record_rounds,
)
from tests.oracle import Array, Oracle, Params

Fault = tuple[int, int, int, float]
"""(update, rank, micro-batch, value): one element of that gradient becomes the value."""
FAULTY = ("layers.0.weight", (1, 2))


@contextlib.contextmanager
def fp16_allowed() -> Iterator[None]:
    """Let DeepSpeed train in fp16 on a CPU whose matrix library has no fp16 (torch computes in it all the same)."""
    from deepspeed.accelerator import get_accelerator

    kind = type(get_accelerator())
    original = kind.is_fp16_supported
    kind.is_fp16_supported = lambda self: True
    try:
        yield
    finally:
        kind.is_fp16_supported = original


@dataclass
class Trace:
    """What `train_with_faults` returns.

    Attributes:
        rounds, where: as `train`.
        scales: the loss scale of every micro-batch, a list per update.
        skipped: engine.skipped_steps after each update, and at the end (drained).
        applied: was_step_applied() after each step().
        rates: learning rate after each step().
        error: the message that ended the training, if one did.
    """

    rounds: list[Round]
    where: list[Any]
    scales: list[list[float]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    error: str = ""


def train_with_faults(run: Run, faults: Sequence[Fault] = (), dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    """Job: the training `run` of a model of `dtype` with values injected into gradients; ends at the first error."""
    import megatron_acco

    rank, model, inject = torch.distributed.get_rank(), Net(seed=run.model_seed, dtype=dtype), [0.0]
    optimizer = client_optimizer(run.optimizer, parameter_groups(model))
    with fp16_allowed(), engine_for(model, run.config(), optimizer, **kwargs) as (engine, zero):
        trace = Trace(record_rounds(zero), layout(engine, zero))
        dict(engine.module.named_parameters())[FAULTY[0]].register_hook(lambda grad: faulty(grad, inject[0]))
        try:
            for update in range(run.updates):
                trace.scales.append([])
                for micro in range(run.gas):
                    here = [value for *where, value in faults if where == [update, rank, micro]]
                    inject[0] = here[0] if here else 0.0
                    trace.scales[-1].append(float(zero.loss_scale))
                    engine.backward(engine(*batch(update, rank, micro, dtype)))
                    engine.step()
                    trace.applied.append(engine.was_step_applied())
                trace.skipped.append(engine.skipped_steps)
                trace.rates.append(engine.get_lr()[0])
            megatron_acco.drain(engine)
            trace.skipped.append(engine.skipped_steps)
        except Exception as error:
            trace.error = f"{type(error).__name__}: {error}"
        return trace


def faulty(grad: torch.Tensor, value: float) -> torch.Tensor:
    """`grad` with one element replaced, unless the value is 0."""
    if value == 0.0:
        return grad
    grad = grad.clone()
    grad[FAULTY[1]] = value
    return grad


def low_precision_gradient(run: Run, dtype: torch.dtype, faults: Sequence[Fault] = ()) -> Callable[..., Params]:
    """The oracle's gradient callback: of loss / gas * scale, computed in `dtype` as the engine does."""
    model = Net(seed=run.model_seed, dtype=dtype)

    def gradient(weights: Params, update: int, rank: int, micro: int, scale: float = 1.0) -> Params:
        leaves = {n: torch.tensor(w).float().to(dtype).requires_grad_() for n, w in weights.items()}
        loss = functional_call(model, leaves, batch(update, rank, micro, dtype)) / run.gas * scale
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        for *where, value in faults:
            if where == [update, rank, micro]:
                grads[FAULTY[0]] = faulty(grads[FAULTY[0]], value)
        return {name: grad.double().numpy() for name, grad in grads.items()}

    return gradient


def rounded(dtype: torch.dtype) -> Callable[[Array], Array]:
    """Rounding to the nearest number of `dtype`, as float64."""
    return lambda array: torch.from_numpy(np.asarray(array)).float().to(dtype).double().numpy()


def low_precision_oracle(
    run: Run,
    ranks: int,
    dtype: torch.dtype,
    faults: Sequence[Fault] = (),
    accumulate: torch.dtype = torch.float32,
    wire: torch.dtype | None = None,
    **options: Any,
) -> Oracle:
    """The oracle of a training in `dtype` whose gradients are summed in `accumulate` and travel in `wire`."""
    oracle = oracle_for(run, ranks, **options)
    oracle.theta = {name: rounded(dtype)(value) for name, value in oracle.theta.items()}  # DeepSpeed's masters, too
    oracle.__post_init__()
    oracle.gradient = low_precision_gradient(run, dtype, faults)
    to_sum, to_wire = rounded(accumulate), rounded(wire or dtype)
    oracle.add = np.errstate(invalid="ignore")(lambda total, grad: to_sum(total + grad))
    oracle.wire = (lambda total: to_wire(total) * run.gas) if ranks > 1 else (lambda total: total * run.gas)
    return oracle


def fp16_section(scale_power: int = 8, **section: Any) -> dict[str, Any]:
    """An fp16 section with dynamic loss scaling that reacts to the first overflow."""
    dynamic = {"initial_scale_power": scale_power, "hysteresis": 1, "loss_scale_window": 1000}
    return {"fp16": {"enabled": True, **dynamic, **section}}


def finite_or_equal(a: float, b: float, tolerance: float) -> bool:
    """Whether two norms agree; a skipped update has none."""
    return (not math.isfinite(a) and not math.isfinite(b)) or abs(a - b) <= tolerance * abs(b)
