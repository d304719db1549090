"""AccoEngine and the two ways in. The only contact with DeepSpeedEngine."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager as ContextManager
from contextlib import nullcontext
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups, log_dist

from megatron_acco.config import AccoConfig, acco_config
from megatron_acco.ds_json.optimizers import check_acco_optimizer_object
from megatron_acco.ds_json.precision import check_device
from megatron_acco.ds_json.support import check_acco_support
from megatron_acco.shared_memory import release_shared_memory
from megatron_acco.zero.checkpoint import CheckpointEngine
from megatron_acco.zero.optimizer import AccoZeroOptimizer
from megatron_acco.zero.report import RoundReport


class AccoEngine(CheckpointEngine):
    """DeepSpeedEngine whose ZeRO stage 1 optimizer works in ACCO rounds. The user's loop is unchanged.

    Raises:
        ValueError: at construction, if the JSON asks for something that does not go together with `acco`.
    """

    lr_scheduler: Any

    def __init__(self, *args: Any, config_class: Any, **kwargs: Any) -> None:
        config = acco_config(config_class._param_dict)
        assert config is not None, "built for an enabled acco section only"
        check_acco_support(config_class._param_dict)
        check_device(config_class._param_dict)
        config.check_accumulation_steps(config_class.gradient_accumulation_steps)
        self.acco: AccoConfig = config
        self._held_scheduler: Any = None
        self._lr_kwargs: dict[int, dict[str, Any] | None] = {}
        self._last_applied = True
        self._skipped_in_a_row = 0
        self._forward_was_real = False
        self._losses_averaged = False
        super().__init__(*args, config_class=config_class, **kwargs)
        if type(self.optimizer) is not AccoZeroOptimizer:
            raise ValueError(
                f'the "acco" section asks for ACCO, but DeepSpeed built {type(self.optimizer).__name__}; '
                f"give an optimizer in the JSON or to initialize(), and ZeRO stage 1"
            )
        self.optimizer.on_commit = self._commit_settled
        log_dist(
            f"ACCO is active: mode {config.mode.value}, optimizer {type(self.optimizer.optimizer).__name__}, "
            f"{self.gradient_accumulation_steps()} micro-batches per rank and update"
            + ("" if (levels := self.optimizer.levels) is None else f", estimates {levels}"),
            ranks=[0],
        )

        account = self.optimizer.memory_account()
        parts = ", ".join(f"{what} {bytes_ / 2**20:,.1f}" for what, bytes_ in account.items())
        log_dist(f"ACCO model state per rank (MiB): {parts}; in all {sum(account.values()) / 2**20:,.1f}", ranks=[0])

    # ---- construction -----------------------------------------------------------------------------------------------

    def _set_distributed_vars(self, args: Any) -> None:
        """As the base; refuses what rounds cannot do before the model is moved or flattened, and groups are made."""
        super()._set_distributed_vars(args)
        self._check_same_on_all_ranks()
        size = groups._get_sequence_parallel_world_size()
        if size > 1:
            raise ValueError(
                f"acco does not support DeepSpeed's (Ulysses) sequence parallelism, got size {size}; "
                f'remove it, or the "acco" section'
            )

    def _check_same_on_all_ranks(self) -> None:
        """Ranks that split or scale their updates differently would be averaged wrongly without any error."""
        mine = {"gradient_accumulation_steps": self.gradient_accumulation_steps()}
        mine |= {f"acco.{key}": value for key, value in dataclasses.asdict(self.acco).items()}
        others: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(others, mine)
        for key, value in mine.items():
            values = [other[key] for other in others]
            if any(other != value for other in values):
                raise ValueError(f'"{key}" must be the same on all ranks; by rank it is {values}')

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """As the base, but gradients are summed in fp32 unless `data_types.grad_accum_dtype` says otherwise."""
        model, gradients = super().get_data_types()
        return model, torch.float32 if self._config.grad_accum_dtype is None else gradients

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """As the base, without parameters of zero elements: they have no fragment in any partition."""
        if isinstance(client_optimizer, torch.optim.Optimizer):
            for group in client_optimizer.param_groups:
                group["params"] = _without_empty(group["params"])
        for param in self.module.parameters():
            # DeepSpeed goes by the names of other libraries; megatron-core marks its embeddings and its output layer.
            if getattr(param, "is_embedding_or_output_parameter", False):
                param.use_muon = False
        super()._configure_optimizer(client_optimizer, _without_empty(model_parameters))

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> str | None:
        """As the base, which sends bf16 with fp32 gradient accumulation to another optimizer class."""
        check_acco_optimizer_object(basic_optimizer)
        wrapper = super()._do_optimizer_sanity_check(basic_optimizer)
        return deepspeed_engine.ZERO_OPTIMIZATION if wrapper == deepspeed_engine.BFLOAT16 else wrapper

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        """As the base, which builds the class that its module calls DeepSpeedZeroOptimizer."""
        original = deepspeed_engine.DeepSpeedZeroOptimizer
        deepspeed_engine.DeepSpeedZeroOptimizer = partial(AccoZeroOptimizer, acco=self.acco)
        try:
            return super()._configure_zero_optimizer(optimizer)
        finally:
            deepspeed_engine.DeepSpeedZeroOptimizer = original

    def _configure_distributed_model(self, model: Any) -> None:
        """As the base; a state dict of the module is of theta_t, whoever asks for it."""
        if model._state_dict_pre_hooks:
            model.state_dict()  # makes an earlier engine that trained this module put theta there, not its estimate
        super()._configure_distributed_model(model)
        if self.has_moe_layers:
            raise ValueError("acco does not support DeepSpeed's mixture of experts (MoE layers); remove the section")
        self._state_dict_hook = self.module.register_state_dict_pre_hook(lambda *unused: self._show_real())

    # ---- the user's loop --------------------------------------------------------------------------------------------

    def allreduce_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: gradients stay local until they are handed over to the lane."""

    def _forward_prologue(self, inputs: Any, kwargs: Any) -> Any:
        """As the base, which hooks every forward of the module: in eval mode it runs at theta_t."""
        real = not self.module.training
        if torch.is_grad_enabled():  # a backward that is still to come belongs to the last forward with gradients
            if real != self._forward_was_real and self.optimizer.forward_outstanding:
                self.optimizer.forget_forwards()
            self._forward_was_real = real
            self.optimizer.note_forward()
        if real:
            self._show_real()
        else:
            self.optimizer.show_for_compute()
        return super()._forward_prologue(inputs, kwargs)

    def _show_real(self) -> None:
        if isinstance(self.optimizer, AccoZeroOptimizer):  # not while the engine is being built or taken down
            self.optimizer.show_real()

    def _backward_prologue(self) -> None:
        super()._backward_prologue()
        if not self._forward_was_real:  # a state dict may have been asked for since the forward
            self.optimizer.show_for_compute()
        self.optimizer.before_backward()

    def _backward_epilogue(self) -> None:
        super()._backward_epilogue()
        # torch.autograd.grad() through an output of the engine (a gradient penalty, say) is no micro-batch.
        by_engine = self._running_engine_backward
        self.optimizer.end_micro_batch(self.gradient_accumulation_steps(), self._losses_averaged, by_engine)

    def is_gradient_accumulation_boundary(self) -> bool:
        """As the base; with adaptive accumulation, whether the update ends with the micro-batch just done."""
        if self.acco.adaptive and self._is_gradient_accumulation_boundary is None:
            return self.optimizer.update_full
        boundary: bool = super().is_gradient_accumulation_boundary()
        return boundary

    def coalesce_grad_reduction(self) -> ContextManager[None]:
        """As `no_sync`: the base would reduce the gradients itself at the end; they are local until the hand-over."""
        context: ContextManager[None] = self.no_sync()
        return context

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """As the base, between updates only; the same call on all ranks.

        Raises:
            RuntimeError: in the middle of an update.
            ValueError: a size that is no multiple, or too small for the halves of mode acco.
        """
        if self.optimizer.micro_batches_in_update:
            raise RuntimeError("set_train_batch_size in the middle of an update; call it after the step() that ends it")
        samples = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        self.acco.check_accumulation_steps(train_batch_size // samples)
        super().set_train_batch_size(train_batch_size)
        # The base finds the end of an update by the number of micro-batches since the start.
        self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()

    def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True, **kwargs: Any) -> Any:
        """As the base: with `scale_wrt_gas=False` an update's gradient is the sum of its micro-batches' over ranks.

        Hugging Face's Trainer does so: it divides by the tokens or micro-batches that an update really has.
        """
        self._losses_averaged = not scale_wrt_gas
        try:
            return super().backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas, **kwargs)
        finally:
            self._losses_averaged = False

    def zero_grad(self) -> None:
        """Nothing: gradients are zeroed when they are handed over, never discarded in between."""

    def _take_model_step(self, lr_kwargs: dict[str, Any] | None) -> None:
        """As the base, but the scheduler and the skip counter move when the commit's outcome is known."""
        self._held_scheduler, self.lr_scheduler = self.lr_scheduler, None
        self._lr_kwargs[self.optimizer.update] = lr_kwargs
        self.optimizer.overflow = False
        try:
            super()._take_model_step(lr_kwargs)
        finally:
            self.lr_scheduler, self._held_scheduler = self._held_scheduler, None
        if self.acco.adaptive:
            # Counted when the commit says how many there were: in mode sync within the call.
            self.global_samples -= self.train_batch_size()
        # Of the last commit whose outcome is known; in mode sync that is the one just made.
        self._step_applied = self._last_applied
        self.optimizer.overflow = not self._last_applied

    def _commit_settled(self, report: RoundReport) -> None:
        self._global_grad_norm = report.grad_norm
        self._last_applied = report.applied
        self._skipped_in_a_row = 0 if report.applied else self._skipped_in_a_row + 1
        lr_kwargs = self._lr_kwargs.pop(report.update, None)
        samples = self.train_batch_size()
        if self.acco.adaptive:
            samples = report.micro_batches * self.train_micro_batch_size_per_gpu()
            self.global_samples += samples
        for line in self.optimizer.adviser.take_lines():
            log_dist(line, ranks=[0], level=logging.WARNING)  # also where DeepSpeed's own notices are switched off
        if not report.applied:
            self.skipped_steps += 1
            log_dist(
                f"update {report.update} skipped: gradient norm {report.grad_norm} over "
                f"{report.micro_batches} micro-batches",
                ranks=[0],
            )
            limit = self.acco.abort_after_skipped_updates
            if limit and self._skipped_in_a_row >= limit:
                raise FloatingPointError(
                    f"{self._skipped_in_a_row} updates in a row were skipped because the gradient was not finite "
                    f"(acco.abort_after_skipped_updates is {limit})"
                )
            return
        scheduler = self._held_scheduler if self.lr_scheduler is None else self.lr_scheduler
        if scheduler is not None:
            _step_scheduler(scheduler, lr_kwargs, samples)

    # ---- theta_t ----------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """As the base; the module then holds theta_t, for whoever trains or exports it next.

        Not while an exception is being handled or after the lane has failed: what is in flight may never arrive.
        """
        optimizer = getattr(self, "optimizer", None)
        if isinstance(optimizer, AccoZeroOptimizer) and not optimizer.lane.failed and sys.exc_info()[0] is None:
            optimizer.show_real()
        # DeepSpeed leaves its hooks on the module; they would show the estimate again at the next forward.
        for name in ("_state_dict_hook", "module_forward_pre_hook", "module_forward_post_hook"):
            if getattr(self, name, None) is not None:
                getattr(self, name).remove()
        super().destroy()

    def __del__(self) -> None:
        """As the base, at another moment on every rank: they would not agree on who takes which group next."""
        if isinstance(getattr(self, "optimizer", None), AccoZeroOptimizer):
            self.optimizer.keep_groups()
        super().__del__()

    def real_parameters(self) -> ContextManager[None]:
        """Context manager: drains what is in flight, shows theta_t in the module, then puts theta~_t back.

        Collective over the data-parallel ranks in mode wp. Do not change the parameters inside.
        """
        context: ContextManager[None] = self.optimizer.real_parameters()
        return context

    def drain(self) -> None:
        """Wait for the round in flight and settle it (skip counter, gradient norm, LR scheduler)."""
        self.optimizer.drain()

    def save_16bit_model(self, *args: Any, **kwargs: Any) -> Any:
        """As the base, of theta_t. Collective in mode wp."""
        with self.real_parameters():
            return super().save_16bit_model(*args, **kwargs)


def _without_empty(parameters: Any) -> Any:
    """`parameters` (tensors, (name, tensor) pairs or groups) without tensors of zero elements."""

    def keep(item: Any) -> bool:
        tensor = item[1] if isinstance(item, tuple) else item
        return not torch.is_tensor(tensor) or tensor.numel() > 0

    result = []
    for item in parameters:
        if isinstance(item, dict):
            params = item["params"]
            result.append({**item, "params": [p for p in ([params] if torch.is_tensor(params) else params) if keep(p)]})
        elif keep(item):
            result.append(item)
    return result


def _step_scheduler(scheduler: Any, lr_kwargs: dict[str, Any] | None, samples: int) -> None:
    """Step as DeepSpeed does: Megatron's scheduler wants the number of samples."""
    try:
        scheduler.step(**(lr_kwargs or {}))
    except TypeError:
        scheduler.step(samples)


