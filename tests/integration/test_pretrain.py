"""pretrain_gpt_acco.py under the real launcher, two CPU ranks, a model of 30 thousand weights.

Covers CASES B29 and B38 (exact resume, random generators), B34 (the universal form), B35 (a rank is killed while it
writes its shard), B45 (too few processes), B53 (consumed samples), B24 and B61 (log figures), the save on SIGTERM and
SIGUSR1, a full disk, data that ends early, and bad input: one message, non-zero exit, no model built.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch
from deepspeed.checkpoint.ds_to_universal import main as convert

ROOT = Path(__file__).parents[2]
TIME_LIMIT = 240.0
AUTO_BATCHES = {"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}
METHODS = {"zero1": None, "acco": {"mode": "acco"}, "dpu": {"mode": "dpu"}, "wp": {"mode": "wp"}}
METHODS["acco_8bit"] = {
    **json.loads((ROOT / "deepspeed_configs" / "acco_8bit.json").read_text())["acco"],
    "warmup_updates": 3,
}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a SentencePiece tokenizer and an indexed corpus of 60 documents."""
    import sentencepiece
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder = tmp_path_factory.mktemp("data")
    words = (ROOT / "pretrain_gpt_acco.py").read_text().split() + (ROOT / "megatron_acco/config.py").read_text().split()
    generator = numpy.random.default_rng(0)
    documents = [" ".join(generator.choice(words, 120)) for _ in range(60)]
    (folder / "text").write_text("\n".join(documents))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "tok"), vocab_size=200, minloglevel=2
    )
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tok.model"))
    builder = IndexedDatasetBuilder(str(folder / "corpus.bin"), dtype=numpy.uint16)
    for document in documents:
        ids = [*tokenizer.encode(document), tokenizer.eos_id()]
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(str(folder / "corpus.idx"))
    return folder


def write_json(folder: Path, method: str, acco: dict[str, Any] | None = None, **more: Any) -> Path:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1, "torch_adam": True}},
        **more,
    }
    if METHODS[method] is not None:
        config["acco"] = {**METHODS[method], **(acco or {})}
    path = folder / f"{method}.json"
    path.write_text(json.dumps(config))
    return path


def command(data: Path, config: Path, *more: str, ranks: int = 2) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    deepspeed = str(Path(sys.executable).parent / "deepspeed")
    launcher = [deepspeed, "--num_gpus", str(ranks), "--master_port", str(port), "pretrain_gpt_acco.py"]
    model = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    training = "--lr 3e-3 --lr-warmup-iters 4 --lr-decay-style cosine --train-iters 20 --log-interval 1"
    evaluation = "--split 80,20,0 --eval-interval 5 --eval-iters 2 --num-workers 0"
    tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(data / "tok.model")]
    return [
        *launcher,
        *model.split(),
        *training.split(),
        *evaluation.split(),
        *tokenizer,
        *["--data-path", str(data / "corpus"), "--deepspeed_config", str(config)],
        *more,
    ]


def directly(words: list[str]) -> list[str]:
    """The same run, of one rank, without the launcher, which is quicker."""
    return [sys.executable, *words[5:]]


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def run(words: list[str]) -> tuple[int, str]:
    """Exit code and output of a launch that is expected to end by itself."""
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT)
    except BaseException:
        # The launcher's children are in its session; killing the launcher alone would leave them.
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def succeed(words: list[str]) -> str:
    code, output = run(words)
    assert code == 0, output[-4000:]
    return output


