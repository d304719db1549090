"""A Hugging Face folder to a checkpoint that training begins with."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import torch

from megatron_acco.huggingface.exporting import IDS
from megatron_acco.huggingface.families import from_transformers, model_options
from megatron_acco.huggingface.output import check_output, new_folder
from megatron_acco.inference.loading import DTYPES, TOKENIZER_FOLDER
from megatron_acco.training.checkpoint import Identity, TrainState, store
from megatron_acco.training.checkpoint.state import CLIENT_STATE
from megatron_acco.training.checkpoint.writer import write_file
from megatron_acco.training.model import ModelOptions
from megatron_acco.training.options import flag_of
from megatron_acco.training.tokenizer import ids_digest

ARGUMENTS = "arguments.txt"
"""In an imported checkpoint: the arguments of pretrain_gpt_acco.py that describe its model and tokenizer."""


def import_model(folder: Path, out: Path, *, dtype: str | None = None) -> str:
    """Write the checkpoint folder `out` from a Hugging Face folder. Nothing is there before all is.

    Args:
        folder: with config.json, weights and, if training is to use it, the tokenizer.
        out: folder to make; --load with --finetune, and --pretrained-checkpoint, take it.
        dtype: `fp32` or `bf16`; None: as stored.

    Returns:
        What was written, in words.

    Raises:
        ValueError: another architecture, a setting that the model cannot express, missing or surplus weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # it prints tables of what is told below
    check_output(out)
    if not (folder / "config.json").is_file():
        raise ValueError(f"--input {folder}: no Hugging Face model there (no file {folder / 'config.json'})")
    try:
        described = json.loads((folder / "config.json").read_text())
        if not isinstance(described, dict):
            raise ValueError("it is not a JSON object")
        kind = described.get("model_type")
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ValueError(f"--input {folder}: config.json cannot be used: {error}") from error
    if kind != config.model_type:
        raise ValueError(f"--input {folder}: config.json names no model_type")
    options = model_options(config, f"--input {folder}")
    tokenizer = _load_tokenizer(folder)
    if tokenizer is not None and len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"--input {folder}: the tokenizer has {len(tokenizer)} ids and the model only {config.vocab_size}"
        )
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=_stored_dtype(folder),
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below
        )
    except Exception as error:
        raise ValueError(f"--input {folder}: the weights cannot be loaded: {error}") from error
    faults = {name: sorted(report.get(name) or ()) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    for name, keys in faults.items():
        if keys:
            raise ValueError(
                f"--input {folder}: weights with {name.replace('_', ' ')}: {', '.join(map(str, keys[:5]))}"
            )
    theirs = model.state_dict()
    if not torch.equal(theirs["lm_head.weight"], model.get_input_embeddings().weight):
        # Whatever config.json says: transformers does not tie two matrices that differ in the files.
        options = dataclasses.replace(options, untie_embeddings_and_output_weights=True)
    state = from_transformers(theirs, options)
    stored = next(iter(state.values())).dtype
    target = stored if dtype is None else DTYPES[dtype]
    state = {name: value.detach().to(target) for name, value in state.items()}
    _write(out, state, options, config, tokenizer)
    count = sum(value.numel() for value in state.values())
    return (
        f"{out}: {config.model_type}, {count:,} weights in {str(target).removeprefix('torch.')}, {config.vocab_size:,} "
        f"ids{'' if tokenizer is not None else ', no tokenizer'}; {out / ARGUMENTS} has the arguments of its model"
    )


def _stored_dtype(folder: Path) -> Any:
    """The type that holds all weights as they are in the files; config.json, which "auto" follows, may name another."""
    from safetensors import safe_open

    kinds = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            kinds |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 (no mapping)
    known = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    if not kinds or not kinds <= known.keys():
        return "auto"
    return known[kinds.pop()] if len(kinds) == 1 else torch.float32


def _load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, None if it has none."""
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt")
    if not any((folder / name).is_file() for name in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ValueError(f"--input {folder}: the tokenizer cannot be loaded: {error}") from error


def _write(out: Path, state: dict[str, torch.Tensor], options: ModelOptions, config: Any, tokenizer: Any) -> None:
    words = model_arguments(options)
    arguments: dict[str, Any] = {"huggingface": {name: getattr(config, name, None) for name in IDS}}
    digest = None
    if tokenizer is not None:
        digest = ids_digest(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
        path = str(out.absolute() / TOKENIZER_FOLDER)
        arguments["tokenizer"] = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": path}
        words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", path]
    identity = Identity(
        model={**dataclasses.asdict(options), "padded_vocab_size": config.vocab_size},
        schedule={},
        order={},
        ranks=0,
        arguments=arguments,
        vocab_size=config.vocab_size,
        tokenizer=digest,
    )
    described = dataclasses.asdict(identity)
    header = {"format": store.FORMAT, "state": dataclasses.asdict(TrainState()), "identity": described}
    with new_folder(out) as staged:
        folder = staged / store.tag_of(0)
        folder.mkdir()
        record = write_file({"module": state, CLIENT_STATE: header}, folder / store.MODEL_FILE)
        store.write_manifest(folder, 0, described, [record])
        if tokenizer is not None:
            tokenizer.save_pretrained(staged / TOKENIZER_FOLDER)
        (staged / ARGUMENTS).write_text(shlex.join(words) + "\n")
        store.move_latest(staged, store.stage_latest(staged, store.tag_of(0), "import"))


def model_arguments(options: ModelOptions) -> list[str]:
    """The command-line arguments that describe a model; what has its default is left out."""
    words = []
    # No padding: pretrained weights have learned nothing that would make it unlikely.
    options = dataclasses.replace(options, make_vocab_size_divisible_by=1)
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value is True:
            words.append(flag_of(field))
        elif value is not None and value is not False and value != field.default:
            words += [flag_of(field), str(value)]
    return words
