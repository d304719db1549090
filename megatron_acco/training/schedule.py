"""Optimizer arguments and the learning-rate schedule, Megatron's OptimizerParamScheduler in units of samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_acco.training.options import option


@dataclass(frozen=True)
class OptimizerOptions:
    """Optimizer and schedule, in Megatron's argument names. An `optimizer` section in the JSON must agree."""

    optimizer: str = option("adam", "Optimizer if the JSON has none; adam is AdamW.", choices=("adam", "sgd"))
    lr: float | None = option(None, "Peak learning rate.")
    min_lr: float = option(0.0, "Learning rate at the end of the decay.")
    lr_decay_style: str = option(
        "linear",
        "Shape of the decay.",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = option(None, "Updates until --min-lr is reached (--train-iters).")
    lr_decay_samples: int | None = option(None, "The same in samples (--train-samples).")
    lr_warmup_iters: int = option(0, "Updates of linear warm-up.")
    lr_warmup_samples: int = option(0, "The same in samples.")
    lr_warmup_fraction: float | None = option(None, "The same as a share of the decay.")
    lr_warmup_init: float = option(0.0, "Learning rate at the start of the warm-up.")
    lr_wsd_decay_style: str = option(
        "exponential", "Annealing of WSD.", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = option(None, "Updates of annealing at the end of WSD.")
    weight_decay: float = option(0.01, "Weight decay, of all but biases and norm weights.")
    adam_beta1: float = option(0.9, "First beta of Adam.")
    adam_beta2: float = option(0.999, "Second beta of Adam.")
    adam_eps: float = option(1e-8, "Epsilon of Adam.")
    clip_grad: float = option(1.0, "Global gradient norm to clip at; 0 is off.")
    override_opt_param_scheduler: bool = option(
        False,
        "On resume, take the schedule from the arguments even if the checkpoint's differs.",
        flag="--override-opt_param-scheduler",
    )

    def __post_init__(self) -> None:
        warmups = {
            "--lr-warmup-iters": self.lr_warmup_iters,
            "--lr-warmup-samples": self.lr_warmup_samples,
            "--lr-warmup-fraction": self.lr_warmup_fraction,
        }
        given = [flag for flag, value in warmups.items() if value]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} contradict each other; give one")
        if self.lr_decay_iters is not None and self.lr_decay_samples is not None:
            raise ValueError("--lr-decay-iters and --lr-decay-samples contradict each other; give one")
        if self.lr_warmup_fraction is not None and not 0.0 <= self.lr_warmup_fraction < 1.0:
            raise ValueError(f"--lr-warmup-fraction must be in [0, 1), got {self.lr_warmup_fraction}")
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_iters is None:
            raise ValueError("--lr-decay-style WSD needs --lr-wsd-decay-iters")
        for name in ("min_lr", "lr_warmup_init", "weight_decay", "clip_grad", "lr_warmup_iters", "lr_warmup_samples"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} must be 0 or more, got {getattr(self, name)}")


@dataclass(frozen=True)
class Schedule:
    """The schedule with its units resolved. Lengths are samples."""

    options: OptimizerOptions
    peak: float
    warmup: int
    decay: int
    wsd_decay: int | None

    def build(self, optimizer: Any) -> OptimizerParamScheduler:
        """The scheduler of `optimizer`; DeepSpeed steps it by one global batch per committed update.

        DeepSpeed makes the groups of Muon itself and leaves out Megatron's options of them: they keep the ratio of
        their rates ("muon_lr", "adam_lr") to the peak, and those without weight decay stay without.
        """
        for group in optimizer.param_groups:
            if "use_muon" in group:
                ratio = group["lr"] / self.peak
                group["max_lr"], group["min_lr"] = group["lr"], self.options.min_lr * ratio
                group["wd_mult"] = 0.0 if group["weight_decay"] == 0.0 else 1.0
        return OptimizerParamScheduler(
            optimizer,
            init_lr=self.options.lr_warmup_init,
            max_lr=self.peak,
            min_lr=self.options.min_lr,
            lr_warmup_steps=self.warmup,
            lr_decay_steps=self.decay,
            lr_decay_style=self.options.lr_decay_style,
            start_wd=self.options.weight_decay,
            end_wd=self.options.weight_decay,
            wd_incr_steps=self.decay,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=not self.options.override_opt_param_scheduler,
            override_opt_param_scheduler=self.options.override_opt_param_scheduler,
            wsd_decay_steps=self.wsd_decay,
            lr_wsd_decay_style=self.options.lr_wsd_decay_style,
        )


def resolve_schedule(options: OptimizerOptions, train_samples: int, global_batch_size: int) -> Schedule:
    """The schedule of a run of `train_samples` samples.

    Raises:
        ValueError: if there is no learning rate, it lies below the minimum, or the warm-up is not shorter than the
            decay.
    """
    if options.lr is None:
        raise ValueError('no learning rate: give --lr, or "optimizer.params.lr" in the DeepSpeed JSON')
    if options.lr <= 0.0:
        raise ValueError(f"--lr must be above 0, got {options.lr}")
    if options.lr < options.min_lr or options.lr < options.lr_warmup_init:
        raise ValueError(
            f"--lr {options.lr} lies below --min-lr {options.min_lr} or --lr-warmup-init {options.lr_warmup_init}"
        )
    decay = train_samples
    if options.lr_decay_iters is not None:
        decay = options.lr_decay_iters * global_batch_size
    elif options.lr_decay_samples is not None:
        decay = options.lr_decay_samples
    warmup = options.lr_warmup_iters * global_batch_size + options.lr_warmup_samples
    if options.lr_warmup_fraction is not None:
        warmup = int(options.lr_warmup_fraction * decay)
    if not 0 <= warmup < decay:
        raise ValueError(f"the warm-up of {warmup} samples must be shorter than the decay of {decay} samples")
    wsd = None if options.lr_wsd_decay_iters is None else options.lr_wsd_decay_iters * global_batch_size
    return Schedule(options, options.lr, warmup, decay, wsd)
