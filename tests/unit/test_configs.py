"""The ready configurations in deepspeed_configs/: a pair differs by the "acco" section and by nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_acco.config import AccoConfig, Mode, acco_config

FOLDER = Path(__file__).parents[2] / "deepspeed_configs"
NAMES = ["acco", "acco_8bit", "acco_bf16", "dpu", "wp", "zero1", "zero1_bf16"]


def load(name: str) -> dict[str, Any]:
    """The parsed file; a key that stands twice is an error."""

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        assert len(keys) == len(set(keys)), keys
        return dict(pairs)

    return json.loads((FOLDER / f"{name}.json").read_text(), object_pairs_hook=refuse_duplicates)


def test_the_folder_holds_these_files() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == NAMES


@pytest.mark.parametrize(
    ("with_section", "without"),
    [("acco", "zero1"), ("acco_8bit", "zero1"), ("dpu", "zero1"), ("wp", "zero1"), ("acco_bf16", "zero1_bf16")],
)
def test_pairs_differ_by_the_acco_section_only(with_section: str, without: str) -> None:
    config = load(with_section)
    section = config.pop("acco")
    assert config == load(without)
    assert AccoConfig.from_dict(section).mode is Mode(with_section.partition("_")[0])


@pytest.mark.parametrize("name", NAMES)
def test_every_file_states_what_decides_a_comparison(name: str) -> None:
    config = load(name)
    assert config["zero_optimization"]["stage"] == 1
    assert config["gradient_clipping"] == 1.0, "DeepSpeed clips silently when the value is left out"
    assert config["optimizer"]["type"] == "AdamW"
    assert config["optimizer"]["params"]["lr"] == "auto"
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        assert config[key] == "auto"
    half = name.endswith("_bf16")
    assert ("bf16" in config, "data_types" in config) == (half, half)
    if half:
        assert config["bf16"] == {"enabled": True}
        assert config["data_types"] == {"grad_accum_dtype": "fp32"}


@pytest.mark.parametrize("name", NAMES)
def test_active_exactly_with_the_section(name: str) -> None:
    assert (acco_config(load(name)) is None) == name.startswith("zero1")
