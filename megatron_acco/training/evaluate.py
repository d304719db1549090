"""Loss on a fixed set of samples, at theta_t."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import megatron_acco
from megatron_acco.training.batches import Batch, to_device
from megatron_acco.training.instructions import attention_mask


def masked_mean(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of the per-token losses [micro-batch, sequence] where the mask is 1; a scalar, fp32."""
    return masked_sum(losses, mask) / mask.float().sum().clamp(min=1.0)


def masked_sum(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of the per-token losses [micro-batch, sequence] where the mask is 1; a scalar, fp32."""
    return (losses.float() * mask.float()).sum()


def token_losses(model: Any, batch: Batch) -> torch.Tensor:
    """Per-token cross entropy, [micro-batch, sequence]. `model` is a GPTModel or an engine around one."""
    mask = attention_mask(batch.get("segment_ids"))
    losses: torch.Tensor = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
    return losses


@torch.no_grad()
def evaluate(engine: Any, loader: DataLoader[Batch], control: dist.ProcessGroup) -> float:
    """Mean loss per token of the real parameters over the loader's samples on all ranks. Collective.

    Draws no random numbers, and leaves the training weights as they were.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=engine.device)
    model = engine.module
    with megatron_acco.real_parameters(engine):
        model.eval()
        for batch in loader:
            batch = to_device(batch, engine.device)
            losses = token_losses(model, batch)
            totals[0] += (losses * batch["loss_mask"]).sum(dtype=torch.float64)
            totals[1] += batch["loss_mask"].sum(dtype=torch.float64)
        model.train()
    totals = totals.cpu()
    dist.all_reduce(totals, group=control)
    return float(totals[0] / totals[1].clamp(min=1.0))
