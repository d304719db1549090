"""Without an `acco` section a script that registered the product is DeepSpeed's own, to the last bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.harness import free_port

ROOT = Path(__file__).resolve().parents[2]

# The ranks are forks of a process that has imported DeepSpeed, before any thread of it runs: start-up costs seconds.
SCRIPT = """
import hashlib, json, os, sys
import torch
import deepspeed

HOW, SECTION = sys.argv[1], json.loads(sys.argv[2])
if HOW == "register":
    import megatron_acco
    megatron_acco.register()

def config(precision):
    return {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 1}, "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}, **precision, **SECTION,
    }

def train(precision):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(precision))
    dtype = next(engine.module.parameters()).dtype
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    digest = hashlib.sha256()
    for step in range(12):
        loss = engine(torch.randn(4, 5, generator=generator).to(dtype)).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        digest.update(repr((float(loss), engine.get_lr(), engine.get_global_grad_norm(), engine.global_steps)).encode())
    for tensor in engine.module.state_dict().values():
        digest.update(tensor.float().numpy().tobytes())
    classes = [f"{type(x).__module__}.{type(x).__name__}" for x in (engine, optimizer, scheduler)]
    engine.destroy()
    return classes, digest.hexdigest()

def rank(index):
    os.environ.update(RANK=str(index), LOCAL_RANK=str(index))
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    answers = [train({}), train({"bf16": {"enabled": True}})]
    known = "megatron_acco" in sys.modules
    torch.distributed.barrier()
    os.write(1, ("RESULT " + json.dumps([index, known, answers]) + "\\n").encode())  # in one piece
    os._exit(0)

children = []
for index in range(2):
    child = os.fork()
    if child == 0:
        try:
            rank(index)
        finally:
            os._exit(1)
    children.append(child)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def outcome(tmp_path: Path, how: str, section: dict[str, Any]) -> list[Any]:
    """(whether the product was imported, [(classes, digest)] of fp32 and bf16) per rank."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    env |= {"LOCAL_SIZE": "2", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(script), how, json.dumps(section)], env=env, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    lines = [json.loads(line[7:]) for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    return [line[1:] for line in sorted(lines)]


@pytest.mark.slow
def test_registered_but_without_a_section_is_deepspeed_bit_for_bit(tmp_path: Path) -> None:
    plain = outcome(tmp_path, "never", {})
    assert [imported for imported, _ in plain] == [False, False]
    for section in ({}, {"acco": {"enabled": False}}):
        registered = outcome(tmp_path, "register", section)
        assert [imported for imported, _ in registered] == [True, True]
        assert [answers for _, answers in registered] == [answers for _, answers in plain]
    engine, optimizer, _ = plain[0][1][0][0]
    assert engine == "deepspeed.runtime.engine.DeepSpeedEngine"
    assert optimizer == "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
    engine, optimizer, _ = outcome(tmp_path, "register", {"acco": {"mode": "sync"}})[0][1][0][0]
    assert (engine, optimizer) == (
        "megatron_acco.zero.engine.AccoEngine",
        "megatron_acco.zero.optimizer.AccoZeroOptimizer",
    )
