"""Print the accelerator that DeepSpeed chooses as one JSON line; on CPU compile its communication op first."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> int:
    """Prepare and report. TORCH_EXTENSIONS_DIR must name a folder that only these scripts use."""
    from deepspeed.accelerator import get_accelerator

    from megatron_acco.ops import prepare_cpu_ops

    # Nobody else compiles in this folder, and the quickstart runs once at a time: what is there was left behind.
    for stale in Path(os.environ["TORCH_EXTENSIONS_DIR"]).rglob("lock"):
        stale.unlink(missing_ok=True)
    prepare_cpu_ops(["ShareMemCommBuilder"])
    accelerator = get_accelerator()
    print(json.dumps({"accelerator": accelerator.device_name(), "devices": accelerator.device_count()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
