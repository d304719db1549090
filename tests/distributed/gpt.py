"""Trainings of a tiny GPTModel over tensor- and data-parallel ranks, for test_tensor_parallel.py.

`Case` describes one as data; `train` (a job, on every rank of a pool) carries it out; `whole` puts the parts of the
tensor-parallel ranks together. All layouts see the same samples, whatever the number of data-parallel ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.distributed.precision import fp16_allowed, fp16_section

VOCABULARY, LENGTH, GAS, REPLICAS, CLIP = 64, 16, 4, 2, 0.25
GPT2 = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
LLAMA = {
    **GPT2,
    "group_query_attention": True,
    "num_query_groups": 2,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "disable_bias_linear": True,
    "qk_layernorm": True,
}
STYLES = {"gpt2": GPT2, "llama": LLAMA}


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        mode: acco mode, or None for DeepSpeed's own ZeRO-1.
        options: further model options.
        acco: further keys of the acco section.
        poison: (update, micro-batch) whose gradient is NaN (fp16: infinite) in one element on tensor-parallel rank 1 of
            replica 0.
    """

    style: str = "gpt2"
    tp: int = 1
    sequence_parallel: bool = False
    mode: str | None = "acco"
    updates: int = 10
    dropout: float = 0.0
    bf16: bool = False
    fp16: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    acco: dict[str, Any] = field(default_factory=dict)
    poison: tuple[int, int] | None = None


@dataclass
class Outcome:
    """What a rank saw: parameters by name (value before and after, how it is split), gradient norms, losses.

    `scales` has the loss scale of every micro-batch.
    """

    tp_rank: int
    dp_rank: int
    initial: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    split: dict[str, tuple[int, int] | None]
    norms: list[float]
    applied: list[bool]
    skipped: int
    losses: list[float]
    scales: list[float]


# Megatron's groups by tensor-parallel size, in each process of a pool. Each group has threads; groups that one rank
# forgets sooner than another keep the other's busy with closed connections.
_groups: dict[int, dict[str, Any]] = {}


@contextlib.contextmanager
def parallel(tp: int) -> Iterator[None]:
    """Megatron's groups over the ranks of the pool; afterwards neither it nor DeepSpeed knows of them."""
    from deepspeed.utils import groups
    from megatron.core import parallel_state

    if tp not in _groups:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, create_gloo_process_groups=False)
        _groups[tp] = {name: value for name, value in vars(parallel_state).items() if name.startswith("_")}
    vars(parallel_state).update(_groups[tp])
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        groups.mpu = None


def build(case: Case) -> Any:
    """The model of a case, with its initial weights and then the seeds of training."""
    from megatron_acco.training.environment import seed_dropout, seed_everything
    from megatron_acco.training.model import ModelOptions, build_model

    shape = {**STYLES[case.style], "hidden_dropout": case.dropout, "attention_dropout": case.dropout, **case.options}
    seed_everything(1)
    dtype = torch.bfloat16 if case.bf16 else torch.float16 if case.fp16 else torch.float32
    model = build_model(ModelOptions(**shape), VOCABULARY, dtype, case.sequence_parallel)
    seed_dropout(1)
    return model


def engine_of(case: Case, model: Any, gas: int, **extra: Any) -> Any:
    import megatron_acco
    from megatron_acco.training.environment import Mpu
    from megatron_acco.training.model import parameter_groups
    from megatron_acco.training.replicated import sum_partial_gradients_in_backward

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": 0.1, "eps": 1e-6, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": case.bf16},
        "steps_per_print": 10**9,
        **extra,
    }
    if case.fp16:
        config |= fp16_section()
    if case.mode is not None:
        config["acco"] = {"mode": case.mode, **case.acco}
    groups = parameter_groups(model)
    engine, *_ = megatron_acco.initialize(model=model, model_parameters=groups, config=config, mpu=Mpu())
    if case.mode is None:
        sum_partial_gradients_in_backward(model, Mpu.get_tensor_model_parallel_group())
    return engine


