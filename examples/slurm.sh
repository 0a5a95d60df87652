#!/bin/bash
# Train on several nodes, and go on by itself after the time limit or a preemption:
#
#     sbatch --nodes 2 examples/slurm.sh dpo --config dpo.yaml --output /shared/runs/dpo
#
# Five minutes before the end Slurm sends SIGUSR1 to all ranks. They finish the step, save, and end with status 75; then
# the job queues itself again. An administrator's PreemptParameters=send_user_signal does the same at a preemption.
#SBATCH --job-name=burnish
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT

# One task per GPU is one rank. When the first one ends, the others have two minutes; those that wait for one that hangs
# end with 75 after hang_seconds.
srun --wait=120 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    exec burnish "$@" --resume true
' burnish "$@"
status=$?

# With torchrun instead, one task per node, ranks that die or hang are started again within the job, up to three times.
# Such a run can't be stopped by SIGUSR1, which torchrun does not hand on to the ranks, and it turns their status into 1:
# set save_minutes, and let Slurm requeue what it preempts (--requeue).
#
#     srun --ntasks-per-node=1 bash -c '
#         exec torchrun --nnodes=$SLURM_NNODES --nproc_per_node=8 --max-restarts=3 --rdzv_id=$SLURM_JOB_ID \
#             --rdzv_backend=c10d --rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT --no-python burnish "$@" --resume true
#     ' burnish "$@"

if [ "$status" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
