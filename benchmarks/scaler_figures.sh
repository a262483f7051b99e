#!/usr/bin/env bash
# Measure everything in docs/results/scaler_figures.md in one run.
#
#   benchmarks/scaler_figures.sh FOLDER
#
# Use a machine that does nothing else. Writes a text file to FOLDER for each command, with the
# command in its first line. Set PYTHON to use another interpreter than .venv/bin/python.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/figures.sh"

part small benchmarks.scaler_round --ranks 1 2 --elements 16
part round benchmarks.scaler_round --ranks 1 2 4
part fused benchmarks.scaler_round --ranks 1 2 --elements 16 --fused
part sizes benchmarks.scaler_round --ranks 1 2 --parameters 10 100 1000 10000 --optimizers 1 --elements 1000
part ranks benchmarks.scaler_round --ranks 8 --parameters 20 --optimizers 1
part collectives benchmarks.scaler_collectives
