"""Script: trainings with Hugging Face's Trainer and accelerate, on every rank of a launcher; test_hf.py asserts.

    deepspeed --num_gpus 2 --module tests.integration.hf_runs [NAME ...] FOLDER

Writes FOLDER/<name>.pt: what each training left (all of them, or those named before FOLDER).
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DeepSpeedPlugin
from safetensors.torch import load_file
from torch.func import functional_call
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import megatron_acco

GAS, MICRO, LR, LENGTH, VOCABULARY = 4, 2, 1e-2, 16, 61
Batch = dict[str, torch.Tensor]


def model(seed: int = 1) -> LlamaForCausalLM:
    """A Llama with grouped-query attention and tied embeddings, random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def samples(count: int, seed: int = 7) -> list[Batch]:
    """Sequences whose first tokens, a different number in each, carry no loss (a prompt)."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for index in range(count):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[: 1 + 5 * index % 13] = -100
        result.append({"input_ids": tokens, "labels": labels})
    return result


class Collator:
    """Stacks samples and remembers every batch of this rank in order."""

    def __init__(self) -> None:
        self.seen: list[Batch] = []

    def __call__(self, items: list[Batch]) -> Batch:
        batch = {key: torch.stack([item[key] for item in items]) for key in items[0]}
        if len(items) == MICRO:  # evaluation has other sizes
            self.seen.append(copy.deepcopy(batch))
        return batch


def masters(engine: Any) -> Batch:
    """fp32 master weights of all ranks by parameter name (plain copies of DeepSpeed's own partition order)."""
    zero = engine.optimizer
    names = {p: name for name, p in engine.module.named_parameters()}
    result = {}
    for index, partition in enumerate(zero.single_partition_of_fp32_groups):
        parts = [torch.empty_like(partition) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, partition.detach().contiguous())
        flat, offset = torch.cat(parts), 0
        for p in zero.round_robin_bit16_groups[index]:
            result[names[p]] = flat[offset : offset + p.numel()].view(p.shape).clone()
            offset += p.numel()
    return result


def loss_at(weights: Batch, module: torch.nn.Module, batch: Batch) -> float:
    """Mean loss of a batch with the given weights in a copy of the module."""
    twin = copy.deepcopy(module).eval()
    with torch.no_grad():
        return float(functional_call(twin, weights, (), {**batch}, tie_weights=True).loss)


def largest_difference(left: Batch, right: Batch) -> float:
    """Largest absolute difference between weights; a state dict has the tied embedding twice."""
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    assert left.keys() | tied.keys() == right.keys() | tied.keys()
    return max(float((left[tied.get(n, n)].float() - weight.float()).abs().max()) for n, weight in right.items())


def json_config(mode: str | None, **changes: Any) -> dict[str, Any]:
    """A DeepSpeed JSON that leaves to the trainer what it can fill in; None: without the acco section."""
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
        },
    }
    config.update(changes)
    if mode is not None:
        config["acco"] = {"mode": mode}
    return {key: value for key, value in config.items() if value is not None}


class Watch(TrainerCallback):
    """Compares what the Trainer evaluates and saves with the master weights; keeps gradients' norms and rates."""

    def __init__(self, evaluation: list[Batch]) -> None:
        self.trainer: Any = None
        self.evaluation = evaluation
        self.evaluated: list[tuple[float, float]] = []
        self.saved: list[float] = []
        self.start: Batch = {}
        self.skipped: list[bool] = []
        self.rates: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start = masters(self.trainer.model_wrapped)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rates.append(self.trainer.model_wrapped.get_lr()[0])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.skipped.append(bool(self.trainer.accelerator.optimizer_step_was_skipped))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        theta = masters(self.trainer.model_wrapped)
        # The Trainer averages over the tokens of a batch on all ranks, then over batches.
        size = 4 * torch.distributed.get_world_size()
        batches = [self.evaluation[i : i + size] for i in range(0, len(self.evaluation), size)]
        losses = [loss_at(theta, self.trainer.model, Collator()(batch)) for batch in batches]
        self.evaluated.append((metrics["eval_loss"], sum(losses) / len(losses)))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        theta = masters(self.trainer.model_wrapped)
        self.saved.append(largest_difference(theta, load_file(folder / "model.safetensors")))