def records(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def reproducible(folder: Path) -> list[tuple[Any, ...]]:
    names = ("iteration", "consumed_samples", "lm_loss", "grad_norm", "learning_rate", "skipped_iterations")
    return [tuple(record.get(name) for name in names) for record in records(folder) + records(folder, "validation")]


def weights(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    path = folder / f"global_step{iteration}" / "mp_rank_00_model_states.pt"
    module = torch.load(path, weights_only=False)["module"]
    return {name: value for name, value in module.items() if torch.is_tensor(value)}


# ---- resume -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_zero1_runs_and_logs_by_the_same_script(data: Path, tmp_path: Path) -> None:
    output = succeed(command(data, write_json(tmp_path, "zero1"), "--save", str(tmp_path / "run")))
    check_log(output, tmp_path / "run", acco=False)


@pytest.mark.slow
def test_resume_is_bit_identical_to_an_uninterrupted_run(data: Path, tmp_path: Path) -> None:
    """The other modes: tests/distributed/test_resume.py."""
    config = write_json(tmp_path, "acco")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    output = succeed(command(data, config, "--save", str(whole)))
    check_log(output, whole, acco=True)

    resumable = ["--save", str(parts), "--load", str(parts)]
    output = succeed(command(data, config, *resumable, "--exit-interval", "10"))
    assert "training starts fresh" in output
    assert (parts / "latest").read_text() == "global_step10"
    # As if the first run had gone on and crashed: its records past the save are made again.
    with open(parts / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "iteration": 11, "lm_loss": -1}\n{"kind": "tra')
    output = succeed(command(data, config, *resumable))
    assert "at iteration 10" in output

    assert reproducible(whole) == reproducible(parts) and len(records(parts)) == 20
    first, second = weights(whole, 20), weights(parts, 20)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def check_log(output: str, folder: Path, acco: bool) -> None:
    """Every figure is in Megatron's line and in metrics.jsonl, and the run learns."""
    trained = records(folder)
    assert [record["iteration"] for record in trained] == list(range(1, 21))
    assert [record["consumed_samples"] for record in trained] == [8 * t for t in range(1, 21)]
    assert trained[0]["learning_rate"] == 0.0 and trained[4]["learning_rate"] == pytest.approx(3e-3)
    assert trained[-1]["lm_loss"] < trained[0]["lm_loss"] - 0.2
    for record in trained:
        assert record["grad_norm"] > 0.0 and record["tokens_per_second"] > 0.0
        assert (record["communication_ms_per_round"] is not None) == acco
    assert any(record["communication_hidden_percent"] is not None for record in trained) == acco
    line = next(line for line in output.splitlines() if re.match(r" iteration +20/ +20 ", line))
    for name in (
        "consumed samples:",
        "elapsed time per iteration (ms):",
        "learning rate:",
        "global batch size:",
        "lm loss:",
        "grad norm:",
        "number of skipped iterations:",
        "tokens per second:",
    ):
        assert name in line
    assert ("communication hidden (%):" in line) == acco
    evaluated = records(folder, "validation")
    assert [record["iteration"] for record in evaluated] == [5, 10, 15, 20]
    assert all(record["perplexity"] == pytest.approx(numpy.exp(record["lm_loss"])) for record in evaluated)
    assert json.loads((folder / "arguments.json").read_text())["deepspeed"]["gradient_accumulation_steps"] == 4


@pytest.mark.slow
def test_llama_style_in_bf16_with_8_bit_estimates_and_validation_sets_of_their_own(data: Path, tmp_path: Path) -> None:
    config = write_json(tmp_path, "acco_8bit", bf16={"enabled": "auto"})
    llama = (
        "--swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights "
        "--disable-bias-linear --group-query-attention --num-query-groups 2 --bf16"
    )
    metrics = tmp_path / "out" / "m.jsonl"
    corpus = str(data / "corpus")
    # With loader processes: the ranks must end although these outlive a launcher's signal.
    words = command(data, config, *llama.split(), "--metrics-file", str(metrics), "--num-workers", "1")
    for flag in ("--data-path", "--split"):
        del words[words.index(flag) : words.index(flag) + 2]
    sets = ["--valid-data-path", f"seen={corpus}", f"again={corpus}", "--multiple-validation-sets"]
    output = succeed([*words, "--train-data-path", corpus, *sets])
    assert "bfloat16" in output and "AccoZeroOptimizer" in output
    assert "an estimate in 8 bits after the first 2 and a commit after the other 2" in output
    found = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [record["lm_loss"] for record in found if record["kind"] == "train"]
    assert losses[-1] < losses[0]
    parts = [record for record in found if record["kind"] == "validation_set"]
    means = [record for record in found if record["kind"] == "validation"]
    assert [(part["iteration"], part["set"]) for part in parts] == [
        (iteration, name) for iteration in (5, 10, 15, 20) for name in ("seen", "again")
    ]
    for mean, seen, again in zip(means, parts[::2], parts[1::2], strict=True):
        assert seen["lm_loss"] == again["lm_loss"] == pytest.approx(mean["lm_loss"])  # the same data
    assert "validation loss on seen at iteration 20" in output and "validation loss at iteration 20" in output


# ---- signals and failures -----------------------------------------------------------------------------------------


class Job:
    """A launch that runs on while the test looks at it."""

    def __init__(self, words: list[str], log: Path) -> None:
        self.log = log
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=environment(), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_for(self, text: str) -> None:
        limit = time.monotonic() + TIME_LIMIT
        while text not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < limit, self.log.read_text()[-4000:]
            time.sleep(0.1)

    def ranks(self) -> list[psutil.Process]:
        found = re.findall(r"process (\d+) spawned", self.log.read_text())
        return [psutil.Process(int(pid)) for pid in found]

    def end(self, seconds: float = TIME_LIMIT) -> int:
        code = self.process.wait(timeout=seconds)
        with open(self.log) as file:
            assert "Traceback" not in file.read() or code != 0
        return code


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Any]:
    started: list[Job] = []

    def start(words: list[str]) -> Job:
        started.append(Job(words, tmp_path / f"log{len(started)}"))
        return started[-1]

    yield start
    for job in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()


@pytest.mark.slow
def test_sigterm_saves_at_an_update_boundary_and_the_run_goes_on_from_there(
    data: Path, tmp_path: Path, jobs: Any
) -> None:
    config, save = write_json(tmp_path, "acco"), tmp_path / "run"
    words = ["--save", str(save), "--load", str(save), "--train-iters", "5000", "--lr-decay-iters", "5000"]
    job = jobs(command(data, config, *words))
    job.wait_for("iteration        3/")
    job.ranks()[1].send_signal(signal.SIGTERM)
    # 75: stopped by a signal after saving.
    assert job.end() == 75
    iteration = int((save / "latest").read_text().removeprefix("global_step"))
    assert iteration >= 3 and len(records(save)) == iteration
    # The same command continues. SIGUSR1 (Slurm's notice ahead of the time limit) does the same as SIGTERM.
    job = jobs(command(data, config, *words, "--async-save", "--save-interval", "2", "--save-retain", "1"))
    job.wait_for("written in ")
    job.ranks()[0].send_signal(signal.SIGUSR1)
    assert job.end() == 75
    output = job.log.read_text()
    assert f"at iteration {iteration}" in output and "beside training | training held for" in output
    last = int((save / "latest").read_text().removeprefix("global_step"))
    assert last > iteration and len(records(save)) == last
    assert [path.name for path in save.glob("global_step*")] == [f"global_step{last}"]


@pytest.mark.slow
@pytest.mark.parametrize("starting", [True, False], ids=["while the ranks start", "in training"])
def test_sigterm_to_the_deepspeed_command_saves_and_leaves_no_orphan(
    data: Path, tmp_path: Path, jobs: Any, starting: bool
) -> None:
    """The single-node command dies of SIGTERM without passing it on."""
    save = tmp_path / "run"
    job = jobs(command(data, write_json(tmp_path, "acco"), "--save", str(save), "--train-iters", "5000"))
    limit = time.monotonic() + TIME_LIMIT
    while starting and not (save / ".lock").exists():  # taken before the ranks meet
        assert job.process.poll() is None and time.monotonic() < limit
        time.sleep(0.05)
    if not starting:
        job.wait_for("iteration        3/")
    ranks = job.ranks()
    job.process.terminate()
    _, alive = psutil.wait_procs(ranks, timeout=TIME_LIMIT)
    assert not alive
    iteration = int((save / "latest").read_text().removeprefix("global_step"))
    assert iteration >= (1 if starting else 3) and len(records(save)) == iteration
    assert "the launcher is gone" in job.log.read_text()


def with_fault(words: list[str], kind: str, rank: int, iteration: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("MEGATRON_ACCO_FAULT", f"{kind} {rank} {iteration}")
    return ["tests/integration/faulty_disk.py" if word == "pretrain_gpt_acco.py" else word for word in words]


@pytest.mark.slow
def test_a_rank_killed_while_it_writes_its_shard_loses_nothing(
    data: Path, tmp_path: Path, jobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, save = write_json(tmp_path, "acco"), tmp_path / "run"
    words = ["--save", str(save), "--load", str(save), "--train-iters", "12", "--save-interval", "5"]
    job = jobs(with_fault(command(data, config, *words), "hang", 1, 10, monkeypatch))
    job.wait_for("writing slowly")
    ranks = job.ranks()
    ranks[1].kill()
    assert job.end() != 0
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive
    assert (save / "latest").read_text() == "global_step5" and not (save / "global_step10").exists()
    assert list(save.glob(".saving-global_step10-*"))

    output = succeed(command(data, config, *words))
    assert "at iteration 5" in output and "removed what interrupted saves left" in output
    assert [record["iteration"] for record in records(save)] == list(range(1, 13))
    assert sorted(path.name for path in save.glob("*global_step*")) == [f"global_step{t}" for t in (10, 12, 5)]
    assert not list(save.glob(".saving*"))

    # One byte of rank 1's shard turns over: rank 1 alone sees it, both go back to iteration 10.
    (shard,) = (save / "global_step12").glob("zero_pp_rank_1_*")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    refused([*command(data, config, *words), "--load-strict"], f"{shard} is damaged")
    # On the way, a smaller batch: 15 updates of 6 samples end 10 samples after 10 updates of 8.
    smaller = ["--global-batch-size", "6", "--override-opt_param-scheduler", "--train-iters", "15"]
    config = write_json(tmp_path, "acco", gradient_accumulation_steps=3)
    output = succeed(command(data, config, *words, *smaller))
    assert f"global_step12 is not whole: {shard} is damaged" in output and "at iteration 10" in output
    assert "WARNING: " in output and "resuming from global_step10, the newest that is whole for all ranks" in output
    assert "the data ends with iteration 11 of 15" in output and (save / "latest").read_text() == "global_step11"


@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_one_message_and_keeps_the_last_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = tmp_path / "run"
    words = command(data, write_json(tmp_path, "acco"), "--save", str(save), "--save-interval", "2", "--async-save")
    code, output = run(with_fault(words, "full", 1, 4, monkeypatch))
    assert code != 0 and "ERROR: the checkpoint of iteration 4 could not be saved" in output, output[-3000:]
    assert "rank 1: " in output and "No space left on device" in output and "Traceback" not in output
    assert (save / "latest").read_text() == "global_step2" and not list(save.glob(".saving*"))
    assert [path.name for path in save.glob("global_step*")] == ["global_step2"]


@pytest.mark.slow
def test_exit_duration_saves(data: Path, tmp_path: Path) -> None:
    config, save = write_json(tmp_path, "zero1"), tmp_path / "run"
    words = ["--save", str(save), "--train-iters", "5000", "--exit-duration-in-mins", "0.02"]
    output = succeed(command(data, config, *words))
    iteration = int((save / "latest").read_text().removeprefix("global_step"))
    assert 1 <= iteration < 5000 and f"saved checkpoint at iteration {iteration}" in output


def test_too_few_processes_end_with_a_message(data: Path, tmp_path: Path) -> None:
    words = command(data, write_json(tmp_path, "zero1"), "--distributed-timeout-minutes", "0.05")
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": words[4]}
    result = subprocess.run(
        [sys.executable, *words[5:]],
        cwd=ROOT,
        env={**environment(), **alone},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    assert result.returncode == 1 and "rank 0 of 2 could not meet the others at 127.0.0.1" in result.stderr


# ---- bad input ----------------------------------------------------------------------------------------------------


def refused(words: list[str], message: str) -> None:
    """Under the launcher: one message, non-zero exit, before the model is built."""
    code, output = run(words)
    assert code != 0 and output.count("ERROR: ") == 1, output[-3000:]
    assert message in output and "Traceback" not in output and " parameters, vocabulary" not in output


@pytest.mark.slow
def test_bad_data_is_refused_once_for_all_ranks(data: Path, tmp_path: Path) -> None:
    words = command(data, write_json(tmp_path, "acco"), "--tokenizer-type", "NullTokenizer", "--vocab-size", "50")
    refused(words, "is beyond the vocabulary of 51 ids")


def refused_alone(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]) -> str:
    """The same in this process, which is quicker: exit code 2 and one line."""
    from megatron_acco.training.main import main

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        # Set first, so that what main() adds is taken away again.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert main(words[6:]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("ERROR: ")]
    assert len(lines) == 1
    return lines[0]


def test_bad_input_is_refused_before_the_model_is_built(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_json(tmp_path, "acco")
    stage2 = write_json(tmp_path, "dpu", zero_optimization={"stage": 2})
    once = write_json(tmp_path, "wp", gradient_acumulation_steps=4)
    cases = [
        (config, ["--data-path", str(tmp_path / "none")], "no file"),
        (config, ["--tokenizer-model", str(tmp_path / "none")], "no such file"),
        (config, ["--load", str(tmp_path / "none")], "no checkpoint there"),
        (config, ["--split", "99,1,999"], "tokens of one sample"),
        (config, ["--global-batch-size", "3"], '"train_batch_size" 3 is not'),
        (config, ["--micro-batch-size", "3"], "--micro-batch-size 3 on the command line contradicts"),
        (config, ["--deepspeed_config", str(tmp_path / "none.json")], "does not exist"),
        (config, ["--fp16"], "fp16"),
        (config, ["--trian-iters", "3"], "did you mean --train-iters?"),
        (stage2, [], "stage"),
        (once, [], "gradient_accumulation_steps"),
    ]
    for path, more, message in cases:
        assert message in refused_alone(capfd, monkeypatch, command(data, path, *more, ranks=1))


@pytest.mark.slow
def test_resume_on_one_rank_and_as_tensor_parallel_on_two_and_what_does_not_fit_is_refused(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_json(tmp_path, "acco", **AUTO_BATCHES)
    whole, save = tmp_path / "whole", tmp_path / "run"
    # Without dropout, whose masks depend on the number of ranks.
    words = "--global-batch-size 8 --train-iters 8 --eval-interval 6 --hidden-dropout 0 --attention-dropout 0".split()
    succeed(command(data, config, *words, "--save", str(whole), "--save-interval", "4"))
    shutil.copytree(whole, save, ignore=shutil.ignore_patterns("global_step8", ".lock"))
    (save / "latest").write_text("global_step4")

    words += ["--save", str(save), "--load", str(save)]
    output = succeed(directly(command(data, config, *words, "--exit-interval", "2", ranks=1)))
    assert "saved by 2 data-parallel ranks, continued on 1" in output and "at iteration 4" in output
    before, after = records(whole)[:6], records(save)
    for name in ("iteration", "consumed_samples"):
        assert [record[name] for record in before] == [record[name] for record in after]
    assert [r["lm_loss"] for r in after] == pytest.approx([r["lm_loss"] for r in before], abs=1e-6)

    def message(*more: str) -> str:
        return refused_alone(capfd, monkeypatch, command(data, config, *words, "--load-strict", *more, ranks=1))

    assert "is of another model: hidden_size is 32 in the checkpoint and 64 here" in message("--hidden-size", "64")
    assert "another learning-rate schedule: lr is 0.003 in the checkpoint and 0.01 here" in message("--lr", "0.01")

    shard = next((save / "global_step6").glob("*optim_states.pt"))
    shard.rename(tmp_path / "shard")
    assert f"no file {shard}" in message()
    (tmp_path / "shard").rename(shard)

    model = save / "global_step6" / "mp_rank_00_model_states.pt"
    shutil.copy(model, tmp_path / "model")
    with open(model, "r+b") as file:
        file.truncate(100)
    assert "has 100 bytes instead of" in message()
    (tmp_path / "model").rename(model)

    (save / "latest").write_text("")
    assert "names ''" in message()

    # Through the universal form, with a rate at which the weights stay where they are. `latest` is still empty.
    folders = {"input_folder": f"{save}/global_step6", "output_folder": f"{save}/global_step6_universal"}
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    convert(argparse.Namespace(**folders, **options, inject_missing_state=False))
    config = write_json(tmp_path, "acco", **AUTO_BATCHES, checkpoint={"load_universal": True})
    words += "--train-iters 7 --override-opt_param-scheduler --lr 1e-9 --lr-warmup-iters 0".split()
    output = succeed(command(data, config, *words, "--tensor-model-parallel-size", "2"))
    assert "global_step6_universal at iteration 6" in output
    assert "saved with --tensor-model-parallel-size 1, continued with 2" in output
    assert records(save)[6]["lm_loss"] == pytest.approx(records(whole)[6]["lm_loss"], abs=5e-3)  # half of it at theta
    (before, after) = records(save, "validation")
    assert (before["iteration"], after["iteration"]) == (6, 7)
    assert after["lm_loss"] == pytest.approx(before["lm_loss"], abs=1e-5)
    # The same command continues from its own checkpoint now, which is of two parts, not again from the universal one.
    assert (save / "latest").read_text() == "global_step7"
    assert "global_step7 was saved with --tensor-model-parallel-size 2, this run has 1; convert it" in message()
