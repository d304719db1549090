"""ZeRO stage 1 with the synchronous step replaced by overlapped estimate and commit rounds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_acco.config import AccoConfig
from megatron_acco.zero.access import link_parameters, unlink_parameters
from megatron_acco.zero.advice import Adviser
from megatron_acco.zero.buffers import GradBuffers, Slot
from megatron_acco.zero.coarse import CoarseExchange
from megatron_acco.zero.collectives import clone_group, give_back_group, group_limit
from megatron_acco.zero.estimate import capture_hyper_parameters
from megatron_acco.zero.lane import DeviceClock, Lane, Ticket
from megatron_acco.zero.levels import find_levels, lane_exchanges
from megatron_acco.zero.muon import base_optimizer
from megatron_acco.zero.parallel import TensorParallel
from megatron_acco.zero.report import RoundReport
from megatron_acco.zero.restoring import RestorableOptimizer
from megatron_acco.zero.rounds import Launch, Rounds
from megatron_acco.zero.schedule import RoundKind, RoundSpec, UpdatePlan, plan_update


class AccoZeroOptimizer(RestorableOptimizer):
    """DeepSpeed's stage 1 partitioning, master weights and checkpoints; ACCO's rounds.

    What the module shows to compute stands in `bit16_groups_flat` (DeepSpeed's flat weights, of which the parameters
    are views); theta is `single_partition_of_fp32_groups`. A finished round's weights wait in the lane's buffer until
    the next boundary installs them.

    Attributes:
        on_commit: called by the main thread when the outcome of a commit is known (set by the engine).
        lane: the background lane.
        clock: of compute and lane.
        adviser: follows the rounds.
        data_parallel_group: all data-parallel ranks; `dp_process_group`, DeepSpeed's, are those among which masters and
            optimizer state are cut.
        levels: the groups of ranks that make estimates, None if all do together.
    """

    def __init__(self, *args: Any, acco: AccoConfig, **kwargs: Any) -> None:
        """Positional and keyword arguments are DeepSpeed's, passed through untouched; `acco` is ours."""
        self.data_parallel_group = kwargs["dp_process_group"]
        self.levels = find_levels(acco.estimating_ranks, self.data_parallel_group)
        if self.levels is not None:
            kwargs["dp_process_group"] = self.levels.inner
        super().__init__(*args, **kwargs)
        known = (torch.float32, torch.bfloat16, torch.float16)
        if any(flat.dtype not in known for flat in self.bit16_groups_flat):
            dtypes = sorted({str(flat.dtype).removeprefix("torch.") for flat in self.bit16_groups_flat})
            raise ValueError(f"ACCO trains weights in float32, bfloat16 or float16, the model has {', '.join(dtypes)}")
        assert not self.partition_gradients and not self.cpu_offload, "checked by the engine before this point"
        if len(self.optimizer.param_groups) != len(self.bit16_groups):
            raise ValueError(
                f"DeepSpeed's ZeRO rebuilds {type(self.optimizer).__name__} with one parameter group, but there are "
                f"{len(self.bit16_groups)}; use one group, or AdamW"
            )
        self.acco = acco
        self.on_commit: Callable[[RoundReport], None] = lambda report: None
        self.update = 0
        self._steps = self.gradient_accumulation_steps
        self._plan: UpdatePlan | None = None
        self._in_update = 0
        self._since_boundary = 0
        self._half_done = False
        self._update_full = False
        self._spans: list[tuple[Any, Any]] = []
        self._forward_mark: Any = None
        self._half_loss_scale = 1.0
        self._losses_averaged = False
        self._skipped = None
        self._prepared = False
        self._ticket: Ticket[RoundReport] | None = None
        self._pending = None
        self._shows_real = True
        self._stash = None
        self._held_real = 0
        self._extras = None
        # A loop that never asks for them must not grow.
        self._reports: deque[RoundReport] = deque(maxlen=1024)
        self._buffers = GradBuffers(self.bit16_groups_flat, self._slots(), self.gradient_accumulation_dtype)
        self.clock = DeviceClock()
        self.adviser = Adviser(acco, self._steps)
        self.lane = Lane(f"acco-lane-{dist.get_rank()}", group_limit(self.dp_process_group))
        exchanges = lane_exchanges(self.data_parallel_group, self.levels, self.communication_data_type)
        self._own_groups, sharded = exchanges.groups, exchanges.estimate
        self._base = base_optimizer(self.optimizer, sharded, self._slots(), self.model_parallel_world_size)
        self._rounds = Rounds(
            exchanges,
            self._tensor_parallel(sharded.rank),
            self._base,
            self.single_partition_of_fp32_groups,
            self.clock,
            CoarseExchange(sharded, acco, self.bit16_groups_flat[0].device) if acco.coarse else None,
        )
        self._replica = self._replica_group() if acco.adaptive else None

    def _slots(self) -> list[Slot]:
        return [
            Slot(group, offset, param)
            for group, params in enumerate(self.round_robin_bit16_groups)
            for param, offset in zip(params, self.round_robin_bit16_offsets[group], strict=True)
        ]

    def _tensor_parallel(self, rank: int) -> TensorParallel:
        group = None
        if self.model_parallel_world_size > 1:
            group = clone_group(self.model_parallel_group)
            self._own_groups.append(group)
        partitions = [(rank * size, (rank + 1) * size) for size in self.partition_size]
        return TensorParallel(group, self._slots(), partitions)

    def _replica_group(self) -> dist.ProcessGroup | None:
        """Processes of one replica, in which its first rank says when a half is full: no device, no waiting for it."""
        if self.model_parallel_world_size == 1:
            return None
        self._own_groups.append(clone_group(self.model_parallel_group, "gloo"))
        return self._own_groups[-1]

    # ---- accumulation: called by the engine around each backward --------------------------------------------------

    def note_forward(self) -> None:
        """A forward pass that belongs to a micro-batch begins."""
        if self._forward_mark is None:
            self._forward_mark = self.clock.mark()

    def before_backward(self) -> None:
        """Point every gradient at the accumulating buffer."""
        self.lane.poll()
        if self._held_real:
            raise RuntimeError("backward inside real_parameters(): training goes on at other weights; leave it first")
        self.note_forward()  # of a caller who went around the engine's
        if not self._prepared:  # else a second output of the engine in the same graph
            self._buffers.before_backward()
        self._prepared = True

    def end_micro_batch(
        self, accumulation_steps: int, losses_averaged: bool = False, counts_if_empty: bool = True
    ) -> None:
        """Count one micro-batch; at the end of the first half hand its gradients over.

        Args:
            accumulation_steps: micro-batches per rank and update, by which the engine divided the loss.
            losses_averaged: the engine did not, because the caller sees to it that an update's losses add up to
                their average, however many micro-batches there are.
            counts_if_empty: a backward that brought no parameter a gradient is a micro-batch, too.

        Raises:
            RuntimeError: the micro-batches of an update differ in `losses_averaged`.
        """
        arrived = self._buffers.after_backward(self._prepared)
        self._prepared = False
        if not arrived and not counts_if_empty:
            return
        if self._in_update and losses_averaged != self._losses_averaged:
            raise RuntimeError("backward(scale_wrt_gas=...) must be the same for all micro-batches of an update")
        if losses_averaged and self.acco.adaptive:
            raise RuntimeError(
                "backward(scale_wrt_gas=False) needs to know how many micro-batches an update will have, which "
                '"accumulation": "adaptive" does not; use "fixed"'
            )
        self._losses_averaged = losses_averaged
        self._steps = accumulation_steps
        self._spans.append((self._forward_mark, self.clock.mark()))
        self._forward_mark = None
        if self._since_boundary == 0:
            self._half_loss_scale = float(self.loss_scale)
        self._in_update += 1
        self._since_boundary += 1
        plan = self._current_plan()
        if plan.half is not None and not self._half_done:
            assert plan.first_half is not None
            if self._is_full(plan.first_half):
                self._half_done = True
                self._boundary(plan.half, complete=False)
        elif self.acco.adaptive:
            self._update_full = self._is_full(self._steps - (plan.first_half or 0))

    def _is_full(self, least: int) -> bool:
        """Whether the half that is being accumulated ends here; `least` is its share of the configured update."""
        count = self._since_boundary
        if not self.acco.adaptive:
            return count == least
        if count < least:
            return False
        if count > 1:
            # An accelerator runs behind this thread, which must not decide on micro-batches that have not begun. With
            # the last one still queued, the device does not run dry.
            self.clock.wait(self._spans[-2][1])
        full = self._ticket is None or self._ticket.done() or count >= self.acco.max_micro_batches_per_half
        if self._replica is not None:
            flag = torch.tensor([int(full)], dtype=torch.int32)
            dist.broadcast(flag, group_src=0, group=self._replica)
            full = bool(flag.item())
        return full

    @property
    def update_full(self) -> bool:
        """Whether the update ends with the micro-batch just done (adaptive accumulation)."""
        return self._update_full

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """The full boundary: launch the commit of this update (replaces the base's synchronous step).

        Every rank launches the same rounds, whatever number of micro-batches it did: if the update ends before its
        half boundary (closed early, or no data on this rank), the first half is handed over here and the second
        is empty.
        """
        plan = self._current_plan()
        if plan.half is not None and not self._half_done:
            self._boundary(plan.half, complete=True)
        self._boundary(plan.full, complete=True)
        self.update += 1
        self._in_update, self._half_done, self._update_full, self._plan = 0, False, False, None
        # Not kept: the number of micro-batches may be changed before the next update begins.
        if plan.full.overlapped and not self._plan_next().full.overlapped:
            # Synchronous rounds take over: their gradients are those at theta.
            self.drain()
            self._tell_scaler()
            self._install()

    @property
    def micro_batches_in_update(self) -> int:
        """Micro-batches that this rank has accumulated for the update in progress."""
        return self._in_update

    def _current_plan(self) -> UpdatePlan:
        if self._plan is None:
            self._plan = self._plan_next()
        return self._plan

    def _plan_next(self) -> UpdatePlan:
        self.adviser.steps = self._steps
        mode, fraction = self.adviser.mode(self.update), self.adviser.fraction(self.update)
        return plan_update(self.acco, self.update, self._steps, mode, fraction)

    # ---- rounds ---------------------------------------------------------------------------------------------------

    def _boundary(self, spec: RoundSpec, complete: bool) -> None:
        self.show_for_compute()
        self.drain()
        self._tell_scaler()
        self._install()
        if spec.coarse:
            self._buffers.copy()
        else:
            self._buffers.swap()
        self._launch(spec, complete)
        if spec.coarse and self.loss_scale != self._half_loss_scale:
            # The sum goes on under another loss scale: in fp32, by powers of two, without loss.
            self._buffers.scale(float(self.loss_scale) / self._half_loss_scale)
            self._half_loss_scale = float(self.loss_scale)
        if not spec.overlapped:
            self.drain()
            self._tell_scaler()
            self._install()

    def _launch(self, spec: RoundSpec, complete: bool) -> None:
        launch = Launch(
            spec=spec,
            update=self.update,
            micro_batches=self._since_boundary,
            grad_scale=float(self._steps),
            loss_scale=self._half_loss_scale,
            averaged=complete and self._losses_averaged,
            hyper=capture_hyper_parameters(self.optimizer),
            clip=float(self.clip_grad),
            full_batch=self._full_batch(spec) if self.acco.lr_batch_scaling else None,
            compute_spans=tuple(self._spans),
            grads=self._buffers.handed_over,
            weights=self._buffers.gathered_weights(),
            shown=self.bit16_groups_flat,
        )
        self._since_boundary = 0
        self._spans.clear()
        label = f"the {spec.kind.value} round of update {self.update} on rank {dist.get_rank()}"
        self._ticket = self.lane.submit(label, lambda: self._rounds.run(launch))
        self._pending = spec
        if spec.kind is RoundKind.COMMIT:
            self._shows_real = False

    def _full_batch(self, spec: RoundSpec) -> float:
        """Micro-batches over the ranks of a round of `spec` if every rank did just its share."""
        first = self._current_plan().first_half
        if spec.kind is RoundKind.ESTIMATE and first is not None:
            return float(first * dist.get_world_size(self.dp_process_group))
        return float(self._steps * dist.get_world_size(self.data_parallel_group))

    def drain(self) -> None:
        """Wait for the round in flight and settle it; its weights are installed at the next boundary."""
        self.lane.poll()
        if self._ticket is None:
            return
        start = time.perf_counter()
        report = self._ticket.wait()
        report.wait_seconds = time.perf_counter() - start
        self._ticket = None
        self._rounds.read_clock(report)
        self.adviser.add(report)
        self._reports.append(report)
        if report.kind is RoundKind.COMMIT:
            self._settle(report)

    def _tell_scaler(self) -> None:
        """Tell the loss scaler once how the last commit went; only between halves, so that a half has one scale.

        Raises:
            Exception: DeepSpeed's, if the smallest loss scale overflows.
        """
        if self._skipped is not None:
            skipped, self._skipped = self._skipped, None
            self._update_scale(skipped)

    def _settle(self, report: RoundReport) -> None:
        self._global_grad_norm = report.grad_norm
        self._skipped = not report.applied
        if report.applied:
            # Fragments of the optimizer state exist from the first real step on.
            self._lazy_init_hp_params_optimizer_state()
        self.on_commit(report)

    def _install(self) -> None:
        """Show the weights of the finished round to compute."""
        if self._pending is None:
            return
        self._copy(self._buffers.gathered_weights(), self.bit16_groups_flat)
        self.forget_forwards()
        self._shows_real = self._pending.shows_real_parameters
        self._pending = None

    @property
    def forward_outstanding(self) -> bool:
        """Whether a forward pass was made whose backward has not come (yet)."""
        return self._forward_mark is not None

    def forget_forwards(self) -> None:
        """Make a backward of any earlier forward fail: weights are views that autograd does not see rewritten."""
        for slot in self._slots():
            torch.autograd.graph.increment_version(slot.param)

    def take_reports(self) -> list[RoundReport]:
        """Reports of the rounds finished since the last call."""
        reports = list(self._reports)
        self._reports.clear()
        return reports

    def memory_account(self) -> dict[str, int]:
        """Bytes of model state on this rank, by what they are for.

        Optimizer state that does not exist before the first step is counted as one or two moments, by the options.
        """

        def size(tensors: Iterable[Tensor]) -> int:
            return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

        masters = self.single_partition_of_fp32_groups
        state = size(v for s in self.optimizer.state.values() for v in s.values() if torch.is_tensor(v))
        if not state:
            for group, master in zip(self.optimizer.param_groups, masters, strict=True):
                state += (2 if "betas" in group else int(bool(group.get("momentum")))) * size([master])
        return {
            "weights": size(self.bit16_groups_flat),
            "gradients": size(self._buffers.accumulating) + size(self._buffers.handed_over),
            "master weights": size(masters),
            "optimizer state": state,
            "first half": self._rounds.kept_bytes,
            "exchange": self._rounds.exchange_bytes(self._buffers.handed_over),
        }

    @property
    def round_observer(self) -> Callable[[RoundSpec, int, list[Tensor], RoundReport], None] | None:
        """Called in the lane at the end of every round with this rank's slices of the gathered weights."""
        return self._rounds.observer

    @round_observer.setter
    def round_observer(self, observer: Callable[[RoundSpec, int, list[Tensor], RoundReport], None] | None) -> None:
        self._rounds.observer = observer

    # ---- access by name of parameter: see access.py -----------------------------------------------------------------

    def _link_all_hp_params(self) -> None:
        """As the base; what it hangs on the parameters waits for the lane."""
        super()._link_all_hp_params()
        link_parameters(self, self._slots())

    def overwrite_shown(self, slot: Slot, value: Tensor) -> None:
        """Write `value` into every copy of a parameter's weights on this rank: shown, waiting, put aside."""
        waiting = self._buffers.gathered_weights() if self._pending is not None else None
        for weights in (self.bit16_groups_flat, waiting, self._stash):
            if weights is not None:
                weights[slot.group].narrow(0, slot.offset, slot.param.numel()).copy_(value.detach().flatten())
        torch.autograd.graph.increment_version(slot.param)

    def gradient_parts(self, slot: Slot) -> tuple[Tensor, Tensor | None, int, int]:
        """The gradient sum of the update in progress, unscaled; nothing may be in flight.

        Returns:
            This rank's sum since the last hand-over [like the parameter] fp32; this rank's shard of what was handed
            over before in this update [partition], this rank's micro-batches in it; micro-batches in the first.
        """
        main_grad: Tensor = slot.param.main_grad  # type: ignore[attr-defined]
        local = main_grad.detach().float() / self._half_loss_scale
        kept, count = self._rounds.kept(slot.group)
        plan = self._current_plan()
        whole = plan.half is not None and plan.half.coarse
        return local, kept, count, self._in_update if whole else self._since_boundary

    def is_partial_gradient(self, param: torch.nn.Parameter) -> bool:
        """Whether the local gradient of `param` is completed over the tensor-parallel ranks at the hand-over."""
        marks = ("sequence_parallel", "average_gradients_across_tp_domain")
        return self.model_parallel_world_size > 1 and any(getattr(param, mark, False) for mark in marks)

    def averaging_factor(self, micro_batches: float) -> float:
        """From the sum over ranks of the gradients of `micro_batches` (of this update, on all ranks) to the average."""
        if self._losses_averaged and self._in_update >= self._steps:
            return 1.0 / dist.get_world_size(self.data_parallel_group)
        return self._steps / micro_batches

    def abandon(self) -> None:
        """Wait for the round in flight and forget it, with all gradients accumulated so far."""
        self.show_for_compute()
        self.drain()
        self._pending = None
        self._buffers.zero()
        self._rounds.forget_kept()
        self._in_update = self._since_boundary = 0
        self._spans.clear()
        self._forward_mark, self._update_full = None, False
        self._half_done, self._plan, self._extras, self._skipped = False, None, None, None

    # ---- what of the base must not happen ---------------------------------------------------------------------------

    def create_gradient_handling_hooks(self) -> None:
        """No reduction in backward. The end of a backward is seen by the engine's post-backward callback."""

    def backward_epilogue(self, *args: Any, **kwargs: Any) -> None:
        """The base would move gradients into attributes of its own; ours are in the buffers already."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The base would detach the gradients from the buffers, which are zeroed when they are handed over."""

    def _clear_param_grad_only(self) -> None:
        """As `zero_grad`."""

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the base would move masters and weights away from under the lane."""
        raise NotImplementedError("offload_states is not supported under ACCO; remove the call")

    def keep_groups(self) -> None:
        """Leave no process group to the next engine: it takes them in the order in which they come back."""
        self._own_groups.clear()

    def destroy(self) -> None:
        """Close the lane and detach the parameters, then what the base does."""
        self.lane.close()
        if self.lane.idle and not self.lane.failed:
            while self._own_groups:
                give_back_group(self._own_groups.pop())
        self._buffers.release()
        super().destroy()
        unlink_parameters(self._slots())
