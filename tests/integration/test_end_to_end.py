"""examples/end_to_end.sh, run small, and on from its Hugging Face folder: import and finetuning on instructions.

transformers, which has none of this project's code, is the judge of the exported model: the scores of `evaluate` and
the text of `generate` must be its own.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_acco.cli.main import main
from tests.integration.test_pretrain import environment, records, succeed

ROOT = Path(__file__).parents[2]
LIBRARY = Path(os.__file__).parent


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.slow
def test_from_raw_text_to_transformers_and_on_to_finetuning(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    script, out = ["bash", str(ROOT / "examples" / "end_to_end.sh")], tmp_path / "out"
    (tmp_path / "used").touch()
    refused = subprocess.run([*script, str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and refused.stderr == f"error: {tmp_path} is not empty; give another folder\n"
    sizes = {"UPDATES": "24", "VOCABULARY": "600", "HIDDEN": "32", "PORT": free_port()}
    names = "abc ast bdb bisect calendar cmd code copy csv dis"
    texts = [str(LIBRARY / f"{name}.py") for name in names.split()]
    finished = subprocess.run(
        [*script, str(out), *texts],
        env={**environment(), **sizes},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stdout[-6000:]
    assert "AccoZeroOptimizer" in finished.stdout

    # The scores are those of transformers on the same windows.
    score = json.loads((out / "scores.json").read_text())["text"]
    files = sorted((LIBRARY / "json").glob("*.py"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "huggingface")
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "huggingface").eval()
    stream = [tokenizer.eos_token_id]
    for path in files:
        stream += [*tokenizer(path.read_text(), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    nll = 0.0
    with torch.inference_mode():
        for first in range(0, len(stream) - 1, 128):
            window = torch.tensor([stream[first : first + 129]])
            losses = model(window[:, :-1]).logits.log_softmax(-1).gather(2, window[:, 1:, None])
            nll -= float(losses.sum())
    assert (score["documents"], score["tokens"]) == (len(files), len(stream) - 1)
    assert score["bytes"] == sum(path.stat().st_size for path in files)
    assert score["nll"] == pytest.approx(nll, rel=1e-5)
    assert score["perplexity"] == pytest.approx(math.exp(nll / (len(stream) - 1)), rel=1e-4)
    assert score["perplexity"] < 400 and model.config.vocab_size == 600  # it has learned something

    # So is the text.
    words = ["generate", "--checkpoint", str(out / "checkpoints"), "--prompt", "def main():\n"]
    assert main([*words, "--temperature", "0", "--tokens", "40", "--out", str(out / "text")]) == 0
    text = (out / "text").read_text()
    # Whole: what so small a model has learned of this Python's library may be that newlines follow newlines.
    assert len(text) > 20 and finished.stdout.endswith(text)

    # On from the Hugging Face folder.
    pretrained = tmp_path / "pretrained"
    assert main(["import", "--input", str(out / "huggingface"), "--out", str(pretrained)]) == 0
    pairs = [(f"upper: {word}\n", word.upper()) for word in "maple oak elm ash birch pine fir yew".split()]
    examples = tmp_path / "examples.jsonl"
    examples.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in pairs))
    tuned = tmp_path / "tuned"
    command = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "2", "--master_port", free_port()]
    command += ["pretrain_gpt_acco.py", *shlex.split((pretrained / "arguments.txt").read_text())]
    command += ["--deepspeed_config", "examples/end_to_end.json", "--load", str(pretrained), "--finetune"]
    command += ["--sft", "--train-data-path", str(examples), "--valid-data-path", str(examples)]
    command += "--seq-length 64 --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-2".split()
    command += "--lr-decay-style constant --eval-interval 5 --eval-iters 1 --log-interval 1 --num-workers 0".split()
    output = succeed([*command, "--save", str(tuned)])
    assert f"weights of {pretrained}/global_step0 (iteration 0); a new run begins with them" in output
    assert "8 examples to train on in 8 rows" in output
    losses = [record["lm_loss"] for record in records(tuned)]
    # The first update takes all examples once: its loss is that of the weights that it began with.
    assert losses[0] == pytest.approx(response_loss(model, tokenizer, pairs), rel=1e-3)
    assert losses[-1] < 0.8 * losses[0]


def response_loss(model: torch.nn.Module, tokenizer: object, pairs: list[tuple[str, str]]) -> float:
    """Mean over the response tokens and ends of all examples, one after the other in transformers."""
    total, count = 0.0, 0
    for prompt, response in pairs:
        start, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, response))  # type: ignore[operator]
        ids = torch.tensor([[2, *start, *answer, 2]])
        with torch.inference_mode():
            losses = model(ids[:, :-1]).logits.log_softmax(-1).gather(2, ids[:, 1:, None])
        total -= float(losses[0, len(start) :].sum())
        count += len(answer) + 1
    return total / count
