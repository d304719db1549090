"""Pretrain a GPT model with DeepSpeed ZeRO stage 1, with or without ACCO.

    deepspeed --num_gpus 2 pretrain_gpt_acco.py --deepspeed_config deepspeed_configs/acco.json \\
        --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128 \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model --data-path corpus \\
        --lr 1e-3 --train-iters 200 --save run

`--help` lists all arguments. Exit codes: 0 done, 1 failed, 2 bad input, 75 stopped by a signal after saving.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings

import psutil

_SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "fish", "csh", "tcsh"}


def find_launcher() -> list[int]:
    """Process ids of the launcher that has started this process and, of DeepSpeed's, of the command behind it.

    A shell is no launcher: what was started in the background outlives it.
    """
    with contextlib.suppress(psutil.Error):
        parents = psutil.Process().parents()[:2]
        if parents and "deepspeed.launcher.launch" in parents[0].cmdline():
            return [process.pid for process in parents]
        if parents and parents[0].name() not in _SHELLS:
            return [parents[0].pid]
    return []


# Before the imports that take seconds: a launcher that dies meanwhile must be missed.
launcher = find_launcher()

# Before the imports that say it once per rank; the log is for the run.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")

from megatron_acco.training.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(launcher=launcher))