# ---- ways in --------------------------------------------------------------------------------------------------------

_lock = threading.RLock()
_registered = False


def _new_engine(cls: type, *args: Any, **kwargs: Any) -> Any:
    """`DeepSpeedEngine.__new__`: an AccoEngine where the config has an enabled acco section."""
    if _registered and not issubclass(cls, AccoEngine):
        param_dict = getattr(kwargs.get("config_class"), "_param_dict", None)
        if isinstance(param_dict, Mapping) and acco_config(param_dict) is not None:
            if cls is not DeepSpeedEngine:
                raise ValueError(f'the "acco" section is not supported with {cls.__name__}; remove it')
            cls = AccoEngine
    return object.__new__(cls)


def register() -> None:
    """From now on `deepspeed.initialize` itself honours the `acco` section. Idempotent; undone by `unregister`.

    Hooks the construction of DeepSpeedEngine, so that also an `initialize` imported earlier is covered. A config
    without an enabled `acco` section takes DeepSpeed's own classes.
    """
    global _registered
    with _lock:
        _registered = True
        DeepSpeedEngine.__new__ = staticmethod(_new_engine)  # type: ignore[method-assign,assignment]


def unregister() -> None:
    """Undo `register`: `deepspeed.initialize` builds DeepSpeed's own classes again."""
    global _registered
    with _lock:
        # The hook itself stays: once a class had a __new__, deleting it makes object.__new__ refuse arguments.
        _registered = False


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize`, with the `acco` section of the config honoured. Same signature and return."""
    global _registered
    with _lock:
        before = _registered
        register()
        try:
            result: tuple[Any, Any, Any, Any] = deepspeed.initialize(*args, **kwargs)
            if get_accelerator().device_name() == "cpu":
                release_shared_memory()
            return result
        finally:
            _registered = before


def real_parameters(engine: DeepSpeedEngine) -> ContextManager[None]:
    """`engine.real_parameters()`; on a plain DeepSpeed engine, whose module always holds theta, nothing."""
    return engine.real_parameters() if isinstance(engine, AccoEngine) else nullcontext()


def drain(engine: DeepSpeedEngine) -> None:
    """Wait for what is in flight; nothing on a plain DeepSpeed engine."""
    if isinstance(engine, AccoEngine):
        engine.drain()


def round_reports(engine: DeepSpeedEngine) -> list[RoundReport]:
    """Reports of the rounds finished since the last call; empty on a plain DeepSpeed engine."""
    return engine.optimizer.take_reports() if isinstance(engine, AccoEngine) else []
