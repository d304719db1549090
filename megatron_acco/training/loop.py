"""The training loop, one for every method: acco, dpu, wp, sync and DeepSpeed's own ZeRO-1 differ by their JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

import megatron_acco
from megatron_acco.training import liveness
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
    validation: DataLoader[Batch] | None
    test: DataLoader[Batch] | None
    log: TrainingLog
    checkpointer: Checkpointer
    control: dist.ProcessGroup

    @property
    def finished(self) -> bool:
        """Whether the run is as long as it was to be. The same on all ranks at the same update."""
        if self.arguments.adaptive:
            return self.state.consumed_train_samples >= self.arguments.train_samples
        return self.state.iteration >= self.arguments.train_iters

    def count_samples(self) -> None:
        """Count the samples consumed, at the end of an update.

        With adaptive accumulation nobody knows how many micro-batches the others did before the commit is there: what
        counts is what has been committed, which all ranks know at the same update.
        """
        if self.arguments.adaptive:
            self.state.consumed_train_samples = self.engine.global_samples
        else:
            self.state.consumed_train_samples += self.arguments.global_batch_size


def train(run: Run) -> Stop:
    """Train to the end of the run or to the first reason to stop. Collective over all ranks.

    Returns:
        Why training stopped; `Stop.NO` at its end and at --exit-interval.
    """
    training, state = run.arguments.training, run.state
    liveness.describe(lambda: _progress(run))
    vote = StopVote(run.control, training.exit_duration_in_mins)
    batches = iter(run.train)
    stop = Stop.NO
    first, evaluated = state.iteration, state.iteration
    run.log.clock.resume()
    with vote.listening():
        while not run.finished and stop is Stop.NO:
            learning_rate = train_update(run, batches)
            state.iteration += 1
            run.count_samples()
            run.log.end_update(state, learning_rate)
            stop = vote.exchange()
            if _due(state, training.eval_interval) and stop is Stop.NO:
                evaluate_and_log(run, "validation", run.validation)
                evaluated = state.iteration
            if _due(state, run.arguments.checkpoint.save_interval) and stop is Stop.NO:
                save(run)
            if _due(state, training.exit_interval):
                break
        late = vote.finish()
        finished = run.finished
        run.log.flush()
        if finished and stop is Stop.NO and state.iteration > first:
            if evaluated != state.iteration:
                evaluate_and_log(run, "validation", run.validation)
            evaluate_and_log(run, "test", run.test)
        save(run)
        run.log.write_profile(at_end=True)
    return Stop.NO if finished else max(stop, late)


def train_update(run: Run, batches: Iterator[Batch]) -> float:
    """The micro-batches of one update on this rank.

    Returns:
        The learning rate of the update.
    """
    engine, learning_rate = run.engine, 0.0
    update = engine.global_steps
    while engine.global_steps == update:
        batch = to_device(next(batches), engine.device)
        loss = masked_mean(token_losses(engine, batch), batch["loss_mask"])
        engine.backward(loss)
        run.log.add_loss(loss)
        learning_rate = engine.get_lr()[0]
        engine.step()
    return learning_rate


def evaluate_and_log(run: Run, kind: str, loader: DataLoader[Batch] | None) -> None:
    """Evaluate at the real parameters and log the result. Not counted as training time."""
    if loader is None:
        return
    run.log.clock.pause()
    run.log.flush()
    started = time.perf_counter()
    with liveness.doing(f"evaluating at iteration {run.state.iteration}"):
        loss = evaluate(run.engine, loader, run.control)
    if kind == "validation":
        run.state.best_validation_loss = min(run.state.best_validation_loss, loss)
    run.log.evaluation(kind, run.state, loss, time.perf_counter() - started)
    run.log.clock.resume()


def save(run: Run) -> None:
    """Save a checkpoint at this update. Not counted as training time."""
    run.log.clock.pause()
    run.log.flush()
    if run.arguments.adaptive:
        megatron_acco.drain(run.engine)
        run.count_samples()
    run.log.note_time(run.state)
    with liveness.doing(f"saving a checkpoint at iteration {run.state.iteration}"):
        folder = run.checkpointer.save(run.state)
    if folder is not None and dist.get_rank() == 0:
        print(f" saved checkpoint at iteration {run.state.iteration} to {folder}", flush=True)
    run.log.clock.resume()


def _progress(run: Run) -> str:
    """What training is at. Called by another thread."""
    optimizer = run.engine.optimizer
    if not isinstance(run.engine, megatron_acco.AccoEngine):
        return f"computing update {run.engine.global_steps}"
    part = f"computing micro-batch {optimizer.micro_batches_in_update} of update {optimizer.update}"
    label = optimizer.lane.outstanding_label
    return part if label is None else f"{part} beside {label}"


def _due(state: TrainState, interval: int | None) -> bool:
    return bool(interval) and state.iteration % interval == 0  # type: ignore[operator]
