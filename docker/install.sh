#!/usr/bin/env bash
# Run by the Dockerfile, beside pyproject.toml and constraints.txt: VIRTUAL_ENV with the dependencies of this package and
# of its extras $1, at the pinned versions, and the op that DeepSpeed would compile at every first start.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

python3 - "$1" >requirements.txt <<'EOF'
import sys

if not (3, 11) <= sys.version_info[:2] <= (3, 12):
    sys.exit(f"error: BASE has Python {sys.version.split()[0]}; Python 3.11 or 3.12 is needed")

import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
groups = project["optional-dependencies"]


def lines(extras):
    for extra in filter(None, map(str.strip, extras.split(","))):
        if extra not in groups:
            sys.exit(f"error: there is no extra {extra!r}; EXTRAS takes {', '.join(groups)}, by commas")
        for line in groups[extra]:
            name, _, more = line.partition("[")
            # An extra of this very package, which no index shall be asked for.
            yield from lines(more.rstrip("]")) if name == project["name"] else [line]


print(*project["dependencies"], *lines(sys.argv[1]), sep="\n")
EOF
python3 -m venv --system-site-packages "$VIRTUAL_ENV"
# A torch that came with the base fits its CUDA.
if torch=$(python -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null); then
    sed -i "s/^torch==.*/torch==$torch/" constraints.txt
fi
install() {
    # Modules are compiled where they are used (Dockerfile): for all of them it takes longer, and a quarter more space.
    pip install --quiet --no-compile --use-pep517 --disable-pip-version-check --root-user-action=ignore "$@" -c constraints.txt
}

grep -E '^(torch|deepspeed|ninja|setuptools)\b' requirements.txt >first.txt
install -r first.txt
# Unlike the Adam ops this one asks the processor at run time what it can do, so it may be made here for another machine.
DS_ACCELERATOR=cpu python -c '
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)' >op.log 2>&1 &
op=$!
install -r requirements.txt
# Compiles what every start imports: the image's user may not keep that.
python -W ignore -c 'import deepspeed.launcher.launch, deepspeed.launcher.runner, megatron.core.models.gpt'
wait $op || { cat op.log; exit 1; }
chown -R acco: "$TORCH_EXTENSIONS_DIR"
# Some run images as a user of theirs (--user, OpenShift, pyxis), and torch writes beside an op whenever it loads it.
chmod -R a+rwX "$TORCH_EXTENSIONS_DIR"
