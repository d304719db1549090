"""The training loop, one for every method: acco, dpu, wp, sync and DeepSpeed's own ZeRO-1 differ by their JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.utils.data import DataLoader

import megatron_acco
from megatron_acco.training import liveness
from megatron_acco.training.arguments import Arguments
from megatron_acco.training.batches import Batch, to_device
from megatron_acco.training.checkpoint import Checkpointer, Found, Saved, TrainState
from megatron_acco.training.control import Stop, StopVote, Verdict
from megatron_acco.training.evaluate import evaluate, masked_mean, masked_sum, token_losses
from megatron_acco.training.metrics import TrainingLog
from megatron_acco.training.token_weights import TokenWeights


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
    found: Found | None = None

    position: int = 0
    """With adaptive accumulation: micro-batches that this rank has done of its own stream of samples."""

    def finished(self, last: int) -> bool:
        """Whether the run is as long as it was to be. The same on all ranks at the same update.

        Args:
            last: its last update, if accumulation is fixed.
        """
        if self.arguments.adaptive:
            return self.state.consumed_train_samples >= self.arguments.train_samples
        return self.state.iteration >= last

    def count_samples(self) -> None:
        """Count the samples consumed, at the end of an update.

        With adaptive accumulation nobody knows how many micro-batches the others did before the commit is there: what
        counts is what has been committed, which all ranks know at the same update.
        """
        if self.arguments.adaptive:
            self.state.consumed_train_samples = self.engine.global_samples
        else:
            self.state.consumed_train_samples += self.arguments.global_batch_size

    def count_all_samples(self) -> None:
        """With adaptive accumulation: count those of the update in flight, too, after waiting for it."""
        if self.arguments.adaptive:
            megatron_acco.drain(self.engine)
            self.count_samples()

    def gather_positions(self) -> None:
        """Note how far every replica is in its stream. Collective."""
        places: list[Any] = [None] * dist.get_world_size()
        own = (parallel_state.get_data_parallel_rank(), self.position)
        dist.all_gather_object(places, own, group=self.control)
        self.state.micro_batches_by_rank = [position for _, position in sorted(set(places))]
        self.state.micro_batch_size = self.arguments.micro_batch_size


def train(run: Run, launcher: Sequence[int] = ()) -> Stop:
    """Train to the end of the run or to the first reason to stop. Collective over all ranks.

    Args:
        run: the run.
        launcher: see `StopVote`.

    Returns:
        Why training stopped; `Stop.NO` at its end, at the end of the data and at --exit-interval.
    """
    training, state = run.arguments.training, run.state
    liveness.describe(lambda: _progress(run))
    vote = StopVote(run.control, training.exit_duration_in_mins, launcher)
    batches = iter(run.train)
    stop = Stop.NO
    first, evaluated = state.iteration, state.iteration
    last = last_iteration(run)
    weights = None
    if run.arguments.per_token_loss:
        weights = TokenWeights(batches, run.arguments.num_microbatches, last - first, run.control)
    run.log.clock.resume()
    with vote.listening():
        while not run.finished(last) and stop is Stop.NO:
            learning_rate = train_update(run, batches, weights)
            state.iteration += 1
            run.count_samples()
            run.log.end_update(state, learning_rate)
            verdict = vote.exchange(run.checkpointer.progress(), run.checkpointer.iteration_in_flight)
            stop = verdict.stop
            settle_save(run, verdict)
            if _due(state, training.eval_interval) and stop is Stop.NO:
                validate(run)
                evaluated = state.iteration
            if _due(state, run.arguments.checkpoint.save_interval) and stop is Stop.NO:
                save(run, background=run.arguments.checkpoint.async_save)
            if _due(state, training.exit_interval):
                break
        late = vote.finish().stop
        if weights is not None:
            weights.finish()
        finished = run.finished(last)
        run.log.flush()
        if finished and stop is Stop.NO and state.iteration > first:
            if evaluated != state.iteration:
                validate(run)
            if run.test is not None:
                evaluate_and_log(run, "test", run.test)
        save(run)
        run.checkpointer.close()
        run.log.write_profile(at_end=True)
    if finished and last < run.arguments.train_iters and dist.get_rank() == 0:
        print(f" the data ends with iteration {last} of {run.arguments.train_iters}", flush=True)
    return Stop.NO if finished else max(stop, late)


def last_iteration(run: Run) -> int:
    """The last update that has all its micro-batches: data that ends in the middle of one must not begin it."""
    if run.arguments.adaptive:  # streams without end
        return run.arguments.train_iters
    whole = len(run.train) // run.arguments.num_microbatches
    return min(run.arguments.train_iters, run.state.iteration + whole)


def train_update(run: Run, batches: Iterator[Batch], weights: TokenWeights | None = None) -> float:
    """The micro-batches of one update on this rank.

    Args:
        run: the run.
        batches: this rank's micro-batches.
        weights: with per-token averaging; then it has the micro-batches.

    Returns:
        The learning rate of the update.
    """
    engine, learning_rate = run.engine, 0.0
    update = engine.global_steps
    per_token: float | None = None
    if weights is not None:
        own, per_token = weights.take()
        batches = iter(own)
    while engine.global_steps == update:
        if weights is not None:
            weights.read_ahead()
        batch = to_device(next(batches), engine.device)
        losses, mask = token_losses(engine, batch), batch["loss_mask"]
        loss = masked_mean(losses, mask) if per_token is None else masked_sum(losses, mask) * per_token
        engine.backward(loss)
        run.log.add_loss(loss)
        learning_rate = engine.get_lr()[0]
        engine.step()
        run.position += 1
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
    run.count_all_samples()
    started = time.perf_counter()
    with liveness.doing(f"evaluating at iteration {run.state.iteration}"):
        loss = evaluate(run.engine, loader, run.control)
    run.log.evaluation(kind, run.state, loss, time.perf_counter() - started, name)
    run.log.clock.resume()
    return loss


def save(run: Run, background: bool = False) -> None:
    """Save a checkpoint at this update. Not counted as training time.

    Args:
        run: the run.
        background: go on training while it is written.
    """
    run.log.clock.pause()
    started = time.perf_counter()
    run.log.flush()
    run.count_all_samples()
    if run.arguments.adaptive:
        run.gather_positions()
    else:
        run.state.micro_batches_by_rank = []  # of adaptive updates before
    run.log.note_time(run.state)
    with liveness.doing(f"saving a checkpoint at iteration {run.state.iteration}"):
        saved = run.checkpointer.start_save(run.state, background)
    held = time.perf_counter() - started
    _report_saved(run, saved, held)
    if run.checkpointer.iteration_in_flight is not None and dist.get_rank() == 0:
        print(
            f" saving checkpoint at iteration {run.state.iteration} beside training | training held for {held:.2f} s |",
            flush=True,
        )
    run.log.clock.resume()


def settle_save(run: Run, verdict: Verdict) -> None:
    """Make the checkpoint that was written beside training the one to resume from, once all ranks have written."""
    run.log.clock.pause()
    started = time.perf_counter()
    saved = run.checkpointer.settle(verdict)
    _report_saved(run, saved, time.perf_counter() - started)
    run.log.clock.resume()


def _report_saved(run: Run, saved: list[Saved], held: float) -> None:
    if dist.get_rank() != 0:
        return
    for one in saved:
        written = "" if one.writing_seconds is None else f" written in {one.writing_seconds:.2f} s |"
        saved_to = f" saved checkpoint at iteration {one.iteration} to {one.folder}"
        print(f"{saved_to} | training held for {held:.2f} s |{written}", flush=True)
    for notice in run.checkpointer.take_notices():
        print(f" NOTICE: {notice}", flush=True)


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
