"""The training loop, one for every method: acco, dpu, wp, sync and DeepSpeed's own ZeRO-1 differ by their JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from megatron_acco.training.arguments import Arguments
from megatron_acco.training.batches import Batch, to_device
from megatron_acco.training.checkpoint import Checkpointer, TrainState
from megatron_acco.training.control import Stop, StopVote
from megatron_acco.training.evaluate import evaluate, masked_mean, token_losses
from megatron_acco.training.metrics import TrainingLog


@dataclass
class Run:
    """The parts of a run, ready to train."""

    arguments: Arguments
    engine: Any
    state: TrainState
    train: DataLoader[Batch]
    validation: dict[str, DataLoader[Batch]]
    test: DataLoader[Batch] | None
    log: TrainingLog
    checkpointer: Checkpointer
    control: dist.ProcessGroup


def train(run: Run) -> Stop:
    """Train to the end of the run or to the first reason to stop. Collective over all ranks.

    Returns:
        Why training stopped; `Stop.NO` at its end and at --exit-interval.
    """
    training, state = run.arguments.training, run.state
    vote = StopVote(run.control, training.exit_duration_in_mins)
    batches = iter(run.train)
    stop = Stop.NO
    first, evaluated = state.iteration, state.iteration
    run.log.clock.resume()
    with vote.listening():
        while state.iteration < run.arguments.train_iters and stop is Stop.NO:
            learning_rate = train_update(run, batches)
            state.iteration += 1
            state.consumed_train_samples += run.arguments.global_batch_size
            run.log.end_update(state, learning_rate)
            stop = vote.exchange()
            if _due(state, training.eval_interval) and stop is Stop.NO:
                validate(run)
                evaluated = state.iteration
            if _due(state, run.arguments.checkpoint.save_interval) and stop is Stop.NO:
                save(run)
            if _due(state, training.exit_interval):
                break
        late = vote.finish()
        finished = state.iteration >= run.arguments.train_iters
        run.log.flush()
        if finished and stop is Stop.NO and state.iteration > first:
            if evaluated != state.iteration:
                validate(run)
            if run.test is not None:
                evaluate_and_log(run, "test", run.test)
        save(run)
    return Stop.NO if finished else max(stop, late)


def train_update(run: Run, batches: Iterator[Batch]) -> float:
    """The micro-batches of one update on this rank.

    Returns:
        The learning rate of the update.
    """
    engine, learning_rate = run.engine, 0.0
    for _ in range(run.arguments.num_microbatches):
        batch = to_device(next(batches), engine.device)
        loss = masked_mean(token_losses(engine, batch), batch["loss_mask"])
        engine.backward(loss)
        run.log.add_loss(loss)
        learning_rate = engine.get_lr()[0]
        engine.step()
    return learning_rate


def validate(run: Run) -> None:
    """Evaluate every validation set and log its loss; of several sets, their mean as well."""
    losses = [evaluate_and_log(run, "validation", loader, name) for name, loader in run.validation.items()]
    if not losses:
        return
    mean = sum(losses) / len(losses)
    run.state.best_validation_loss = min(run.state.best_validation_loss, mean)
    if len(losses) > 1 or "" not in run.validation:
        # The mean over the sets, each with the same weight, is what curves and comparisons read.
        run.log.evaluation("validation", run.state, mean, 0.0)


def evaluate_and_log(run: Run, kind: str, loader: DataLoader[Batch], name: str = "") -> float:
    """Evaluate at the real parameters and log the result. Not counted as training time.

    Returns:
        The loss.
    """
    run.log.clock.pause()
    run.log.flush()
    started = time.perf_counter()
    loss = evaluate(run.engine, loader, run.control)
    run.log.evaluation(kind, run.state, loss, time.perf_counter() - started, name)
    run.log.clock.resume()
    return loss


def save(run: Run) -> None:
    """Save a checkpoint at this update. Not counted as training time."""
    run.log.clock.pause()
    run.log.flush()
    run.log.note_time(run.state)
    folder = run.checkpointer.save(run.state)
    if folder is not None and dist.get_rank() == 0:
        print(f" saved checkpoint at iteration {run.state.iteration} to {folder}", flush=True)
    run.log.clock.resume()


def _due(state: TrainState, interval: int | None) -> bool:
    return bool(interval) and state.iteration % interval == 0  # type: ignore[operator]
