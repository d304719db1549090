"""The `acco` section (AccoConfig) and its generated reference."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron_acco import config_reference
from megatron_acco.config import AccoConfig, Accumulation, Mode, acco_config

REPOSITORY = Path(__file__).parents[2]


def test_section_absent_or_disabled_is_none() -> None:
    assert acco_config({}) is None
    assert acco_config({"acco": {"enabled": False}}) is None


def test_section_empty_is_the_default() -> None:
    assert acco_config({"acco": {}}) == AccoConfig()
    assert AccoConfig() == AccoConfig(mode=Mode.ACCO, accumulation=Accumulation.FIXED, estimate_fraction=0.5)


def test_section_is_read() -> None:
    section = {"mode": "wp", "accumulation": "fixed", "estimate_fraction": 0.25, "warmup_updates": 10, "enabled": True}
    config = acco_config({"acco": section})
    assert config == AccoConfig(mode=Mode.WP, estimate_fraction=0.25, warmup_updates=10)
    assert section["mode"] == "wp"


@pytest.mark.parametrize("mode", ["dpu", "wp", "sync"])
def test_without_estimates_nothing_is_quantized(mode: str) -> None:
    section = {"estimate_bits": 8, "estimate_stochastic_rounding": True, "estimate_fraction": "auto"}
    assert AccoConfig.from_dict({"mode": "acco", **section}).coarse
    assert not AccoConfig.from_dict({"mode": mode, **section}).coarse


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        AccoConfig().mode = Mode.SYNC  # type: ignore[misc]


@pytest.mark.parametrize(
    ("section", "fragments"),
    [
        ({"enabeld": True}, ['unknown key "acco.enabeld"', 'did you mean "enabled"']),
        ({"Mode": "acco"}, ['unknown key "acco.Mode"', 'did you mean "mode"']),
        ({"xyzzy": 1}, ['unknown key "acco.xyzzy"', "known keys", "warmup_updates"]),
        ({"mode": "aco"}, ['"acco.mode"', "acco, dpu, wp, sync", 'did you mean "acco"']),
        ({"mode": True}, ['"acco.mode"', "True"]),
        ({"mode": None}, ['"acco.mode"', "None"]),
        ({"mode": ["acco"]}, ['"acco.mode"']),
        ({"mode": "auto"}, ['"acco.mode"', "nothing resolves"]),
        ({"estimate_bits": "auto"}, ['"acco.estimate_bits"', "nothing resolves"]),
        ({"estimate_bits": 2}, ['"acco.estimate_bits"', "32, 16, 8, 4", "got 2"]),
        ({"estimate_bits": 8.0}, ['"acco.estimate_bits"', "whole number"]),
        ({"estimate_bits": 4, "estimate_block_size": 100}, ['"acco.estimate_block_size"', "multiple of 8", "100"]),
        ({"estimate_group": "rack"}, ['"acco.estimate_group"', '"all", "node" or a number', "'rack'"]),
        ({"estimate_group": 0}, ['"acco.estimate_group"', "got 0"]),
        ({"estimate_group": True}, ['"acco.estimate_group"', "whole number", "True"]),
        ({"estimate_group": "auto"}, ['"acco.estimate_group"', "nothing resolves"]),
        ({"estimate_block_size": 0}, ['"acco.estimate_block_size"', "multiple of 8"]),
        ({"estimate_stochastic_rounding": True}, ['"acco.estimate_stochastic_rounding"', '"acco.estimate_bits"', "8"]),
        ({"accumulation": "adaptve"}, ['"acco.accumulation"', "fixed", 'did you mean "adaptive"']),
        ({"fallback": "sync"}, ['"acco.fallback"', "warn, auto"]),
        ({"max_micro_batches_per_half": 0}, ['"acco.max_micro_batches_per_half"', "1 or more"]),
        ({"lr_batch_scaling": True}, ['"acco.lr_batch_scaling"', '"accumulation": "adaptive"']),
        ({"enabled": 1}, ['"acco.enabled"', "true or false"]),
        ({"enabled": "false"}, ['"acco.enabled"', "true or false"]),
        ({"estimate_fraction": "0.5"}, ['"acco.estimate_fraction"', "number"]),
        ({"estimate_fraction": True}, ['"acco.estimate_fraction"', "number"]),
        ({"estimate_fraction": float("nan")}, ['"acco.estimate_fraction"', "finite"]),
        ({"estimate_fraction": float("inf")}, ['"acco.estimate_fraction"', "finite"]),
        ({"estimate_fraction": 0}, ['"acco.estimate_fraction"', "between 0 and 1"]),
        ({"estimate_fraction": 1.0}, ['"acco.estimate_fraction"', "between 0 and 1"]),
        ({"estimate_fraction": -0.5}, ['"acco.estimate_fraction"', "between 0 and 1"]),
        ({"warmup_updates": 2.5}, ['"acco.warmup_updates"', "whole number"]),
        ({"warmup_updates": 2.0}, ['"acco.warmup_updates"', "whole number"]),
        ({"warmup_updates": True}, ['"acco.warmup_updates"', "whole number"]),
        ({"warmup_updates": "10"}, ['"acco.warmup_updates"', "whole number"]),
        ({"warmup_updates": -1}, ['"acco.warmup_updates"', "0 or more"]),
        ("acco", ['"acco"', "an object"]),
        (True, ['"acco"', "an object"]),
        (None, ['"acco"', "an object"]),
        ([], ['"acco"', "an object"]),
    ],
)
@pytest.mark.parametrize("disabled", [False, True])
def test_wrong_section_is_refused_also_when_disabled(section: Any, fragments: list[str], disabled: bool) -> None:
    if disabled and isinstance(section, dict):
        section = {"enabled": False, **section}
    with pytest.raises(ValueError) as caught:
        acco_config({"acco": section})
    message = str(caught.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize(
    ("steps", "fraction", "first"),
    [
        (2, 0.5, 1),
        (3, 0.5, 1),
        (4, 0.5, 2),
        (5, 0.5, 2),
        (5, 0.8, 4),
        (4, 0.1, 1),
        (4, 0.99, 3),
        (100, 0.29, 29),
        (10, 0.7, 7),
        (1, 0.5, 1),
    ],
)
def test_halves_have_one_micro_batch_at_least(steps: int, fraction: float, first: int) -> None:
    assert AccoConfig(estimate_fraction=fraction).first_half_micro_batches(steps) == first


def test_a_chosen_split_takes_the_place_of_the_configured_one() -> None:
    auto = AccoConfig.from_dict({"estimate_fraction": "auto"})
    assert auto.auto_fraction and auto.first_half_micro_batches(6) == 3
    assert [auto.first_half_micro_batches(7, first / 7) for first in range(1, 7)] == list(range(1, 7))


def test_one_micro_batch_per_update_is_refused_in_mode_acco_only() -> None:
    with pytest.raises(ValueError, match="at least 2, got 1"):
        AccoConfig().check_accumulation_steps(1)
    AccoConfig().check_accumulation_steps(2)
    AccoConfig(enabled=False).check_accumulation_steps(1)
    for mode in (Mode.DPU, Mode.WP, Mode.SYNC):
        AccoConfig(mode=mode).check_accumulation_steps(1)


def test_groups_of_unequal_size_are_refused() -> None:
    three = AccoConfig.from_dict({"estimate_group": 3})
    with pytest.raises(ValueError, match="cuts the 8 data-parallel ranks into groups of 3, 3, 2, which must be equal"):
        three.check_data_parallel(8)
    three.check_data_parallel(6)
    three.check_data_parallel(2)  # one group, smaller than asked for
    AccoConfig(mode=Mode.DPU, estimate_group=3).check_data_parallel(8)
    AccoConfig(estimate_group="node").check_data_parallel(8)


# ---- the generated reference -----------------------------------------------------------------------------------------


def test_reference_has_every_option_with_its_default() -> None:
    rows = config_reference.render().splitlines()[2:]
    assert len(rows) == len(dataclasses.fields(AccoConfig))
    for row, field in zip(rows, dataclasses.fields(AccoConfig), strict=True):
        assert row.startswith(f"| `{field.name}` |")
        assert row.count(" | ") == 3
        assert len(field.metadata["doc"]) > 20
    assert '| `"acco"` |' in rows[1]
    assert "| `true` |" in rows[0]


@pytest.mark.parametrize("name", ["docs/configuration.md", "README.md"])
def test_reference_in_the_documents_is_up_to_date(name: str) -> None:
    assert config_reference.is_up_to_date(REPOSITORY / name), f"run: python -m megatron_acco.config_reference {name}"


def test_reference_is_inserted_between_the_markers_only(tmp_path: Path) -> None:
    document = tmp_path / "d.md"
    document.write_text(f"# before\n\n{config_reference.BEGIN}\nold\n{config_reference.END}\n\nafter\n")
    assert config_reference.main(["--check", str(document)]) == 1
    assert config_reference.main([str(document)]) == 0
    assert config_reference.main(["--check", str(document)]) == 0
    text = document.read_text()
    assert text.startswith("# before\n\n") and text.endswith("\n\nafter\n")
    assert config_reference.render() in text
    assert "\nold\n" not in text


@pytest.mark.parametrize("text", ["", config_reference.BEGIN, f"{config_reference.END}{config_reference.BEGIN}"])
def test_reference_without_markers_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="markers"):
        config_reference.insert(text)
