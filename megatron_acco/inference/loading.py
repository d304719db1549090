"""Model and tokenizer of a checkpoint, in one process."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from megatron.core import parallel_state

from megatron_acco.training.checkpoint.state import check_tokenizer
from megatron_acco.training.checkpoint.weights import Weights, find_weights
from megatron_acco.training.model import build_model
from megatron_acco.training.tokenizer import TokenizerOptions, build_tokenizer, ids_digest

TOKENIZER_FOLDER = "tokenizer"
"""In an imported checkpoint: the files of the Hugging Face tokenizer."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STARTS = ("eod", "bos", "none")
"""What may stand before a text: the end of the document before it, the tokenizer's own beginning, nothing."""


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, and its tokenizer.

    Attributes:
        model: a GPTModel with a row per id of the tokenizer, and none of padding.
        tokenizer: a megatron-core tokenizer object.
        weights: where the model is from.
        longest: tokens that it takes at most.
        device: where it is.
    """

    model: Any
    tokenizer: Any
    weights: Weights
    longest: int
    device: torch.device


@contextmanager
def one_process() -> Iterator[None]:
    """megatron-core builds a model only inside process groups; one process alone makes its own, and takes them down."""
    mine = not torch.distributed.is_initialized()
    if mine:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    groups = not parallel_state.model_parallel_is_initialized()
    if groups:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    try:
        yield
    finally:
        if groups:
            parallel_state.destroy_model_parallel()
        if mine:
            torch.distributed.destroy_process_group()


def load(checkpoint: Path, given: Mapping[str, Any], dtype: str | None = None) -> Loaded:
    """Load the model of a checkpoint, whole, on this machine's accelerator. Needs `one_process`.

    Args:
        checkpoint: a --save folder or one checkpoint in it.
        given: tokenizer arguments that were given; for those that were not, the checkpoint's own are taken.
        dtype: `fp32` (the optimizer's master weights, where the checkpoint has them) or `bf16`; None: as stored, fp16
            as fp32.

    Raises:
        ValueError: no or a damaged checkpoint, no tokenizer, or one with more ids than the model.
    """
    weights = find_weights(checkpoint)
    tokenizer = build_tokenizer(tokenizer_options(weights, given))
    check_tokenizer(weights.tokenizer, ids_digest(tokenizer.tokenize), str(weights.folder))
    known = weights.vocab_size or weights.rows
    if tokenizer.vocab_size > known:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the model only {known}: it was trained with another "
            f"tokenizer"
        )
    if dtype is None:
        kind = torch.bfloat16 if weights.dtype is torch.bfloat16 else torch.float32
    else:
        kind = DTYPES[dtype]
    options = dataclasses.replace(weights.options, use_cpu_initialization=True)
    rows = tokenizer.vocab_size
    model = build_model(options, rows, kind)
    model.load_state_dict(weights.state(rows, masters=dtype == "fp32"))
    device = torch.device(get_accelerator().device_name())
    return Loaded(model.to(device).eval(), tokenizer, weights, options.max_position_embeddings, device)


def tokenizer_options(weights: Weights, given: Mapping[str, Any]) -> TokenizerOptions:
    """The tokenizer that is meant: by the arguments, by the checkpoint where they are silent.

    Raises:
        ValueError: neither names one that is there.
    """
    names = {field.name for field in dataclasses.fields(TokenizerOptions)}
    mine = {name: value for name, value in given.items() if name in names and value is not None}
    saved = {name: value for name, value in weights.arguments.get("tokenizer", {}).items() if name in names}
    if "tokenizer_model" in mine and "tokenizer_type" not in mine:
        folder = os.path.isdir(mine["tokenizer_model"])
        if not saved or folder != (saved["tokenizer_type"] == "HuggingFaceTokenizer"):
            mine["tokenizer_type"] = "HuggingFaceTokenizer" if folder else "SentencePieceTokenizer"
    if "tokenizer_type" in mine and mine["tokenizer_type"] != saved.get("tokenizer_type"):
        return TokenizerOptions(**mine)
    own = weights.folder.parent / TOKENIZER_FOLDER
    if saved.get("tokenizer_model") and not os.path.exists(saved["tokenizer_model"]) and own.is_dir():
        saved["tokenizer_model"] = str(own)  # an imported checkpoint that has been moved
    model = mine.get("tokenizer_model", saved.get("tokenizer_model"))
    if "tokenizer_model" in mine and not os.path.exists(mine["tokenizer_model"]):
        raise ValueError(f"--tokenizer-model {model}: no such file or folder")
    if not saved or (model is not None and not os.path.exists(model)):
        where = "names no tokenizer" if not saved else f"names the tokenizer {model}, which is not there"
        raise ValueError(f"{weights.folder} {where}; give --tokenizer-model")
    return TokenizerOptions(**{**saved, **mine})


def start_of_text(tokenizer: Any, kind: str) -> list[int]:
    """The ids that stand before a text, none or one.

    Args:
        tokenizer: of the model.
        kind: one of `STARTS`.

    Raises:
        ValueError: the tokenizer has no such id.
    """
    if kind == "none":
        return []
    token = tokenizer.eod if kind == "eod" else getattr(tokenizer, "bos", None)
    if token is None or token < 0:
        raise ValueError(f"--text-start {kind}: the tokenizer has no such id; choose from {', '.join(STARTS)}")
    return [int(token)]
