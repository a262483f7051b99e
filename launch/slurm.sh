#!/usr/bin/env bash
# Train on all nodes of a Slurm job, from the root of the repository:
#
#   sbatch launch/slurm.sh --precision bf16 --steps 10000
#
# Arguments go to launch/train.py. Options of sbatch before the script overrule those below:
# sbatch --nodes 4 --gpus-per-node 4 launch/slurm.sh ... PROCESSES says how many ranks a node gets
# (default: one for each GPU, or one where there are none).
#
# Two minutes before its time is over the job finishes a step, writes a checkpoint and puts itself
# back into the queue. Started again under the same id, after preemption too, it goes on from there.
#SBATCH --job-name=distamp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
set -euo pipefail

# sbatch runs a copy of this file: where the repository is, only the job knows.
cd "${SLURM_SUBMIT_DIR:?this script is for sbatch}"
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
processes=${PROCESSES:-${SLURM_GPUS_ON_NODE:-1}}
threads=$((${SLURM_CPUS_PER_TASK:-1} / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
# Since Slurm 22.05 srun does not take this over from sbatch, and would bind each node to one core.
export SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-${SLURM_CPUS_PER_TASK:-1}}

# One torchrun on each node; jobs that share a node must not share the port.
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "$processes" \
    --max-restarts 3 \
    --rdzv-backend c10d \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-endpoint "$first:$((20000 + SLURM_JOB_ID % 20000))" \
    launch/train.py --run-dir "runs/$SLURM_JOB_ID" --auto-resume "$@" &
step=$!

# USR1 says that the time is nearly over, and comes to this script alone; TERM is preemption, after
# which Slurm itself puts the job back. The ranks take TERM as the wish to save and end.
requeue=
trap 'requeue=yes; kill -TERM "$step" 2>/dev/null || true' USR1
trap 'kill -TERM "$step" 2>/dev/null || true' TERM

code=0
while :; do  # a trap ends the wait before the step has ended
    wait "$step" && code=0 || code=$?
    kill -0 "$step" 2>/dev/null || break
done
if [ -n "$requeue" ]; then  # a run that was done by then sees so at once
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
