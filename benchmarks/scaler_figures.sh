#!/usr/bin/env bash
# Measure everything in docs/scaler_figures.md in one run.
#
#   benchmarks/scaler_figures.sh FOLDER
#
# Use a machine that does nothing else. Writes a text file to FOLDER for each command, with the
# command in its first line. Set PYTHON to use another interpreter than .venv/bin/python.
set -euo pipefail

if [[ $# -ne 1 ]]; then
    echo "usage: $0 FOLDER" >&2
    exit 2
fi
mkdir -p "$1"
folder=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
export OMP_NUM_THREADS=1

# part NAME MODULE ARGUMENTS...
part() {
    local name=$1 begun=$SECONDS status=0
    shift
    echo "\$ python -m $*" >"$folder/$name.txt"
    "$python" -m "$@" >>"$folder/$name.txt" 2>&1 || status=$?
    echo "$name: exit $status after $((SECONDS - begun)) s" | tee -a "$folder/summary.txt"
}

date -u +"%Y-%m-%d %H:%M UTC" >"$folder/summary.txt"
part parts benchmarks.scaler_round --parts --ranks 1 2 --parameters 20 1000
part small benchmarks.scaler_round --ranks 1 2 --parameters 20 --elements 16
part round benchmarks.scaler_round --ranks 1 2 4
part fused benchmarks.scaler_round --ranks 1 2 --fused
part sizes benchmarks.scaler_round --ranks 1 2 --parameters 10 100 1000 10000 --elements 1000
part ranks benchmarks.scaler_round --ranks 8 --parameters 20
part collectives benchmarks.scaler_collectives