def trainer_for(
    folder: Path,
    config: dict[str, Any],
    *,
    llama: Any = None,
    count: int = 44,
    seed: int = 1,
    trainer: type = Trainer,
    **options: Any,
) -> Any:
    """A Trainer on `count` samples, its collator in `data_collator`, its Watch in `watch`."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "deepspeed": config,
        "per_device_train_batch_size": MICRO,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": GAS,
        "num_train_epochs": 2,
        "learning_rate": LR,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
        **options,
    }
    evaluation = samples(16, seed=99)
    watch = Watch(evaluation)
    result = trainer(
        model=llama or model(seed),
        args=TrainingArguments(**settings),
        train_dataset=samples(count),
        eval_dataset=evaluation,
        data_collator=Collator(),
        callbacks=[watch],
    )
    watch.trainer = result
    result.watch = watch
    return result


def finish(trainer: Any) -> dict[str, Any]:
    """What a finished Trainer left: classes, log, weights."""
    engine = trainer.model_wrapped
    megatron_acco.drain(engine)
    return {
        "classes": [f"{type(o).__module__}.{type(o).__name__}" for o in (engine, engine.optimizer)],
        "log": trainer.state.log_history,
        "theta": masters(engine),
        "evaluated": trainer.watch.evaluated,
        "saved": trainer.watch.saved,
        "skipped": trainer.watch.skipped,
        "batches": trainer.data_collator.seen,
        "begin_rates": trainer.watch.rates,
        "rates": [(r.kind.value, r.learning_rate) for r in megatron_acco.round_reports(engine)],
        "norm": float(engine.get_global_grad_norm()),
        "counts": (engine.global_steps, engine.skipped_steps),
        "batch": (engine.train_batch_size(), engine.gradient_accumulation_steps(), engine.gradient_clipping()),
    }


def explicit(mode: str | None, updates: int, **changes: Any) -> dict[str, Any]:
    """What `json_config` must become in the hands of the Trainer of `trainer_for`."""
    adamw = {"lr": LR, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
    warmup = {"total_num_steps": updates, "warmup_min_lr": 0, "warmup_max_lr": LR, "warmup_num_steps": 2}
    return json_config(
        mode,
        **{
            "train_batch_size": None,
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": GAS,
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": 1},
            "bf16": None,
            "optimizer": {"type": "AdamW", "params": adamw},
            "scheduler": {"type": "WarmupDecayLR", "params": warmup},
            **changes,
        },
    )


def updates_of(batches: list[Batch], per_epoch: int) -> list[list[Batch]]:
    """Batches of a rank -> batches of each update; an epoch's last update takes what is left."""
    epochs = [batches[i : i + per_epoch] for i in range(0, len(batches), per_epoch)]
    return [epoch[i : i + GAS] for epoch in epochs for i in range(0, len(epoch), GAS)]


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the next-token losses of a batch."""
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )


def counted(batches: list[Batch]) -> int:
    """Tokens that carry a loss."""
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)


def mean_over_ranks(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    torch.distributed.all_reduce(tensor)
    return float(tensor) / torch.distributed.get_world_size()


def own_loop(config: dict[str, Any], plan: list[list[Batch]], by_tokens: bool, **options: Any) -> dict[str, Any]:
    """Our own loop over the updates of `plan`.

    Args:
        by_tokens: the loss of an update is the mean over its tokens on all ranks (the Trainer's loss); otherwise each
            micro-batch's own mean, averaged by the engine.
    """
    llama = model()
    parameters = list(llama.parameters())
    engine, _, _, _ = megatron_acco.initialize(model=llama, model_parameters=parameters, config=config, **options)
    losses = []
    for batches in plan:
        tokens = mean_over_ranks(counted(batches))  # per rank
        total = 0.0
        for index, batch in enumerate(batches):
            engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
            logits = engine(input_ids=batch["input_ids"]).logits
            loss = token_loss(logits, batch["labels"]) / (tokens if by_tokens else counted([batch]))
            engine.backward(loss, scale_wrt_gas=not by_tokens)
            total += float(loss)
        engine.step()
        losses.append(mean_over_ranks(total if by_tokens else total / len(batches)))
    megatron_acco.drain(engine)
    result = {"losses": losses, "theta": masters(engine), "norm": engine.get_global_grad_norm()}
    engine.destroy()
    return result


def oracle(plan: list[list[Batch]], rates: list[float], clip: float) -> Batch:
    """theta after the updates of `plan` by the equations (tests/oracle.py), float64 in one process."""
    from tests.oracle import Group, Oracle, Rule

    plans: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(plans, plan)
    llama = model().double()

    def gradient(weights: Any, update: int, rank: int, micro: int) -> Any:
        leaves = {n: torch.tensor(w, dtype=torch.float64, requires_grad=True) for n, w in weights.items()}
        batch = plans[rank][update][micro]
        logits = functional_call(llama, leaves, (batch["input_ids"],), tie_weights=True).logits
        tokens = sum(counted(p[update]) for p in plans) / len(plans)
        # The oracle divides by the micro-batches of all ranks.
        loss = token_loss(logits, batch["labels"]) / tokens * len(plans[rank][update])
        return {n: g.numpy() for n, g in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)}

    class GuessedCount(Oracle):
        """An estimate cannot know that its update will end early: it takes it for a whole one of GAS."""

        def _sum(self, weights: Any, t: int, half: int | None) -> Any:
            total, count, scale = super()._sum(weights, t, half)
            micros, first = len(plan[t]), min(GAS // 2, len(plan[t]))
            if half is not None and first == GAS // 2:
                guessed = first * micros / GAS
                count = (guessed if half == 0 else micros - guessed) * len(plans)
            return total, count, scale

    def counts(update: int, rank: int) -> tuple[int, int]:
        first = min(GAS // 2, len(plan[update]))
        return first, len(plan[update]) - first

    names = tuple(name for name, _ in llama.named_parameters())
    machine = GuessedCount(
        theta={name: p.detach().numpy() for name, p in llama.named_parameters()},
        groups=[Group(names, Rule("adamw", LR, 0.1, (0.9, 0.999), 1e-8))],
        gradient=gradient,
        mode="acco",
        ranks=len(plans),
        counts=counts,
        clip=clip,
        lr_factor=lambda applied: rates[applied] / LR,
    )
    theta = machine.updates(len(plan))[-1].theta
    return {name: torch.from_numpy(value) for name, value in theta.items()}


class Poisoned(Trainer):
    """The first micro-batch of update 1 has a loss of NaN on rank 0."""

    calls = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if self.model.training:
            self.calls += 1
            if self.calls == GAS + 1 and torch.distributed.get_rank() == 0:
                return loss * float("nan")
        return loss


NO_OPTIMIZER = {"optimizer": None, "scheduler": None}


def trainer_acco(folder: Path) -> dict[str, Any]:
    """Evaluation, saving, a last update of 3 of 4 micro-batches in each epoch; our own loop; the equations."""
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3}
    trainer = trainer_for(folder / "acco", json_config("acco"), **options)
    trainer.train()
    result = finish(trainer)
    trainer.save_model(str(folder / "saved"))
    torch.distributed.barrier()
    result["final"] = largest_difference(result["theta"], load_file(folder / "saved" / "model.safetensors"))
    plan = updates_of(result.pop("batches"), 11)
    result["own"] = own_loop(explicit("acco", 6), plan, by_tokens=True)
    rates = [rate for kind, rate in result["rates"] if kind == "commit"]
    result["oracle"] = oracle(plan, rates, 0.5)
    return result


def trainer_resumed(folder: Path) -> dict[str, Any]:
    """Continues the training of `trainer_acco` from its checkpoint, with other initial weights; then a new Trainer."""
    trainer = trainer_for(folder / "resumed", json_config("acco"), seed=5)
    trainer.train(resume_from_checkpoint=str(folder / "acco" / "checkpoint-3"))
    result = finish(trainer)
    again = trainer_for(folder / "again", json_config("acco"), llama=trainer.model, max_steps=1)
    again.train()
    result["second"] = largest_difference(again.watch.start, result["theta"])
    return result


def trainer_mode(mode: str | None, folder: Path, **options: Any) -> dict[str, Any]:
    """A short Trainer run whose epochs end with an update of 1 of 4 micro-batches."""
    changes = options.pop("changes", {})
    trainer = trainer_for(folder / f"mode-{mode}", json_config(mode, **changes), count=36, **options)
    trainer.train()
    return finish(trainer)


def best_model(folder: Path) -> dict[str, Any]:
    """bf16, and the best checkpoint loaded at the end."""
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "bf16": True}
    trainer = trainer_for(folder / "best", json_config("acco"), load_best_model_at_end=True, **options)
    trainer.train()
    result = finish(trainer)
    trainer.save_model(str(folder / "best-saved"))
    torch.distributed.barrier()
    best = load_file(Path(trainer.state.best_model_checkpoint) / "model.safetensors")
    result["best"] = largest_difference(load_file(folder / "best-saved" / "model.safetensors"), best)
    theta = {name: weight.bfloat16() for name, weight in result["theta"].items()}
    result["rounded"] = largest_difference(theta, best)
    return result


def accelerate_loop(folder: Path) -> dict[str, Any]:
    """A plain accelerate loop whose epochs end with an update of 1 of 4 micro-batches."""
    config = json_config("acco", **NO_OPTIMIZER)
    PartialState(cpu=not torch.cuda.is_available())  # as the Trainer does; Accelerator alone sees one process on a CPU
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=GAS)
    llama, collator = model(), Collator()
    optimizer = torch.optim.AdamW(llama.parameters(), lr=LR, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    loader = DataLoader(samples(36), batch_size=MICRO, shuffle=True, collate_fn=collator)
    engine, optimizer, loader, scheduler = accelerator.prepare(llama, optimizer, loader, scheduler)
    losses, result = [], {"classes": [f"{type(engine).__module__}.{type(engine).__name__}"]}
    for epoch in range(2):
        total, count = 0.0, 0
        for step, batch in enumerate(loader):
            with accelerator.accumulate(engine):
                loss = engine(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(engine.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total, count = total + float(loss), count + 1
            if epoch == 0 and step == 5:  # in the middle of an update: theta_t, and no harm
                engine.eval()
                with torch.no_grad():
                    shown = float(engine(**batch).loss)
                engine.train()
                result["middle"] = (shown, loss_at(masters(engine), accelerator.unwrap_model(engine), batch))
                state = accelerator.get_state_dict(engine)
                result["state"] = largest_difference(masters(engine), state)
                try:
                    accelerator.save_state(str(folder / "refused"))
                except RuntimeError as refused:
                    result["refused"] = str(refused)
            if accelerator.sync_gradients:
                assert not accelerator.optimizer_step_was_skipped
                losses.append(mean_over_ranks(total / count))
                total, count = 0.0, 0
    accelerator.save_state(str(folder / "state"))
    theta = masters(engine)
    accelerator.load_state(str(folder / "state"))
    result["loaded"] = largest_difference(masters(engine), theta)
    result |= {"losses": losses, "theta": theta, "clip": engine.gradient_clipping()}
    result["rates"] = [(r.kind.value, r.learning_rate) for r in megatron_acco.round_reports(engine)]
    plan = updates_of(collator.seen[:18], 9)
    accelerator.free_memory()
    # accelerate steps a scheduler once per process in each update.
    rate = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + 2 * step))  # noqa: E731
    same = explicit("acco", 6, scheduler=None, gradient_clipping=1.0)
    result["own"] = own_loop(same, plan, by_tokens=False, lr_scheduler=rate)
    return result


def main() -> None:
    megatron_acco.register()
    folder = Path(sys.argv[-1])
    runs = {
        "trainer": trainer_acco,
        "resumed": trainer_resumed,
        "plain": lambda f: trainer_mode(None, f, max_grad_norm=0.0),
        "sync": lambda f: trainer_mode("sync", f, max_grad_norm=0.0),
        "own_scheduler": lambda f: trainer_mode("acco", f, changes=NO_OPTIMIZER, trainer=Poisoned),
        "best": best_model,
        "accelerate": accelerate_loop,
    }
    chosen = [name for name in sys.argv[1:-1] if name in runs]  # not what the launcher adds
    for name, run in runs.items():
        if not chosen or name in chosen:
            result = run(folder)
            if torch.distributed.get_rank() == 0:
                torch.save(result, folder / f"{name}.pt")
            AcceleratorState._reset_state(reset_partial_state=True)
    torch.distributed.destroy_process_group()  # else gloo's threads may abort the interpreter as it ends


if __name__ == "__main__":
    main()
