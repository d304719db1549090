"""Models with the parameters that break flat buffers: frozen, unused, tied, empty, odd. With their data."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def _generator(update: int, rank: int, micro: int) -> torch.Generator:
    return torch.Generator().manual_seed(7919 * update + 104_729 * rank + 31 * micro + 5)


class Frozen(nn.Module):
    """Three layers, the first frozen, with a dead layer norm weight among the trained ones."""

    def __init__(self, seed: int = 1):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 2)])
        self.layers[0].requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return (self.layers[-1](x) - y).pow(2).mean()


class Alternating(nn.Module):
    """One layer on even micro-batches, another on odd ones, a third never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.even, self.odd, self.never = nn.Linear(5, 2), nn.Linear(5, 2), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor, micro: int) -> torch.Tensor:
        return ((self.even if micro % 2 == 0 else self.odd)(x) - y).pow(2).mean()


def alternating_data(update: int, rank: int, micro: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    generator = _generator(update, rank, micro)
    return torch.randn(4, 5, generator=generator).to(dtype), torch.randn(4, 2, generator=generator).to(dtype), micro


class Tied(nn.Module):
    """A tiny language model: one embedding used twice, one layer used three times, recompute if asked."""

    def __init__(self, recompute: str = "off"):
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(11, 6)
        self.layer = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.recompute = recompute

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(self.norm(x)))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for _ in range(3):
            if self.recompute == "off":
                x = self.block(x)
            else:
                x = checkpoint(self.block, x, use_reentrant=self.recompute == "reentrant")
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def tied_off() -> Tied:
    return Tied()


def tied_recompute() -> Tied:
    return Tied("on")


def tied_reentrant() -> Tied:
    return Tied("reentrant")


def token_data(update: int, rank: int, micro: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    tokens = torch.randint(0, 11, (3, 6), generator=_generator(update, rank, micro))
    return tokens[:, :-1], tokens[:, 1:]


class Vectors(nn.Module):
    """Bare vectors of given sizes; each is pulled towards the data by a smooth loss."""

    def __init__(self, sizes: tuple[int, ...], dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(6)
        shapes = [(size,) if size else (0, 3) for size in sizes]
        self.vectors = nn.ParameterList(nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses = [torch.log1p((v.float() - x[: len(v)]).pow(2)).sum() for v in self.vectors if v.numel()]
        return torch.stack(losses).sum() + sum(v.float().sum() for v in self.vectors if not v.numel())


def vectors_empty_inside() -> Vectors:
    return Vectors((8, 0, 24))


def vectors_empty_last() -> Vectors:
    return Vectors((8, 24, 0))


def vectors_empty_inside_bf16() -> Vectors:
    return Vectors((8, 0, 24), torch.bfloat16)


def vectors_empty_last_bf16() -> Vectors:
    return Vectors((8, 24, 0), torch.bfloat16)


def vectors_57() -> Vectors:
    return Vectors((30, 27))


def vectors_5() -> Vectors:
    return Vectors((3, 2))


def vector_data(update: int, rank: int, micro: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor]:
    return (torch.randn(32, generator=_generator(update, rank, micro)),)
