#!/usr/bin/env bash
# Lint, type check and the whole test suite, in .venv (made if missing). Arguments go to pytest:
#   bash run_tests.sh -k corpus -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/venv.sh
. scripts/cluster_tools.sh
. scripts/browser.sh
ensure_venv test
ensure_cluster_tools

# Ranks of one machine share its cores: more threads than cores make every test slower.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# Where the quickstart puts DeepSpeed's CPU ops, so that its test compiles nothing of its own.
TORCH_EXTENSIONS_DIR=$(PYTHONPATH=scripts python -c 'from quickstart import ops_folder; print(ops_folder())')
export TORCH_EXTENSIONS_DIR

# Compiled meanwhile; if that fails, the first test that needs them says why.
prepare_ops() { python -c 'import sys; from megatron_acco.ops import prepare_cpu_ops as p; p(sys.argv[1:])' "$@" >/dev/null 2>&1; }
prepare_ops ShareMemCommBuilder FusedAdamBuilder &
ops=$!
prepare_ops CPUAdamBuilder &
adam=$!
ensure_browser &
browser=$!
say "ruff"
ruff check .
ruff format --check .
say "mypy"
mypy
say "pytest"
wait "$ops" "$adam" "$browser" || true
if [ $# -gt 0 ]; then
    exec python -m pytest "$@"
fi
# Ranks of one test keep two cores half busy: two files at a time. What measures times comes after, by itself.
python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not alone"
exec python -m pytest -m alone
