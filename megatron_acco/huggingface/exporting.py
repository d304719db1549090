"""A checkpoint of pretrain_gpt_acco.py to a folder that transformers loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_acco.huggingface.families import configuration, family_of, to_transformers
from megatron_acco.huggingface.output import check_output, new_folder
from megatron_acco.huggingface.tokenizers import convert_tokenizer
from megatron_acco.inference.loading import DTYPES, tokenizer_options
from megatron_acco.training.checkpoint.state import check_tokenizer
from megatron_acco.training.checkpoint.weights import find_weights
from megatron_acco.training.tokenizer import ids_digest

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def export(
    checkpoint: Path,
    out: Path,
    *,
    tokenizer: Mapping[str, Any] | None,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
) -> str:
    """Write `out` with config.json, safetensors and the tokenizer's files. Nothing is there before all is.

    Args:
        checkpoint: a --save folder or one checkpoint in it.
        out: folder to make.
        tokenizer: tokenizer arguments that were given, see `megatron_acco.inference.loading.tokenizer_options`; None:
            write no tokenizer.
        dtype: `fp32` (the optimizer's master weights, where the checkpoint has them) or `bf16`; None: as stored.
        max_shard_size: of one file.

    Returns:
        What was written, in words.

    Raises:
        ValueError: no or a damaged checkpoint, a model that no family expresses, no tokenizer.
    """
    from transformers import AutoModelForCausalLM

    check_output(out)
    weights = find_weights(checkpoint)
    options = weights.options
    family_of(options)
    converted, ids, rows = None, {}, weights.vocab_size
    if tokenizer is not None:
        converted, original = convert_tokenizer(tokenizer_options(weights, tokenizer))
        check_tokenizer(weights.tokenizer, ids_digest(original.tokenize), str(weights.folder))
        rows = rows or original.vocab_size
        if len(converted) > rows:
            raise ValueError(f"the tokenizer has {len(converted)} ids and the model only {rows}")
        ids = _ids(converted, original)
    # Else the families' own defaults would stand, which may not even be in the vocabulary.
    ids = {**dict.fromkeys(IDS), **ids, **weights.arguments.get("huggingface", {})}
    config = configuration(options, rows or weights.rows, ids)
    kind = weights.dtype if dtype is None else DTYPES[dtype]
    config.dtype = kind
    masters = kind is torch.float32
    state = to_transformers(weights.state(config.vocab_size, masters), options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # Strict: a name or a shape that transformers does not expect, or misses, ends here.
    model.load_state_dict({name: value.to(kind) for name, value in state.items()}, assign=True)
    model.tie_weights()
    with new_folder(out) as folder:
        try:
            model.save_pretrained(folder, max_shard_size=max_shard_size)
            if converted is not None:
                converted.save_pretrained(folder)
        except Exception as error:  # safetensors and tokenizers have classes of their own for a full disk
            raise ValueError(f"--out {out} cannot be written: {error}") from error
    count = sum(parameter.numel() for parameter in model.parameters())
    without = "" if converted is not None else ", no tokenizer"
    return (
        f"{out}: {type(model).__name__} of iteration {weights.iteration}, {count:,} weights in "
        f"{str(kind).removeprefix('torch.')}{weights.told(masters)}, {config.vocab_size:,} ids{without}"
    )


def _ids(converted: Any, original: Any) -> dict[str, int | None]:
    """The special ids of the configuration.

    Training puts one document behind the other: where it used no beginning-of-document id, a new one begins behind the
    end of another.
    """
    eod = int(original.eod)
    bos = converted.bos_token_id if type(original).__name__ == "HuggingFaceTokenizer" else eod
    return {"bos_token_id": eod if bos is None else bos, "eos_token_id": eod, "pad_token_id": converted.pad_token_id}
