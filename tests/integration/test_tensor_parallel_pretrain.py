"""pretrain_gpt_acco.py under the real launcher on four CPU ranks: two replicas of two tensor-parallel ranks each.

Covers CASES B38 and B53 on TP2 (random generators of every rank, data by replica), B55 (batch counts replicas), and
the resume with another tensor-parallel size, which is refused (the way that works: test_pretrain.py).
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.integration.test_pretrain import (
    command,
    data,  # noqa: F401 (a fixture)
    records,
    refused_alone,
    reproducible,
    succeed,
    write_json,
)

TENSOR_PARALLEL = "--tensor-model-parallel-size 2 --sequence-parallel".split()
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()


def weights(folder: Path, iteration: int) -> dict[tuple[int, str], torch.Tensor]:
    result = {}
    for part in range(2):
        path = folder / f"global_step{iteration}" / f"mp_rank_{part:02d}_model_states.pt"
        module = torch.load(path, weights_only=False)["module"]
        result.update({(part, name): value for name, value in module.items() if torch.is_tensor(value)})
    return result


@pytest.mark.slow
def test_resume_on_two_replicas_of_two_ranks_is_bit_identical(
    data: Path,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """bf16 with dropout (0.1), sequence parallelism, recomputation: every stream of every rank goes on where it was.

    The checkpoint of the middle was written beside training.
    """
    config = write_json(tmp_path, "acco", bf16={"enabled": "auto"})
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = [*TENSOR_PARALLEL, *RECOMPUTE, "--bf16"]
    words += ["--train-iters", "6", "--eval-interval", "3", "--save-interval", "3"]
    output = succeed(command(data, config, *words, "--save", str(whole), "--async-save", ranks=4))
    assert re.search(r"saved checkpoint at iteration 3 to .* written in", output)
    assert "on each of 2 tensor-parallel ranks" in output and "x 2 data-parallel ranks" in output
    assert [record["consumed_samples"] for record in records(whole)] == [8 * t for t in range(1, 7)]
    first = weights(whole, 6)
    norm = "decoder.final_layernorm.weight"
    assert torch.equal(first[0, norm], first[1, norm])

    shutil.copytree(whole, parts, ignore=shutil.ignore_patterns("global_step6", ".lock"))
    (parts / "latest").write_text("global_step3")
    resume = ["--save", str(parts), "--load", str(parts)]
    output = succeed(command(data, config, *words, *resume, ranks=4))
    assert "at iteration 3" in output
    assert reproducible(whole) == reproducible(parts) and len(records(parts)) == 6
    second = weights(parts, 6)
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)

    alone = command(data, config, "--bf16", "--train-iters", "6", "--load", str(parts), ranks=1)
    message = refused_alone(capfd, monkeypatch, alone)
    assert "was saved with --tensor-model-parallel-size 2, this run has 1; convert it with `python -m" in message
    (parts / "global_step6" / "mp_rank_01_model_states.pt").unlink()
    assert "mp_rank_01_model_states.pt" in refused_alone(capfd, monkeypatch, [*alone, "--load-strict"])
    assert "cannot be shared out" in refused_alone(capfd, monkeypatch, [*alone, *TENSOR_PARALLEL])
