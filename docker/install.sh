#!/usr/bin/env bash
# Run by the Dockerfile, beside pyproject.toml and constraints.txt: VIRTUAL_ENV with the dependencies of this package and
# of its extras $1, at the pinned versions, and the op that DeepSpeed would compile at every first start.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

python3 -m venv --system-site-packages "$VIRTUAL_ENV"
python - "$1" >requirements.txt <<'EOF'
import sys
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = [name for name in sys.argv[1].split(",") if name]
print(*project["dependencies"], *(line for name in extras for line in project["optional-dependencies"][name]), sep="\n")
EOF
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