def batch(update: int, micro: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels [2, LENGTH] of micro-batch `micro` of `GAS` on replica `replica` of `REPLICAS`."""
    generator = torch.Generator().manual_seed(1000 * update + 10 * micro + replica)
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(case: Case) -> Outcome:
    """Job: the training of `case`."""
    import megatron_acco
    from megatron_acco.training.environment import Mpu

    with parallel(case.tp), fp16_allowed():
        replica, replicas = Mpu.get_data_parallel_rank(), Mpu.get_data_parallel_world_size()
        gas = GAS * REPLICAS // replicas
        model = build(case)
        initial, split = snapshot(model), {name: split_of(p) for name, p in model.named_parameters()}
        engine = engine_of(case, model, gas)
        losses, norms, scales = [], [], []
        for update in range(case.updates):
            for micro in range(gas):
                of_replica, of_micro = (
                    (replica, micro) if replicas == REPLICAS else (micro % REPLICAS, micro // REPLICAS)
                )
                tokens, labels = batch(update, of_micro, of_replica)
                positions = torch.arange(LENGTH).expand(2, -1)
                scales.append(float(engine.optimizer.loss_scale))
                loss = engine(tokens, positions, None, labels=labels).float().mean()
                engine.backward(loss)
                if case.poison == (update, micro) and (Mpu.get_model_parallel_rank(), replica) == (1, 0):
                    next(iter(model.parameters())).main_grad.view(-1)[3] = float("inf" if case.fp16 else "nan")
                engine.step()
                losses.append(loss.item())
            if case.mode is None:
                norms.append(float(engine.get_global_grad_norm()))
        megatron_acco.drain(engine)
        reports = megatron_acco.round_reports(engine)
        with megatron_acco.real_parameters(engine):
            weights = snapshot(model)
        outcome = Outcome(
            tp_rank=Mpu.get_model_parallel_rank(),
            dp_rank=replica,
            initial=initial,
            weights=weights,
            split=split,
            norms=norms or [report.grad_norm for report in reports],
            applied=[report.applied for report in reports],
            skipped=engine.skipped_steps,
            losses=losses,
            scales=scales,
        )
        engine.destroy()
        return outcome


def snapshot(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def split_of(parameter: torch.Tensor) -> tuple[int, int] | None:
    """(dimension, stride) along which a parameter is split; None if each rank has a copy."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return parameter.partition_dim, parameter.partition_stride  # type: ignore[attr-defined]


def whole(outcomes: Sequence[Outcome], which: str = "weights") -> dict[str, torch.Tensor]:
    """The parameters of replica 0, put together; asserts that copies are bit-identical on all ranks."""
    for outcome in outcomes:
        for name, value in getattr(outcome, which).items():
            same = outcomes[0] if outcome.split[name] is None else outcomes[outcome.tp_rank]
            assert torch.equal(value, getattr(same, which)[name]), (name, outcome.tp_rank, outcome.dp_rank)
    parts = sorted((o for o in outcomes if o.dp_rank == 0), key=lambda o: o.tp_rank)
    result = {}
    for name, split in parts[0].split.items():
        values = [getattr(part, which)[name] for part in parts]
        if split is None:
            result[name] = values[0]
            continue
        dimension, stride = split
        pieces = [value.chunk(stride, dimension) for value in values]
        result[name] = torch.cat([piece[i] for i in range(stride) for piece in pieces], dimension)
    return result


def dropout_masks(case: Case) -> dict[str, Any]:
    """Job: what a rank's dropouts drop, and where its default stream stands after a forward pass."""
    from megatron_acco.training.environment import Mpu

    with parallel(case.tp):
        model = build(case)
        result: dict[str, Any] = {"tp": Mpu.get_model_parallel_rank(), "dp": Mpu.get_data_parallel_rank()}
        tokens, _ = batch(0, 0, 0)

        def note(name: str) -> Any:
            return lambda module, args, output: result.setdefault(name, output.detach().clone())

        model.embedding.embedding_dropout.register_forward_hook(note("embedding"))
        # Equal inputs on all ranks, so that what differs is what was dropped.
        heads = torch.randn(3, LENGTH, 2, 2, 8, generator=torch.Generator().manual_seed(3))
        core = model.decoder.layers[0].self_attention.core_attention
        core.register_forward_pre_hook(lambda module, args: (*heads, *args[3:]))
        core.register_forward_hook(note("attention"))
        with torch.no_grad():
            model(tokens, torch.arange(LENGTH).expand(2, -1), None)
        return {**result, "default": torch.rand(1).item()}
