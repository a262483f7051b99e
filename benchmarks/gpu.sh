#!/usr/bin/env bash
# The first hour on a real GPU: which tests, in which order, and what each figure should be.
#
#   benchmarks/gpu.sh FOLDER            the short plan, less than eight minutes
#   benchmarks/gpu.sh FOLDER hour       all of it, with several GPUs where there are any
#
# FOLDER gets environment.txt (device and versions), one text file for each part and summary.txt
# (exit status and seconds of each). Send back the folder as it is. Without a GPU it says so there
# and runs nothing. PYTHON names another interpreter than .venv/bin/python.
#
# No part has run on a GPU. On the simulated accelerator under CUDA's name,
#
#   PYTHONPATH=tests/simulated/as_cuda:. PYTHON=python benchmarks/gpu.sh FOLDER
#
# runs all of the short plan but syncs, graphs and beyond, in steps as small as they can be. In order:
#
#   part                      what it answers               what it should be, beside torch's
#   tests                     is anything wrong at all      every test passes, none is skipped; with
#                                                           gloo, two ranks share a GPU
#   training                  speed and memory of formats   bf16 and fp16 1.5 to 3 times as fast as
#                                                           fp32, half of the activations
#   syncs                     does the host wait            no wait in a fused step
#                                                           (set_sync_debug_mode("error")); in a plain
#                                                           one as many as GradScaler or fewer
#   graphs                    CUDA graphs                   replayed steps equal those without
#   data_parallel             two replicas on one device    the caller's dtype, and a loss that falls
#   comm_hooks                cost of each hook             one rank for each GPU; with one GPU it
#                                                           says what a hook costs where nothing is
#                                                           sent
#   scaler_round[_fused]      cost of scale, step, update   ratio to torch.amp.GradScaler <= 1.05
#   beyond                    cost of checks of updates,    with check_update of without: 1.25 to 1.45;
#                             replicas, and snapshots       a training step with all three: 1.05
#   masters                   step of fp32 masters          ratio to the loop by hand <= 1.1
#   wire_cost                 codec beside a copy           a seventh of the copy's bandwidth or more
#   ranks (hour, 2+ GPUs)     NCCL: agreement, order,       every run ends with 0, losses of all
#                             FSDP1, FSDP2, hooks           strategies within 1e-5 of ddp's in fp32
#   loss (hour)               fp16 and bf16 train as fp32   losses within 1e-2 of fp32's after 200 steps
set -euo pipefail

if [[ $# -lt 1 || $# -gt 2 || ${2:-hour} != hour ]]; then
    echo "usage: $0 FOLDER [hour]" >&2
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
readonly plan=${2:-short}
if [[ $plan == hour ]]; then
    readonly tests_limit=900 whole_limit=3500
else
    readonly tests_limit=200 whole_limit=460
fi

{
    git rev-parse HEAD 2>/dev/null || echo "no commit known"
    "$python" -m torch.utils.collect_env
} >"$folder/environment.txt"

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
    echo "\$ $*" >"$folder/$name.txt"
    timeout "$((limit < left ? limit : left))" "$@" >>"$folder/$name.txt" 2>&1 || status=$?
    echo "$name: exit $status after $((SECONDS - begun)) s" | tee -a "$folder/summary.txt"
    if ((status)); then
        failed=1
    fi
}

small=() thin=() few=() tiny=()
if "$python" -c 'import sys; from benchmarks.gpu import simulated; sys.exit(not simulated())'; then
    readonly simulated=1
    small=(--rounds 2) thin=(--rounds 2 --width 64) few=(--rounds 2 --parameters 10) tiny=(--rounds 2 --elements 512)
else
    readonly simulated=0
fi

# skip NAME: say so, and return 0, on the simulated accelerator.
skip() {
    ((simulated)) && echo "$1: skipped on the simulated accelerator" | tee -a "$folder/summary.txt"
}

part tests "$tests_limit" "$python" -m pytest -m gpu -n 0 -q -rs -p no:cacheprovider
part training 60 "$python" -m benchmarks.gpu training
for name in syncs graphs; do
    skip "$name" || part "$name" 60 "$python" -m benchmarks.gpu "$name"
done
part data_parallel 60 "$python" examples/data_parallel.py cuda:0 cuda:0
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
part comm_hooks 60 "$python" -m benchmarks.comm_hooks_step --device cuda --ranks "$gpus" "${thin[@]}"
part scaler_round 40 "$python" -m benchmarks.scaler_round --device cuda --ranks 1 "${small[@]}"
part scaler_round_fused 40 "$python" -m benchmarks.scaler_round --device cuda --ranks 1 --fused \
    "${small[@]}"
skip beyond || part beyond 90 "$python" -m benchmarks.beyond --device cuda --rounds 9
part masters 120 "$python" -m benchmarks.masters --device cuda "${few[@]}"
part wire_cost 60 "$python" -m benchmarks.wire_cost --device cuda "${tiny[@]}"
if [[ $plan == hour ]]; then
    train=(launch/train.py --steps 200 --overwrite --seed 1)
    for precision in fp32 bf16 fp16; do
        part "loss_$precision" 300 "$python" "${train[@]}" --precision "$precision" \
            --run-dir "$folder/runs/$precision"
    done
    if ((gpus > 1)); then
        ranks=("$python" -m torch.distributed.run --nproc-per-node "$gpus")
        for shard in 1 -1; do
            part "ranks_shard_$shard" 300 "${ranks[@]}" "${train[@]}" --shard "$shard" \
                --precision fp16 --run-dir "$folder/runs/shard_$shard"
        done
        for wire in fp16 bf16 int8; do
            part "ranks_hook_$wire" 300 "${ranks[@]}" "${train[@]}" \
                --precision fp16 --comm-hook "$wire" --run-dir "$folder/runs/hook_$wire"
        done
    else
        echo "ranks: not run, one GPU" | tee -a "$folder/summary.txt"
    fi
fi
exit "$failed"
