#!/usr/bin/env bash
# From a clean checkout to a trained model: .venv, a corpus made from this machine's Python library, a few minutes of
# training under the DeepSpeed launcher, a loss plot and a sample of text. A second start reuses what is there.
#   bash quickstart.sh [--method acco|zero1|dpu|wp] [--updates N] [--out DIR]
set -euo pipefail
CALLED_FROM=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/venv.sh
find_python
# Bad arguments are refused before minutes of installation.
"$PYTHON" scripts/quickstart.py --called-from "$CALLED_FROM" --check-arguments "$@" || exit $?
for argument in "$@"; do
    case $argument in -h | --help) exit 0 ;; esac
done
ensure_venv plot
exec python scripts/quickstart.py --called-from "$CALLED_FROM" "$@"
