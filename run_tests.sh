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

# DeepSpeed's CPU ops are compiled meanwhile; if that fails, the first test that needs them says why.
python -c 'from megatron_acco.ops import prepare_cpu_ops as prepare
prepare(["ShareMemCommBuilder", "FusedAdamBuilder", "CPUAdamBuilder"])' >/dev/null 2>&1 &
ops=$!
ensure_browser &
browser=$!
say "ruff"
ruff check .
ruff format --check .
say "mypy"
mypy
say "pytest"
wait "$ops" "$browser" || true
exec python -m pytest "$@"
