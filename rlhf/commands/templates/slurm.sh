#!/bin/bash
@@sbatch
#
# @@made_by
# Submit it with sbatch, from the folder where you would run rlhf, with its environment active.
# Shortly before the time limit the run is saved and the job goes back into the queue; it then continues.
set -u

MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
MASTER_PORT="$((10000 + SLURM_JOB_ID % 20000))"  # another one for each job that shares the node
export MASTER_ADDR MASTER_PORT

# Each node runs this.
node='
@@node'

save_and_requeue() {
    trap '' USR1
    scancel --signal=TERM "$SLURM_JOB_ID"  # to the nodes, not to this shell
    wait "$step"
    scontrol requeue "$SLURM_JOB_ID"
    exit
}
trap save_and_requeue USR1

srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c "$node" node \
    @@words &
step=$!
wait "$step"
