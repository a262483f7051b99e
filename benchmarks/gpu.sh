#!/usr/bin/env bash
# Run the GPU tests and every benchmark of one device on a GPU, in less than eight minutes.
#
#   benchmarks/gpu.sh FOLDER
#
# FOLDER gets environment.txt (device and versions), one text file for each part and summary.txt
# (exit status and seconds of each). Without a GPU it says so there and runs nothing.
# PYTHON names another interpreter than .venv/bin/python.
set -euo pipefail

if [[ $# -ne 1 ]]; then
    echo "usage: $0 FOLDER" >&2
    exit 2
fi
mkdir -p "$1"
folder=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
if ! command -v "$python" >/dev/null; then
    python=python3
fi
export OMP_NUM_THREADS=1
readonly tests_limit=200
readonly whole_limit=460

"$python" -c 'from benchmarks.common import environment; print(environment())' \
    >"$folder/environment.txt"
{
    git rev-parse HEAD 2>/dev/null || echo "no commit known"
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv 2>/dev/null ||
        echo "no nvidia-smi"
} >>"$folder/environment.txt"

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no GPU here: nothing was run" | tee "$folder/summary.txt"
    exit 0
fi

failed=0
: >"$folder/summary.txt"

# part NAME LIMIT COMMAND...: write what COMMAND prints to NAME.txt, for LIMIT seconds or what is left.
part() {
    local name=$1 limit=$2 status=0
    shift 2
    local left=$((whole_limit - SECONDS)) begun=$SECONDS
    if ((left < 5)); then
        echo "$name: not run, out of time" | tee -a "$folder/summary.txt"
        failed=1
        return
    fi
    { cat "$folder/environment.txt" && echo "\$ $*"; } >"$folder/$name.txt"
    timeout "$((limit < left ? limit : left))" "$@" >>"$folder/$name.txt" 2>&1 || status=$?
    echo "$name: exit $status after $((SECONDS - begun)) s" | tee -a "$folder/summary.txt"
    if ((status)); then
        failed=1
    fi
}

part tests "$tests_limit" "$python" -m pytest -m gpu -n 0 -q -p no:cacheprovider
part comm_hooks 60 "$python" -m torch.distributed.run --standalone --nproc-per-node \
    "$("$python" -c 'import torch; print(torch.cuda.device_count())')" \
    -m benchmarks.comm_hooks_step --device cuda
part scaler_round 40 "$python" -m benchmarks.scaler_round --device cuda --ranks 1
part scaler_round_fused 40 "$python" -m benchmarks.scaler_round --device cuda --ranks 1 --fused
for path in benchmarks/*.py; do
    name=$(basename "$path" .py)
    options=()
    case $name in
    __init__ | common | scaler_round) continue ;;
    # Of gloo, of shaped links between hosts, or long and of what is computed, not where.
    scaler_collectives | shaped* | comm_hooks_* | levels* | wire_error) continue ;;
    headroom) options=(--cost) ;;
    esac
    if "$python" -m "benchmarks.$name" --help 2>/dev/null | grep -q -- --device; then
        options+=(--device cuda)
    fi
    part "$name" 60 "$python" -m "benchmarks.$name" "${options[@]}"
done
exit "$failed"
