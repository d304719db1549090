"""Print the accelerator that DeepSpeed chooses as one JSON line; on CPU compile its communication op first.

The ranks would compile the op themselves at their first start. Compiling it here, alone and under a lock that the
system releases, makes a compilation that was interrupted harmless: torch's own marker of a compilation in progress is
a file, which a killed process leaves behind and every later one waits for.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path


def main() -> int:
    """Prepare and report. TORCH_EXTENSIONS_DIR must name a folder that only these scripts use."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops import __compatible_ops__

    accelerator = get_accelerator()
    name = accelerator.device_name()
    if name == "cpu":
        folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "megatron-acco.lock").open("a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            for stale in folder.rglob("lock"):
                stale.unlink()
            builder = accelerator.create_op_builder("ShareMemCommBuilder")
            if builder is not None and __compatible_ops__.get(builder.NAME, False):
                builder.load(verbose=False)
    print(json.dumps({"accelerator": name, "devices": accelerator.device_count()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
