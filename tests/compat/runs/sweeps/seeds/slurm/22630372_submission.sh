#!/bin/bash

# Parameters
#SBATCH --array=0-1%2
#SBATCH --cpus-per-task=1
#SBATCH --error=/lab/runs/sweeps/seeds/slurm/%A_%a_0_log.err
#SBATCH --gres=gpu:a100:1
#SBATCH --job-name=pricing
#SBATCH --mem=4GB
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/lab/runs/sweeps/seeds/slurm/%A_%a_0_log.out
#SBATCH --partition=a100
#SBATCH --requeue
#SBATCH --signal=USR2@20
#SBATCH --time=30

# setup
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export PYTHONPATH=/lab/runs/sweeps/seeds/code
export TRAINYARD_RUN="$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" /lab/runs/sweeps/seeds/slurm/runs-740fcac62e49.txt)"
export TRAINYARD_LIMITS='preempted=1000 time_limit=100 node_failure=10 crash=2' TRAINYARD_SIGNAL_S=20
source /lab/runs/sweeps/seeds/slurm/attempt.sh begin

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /lab/runs/sweeps/seeds/slurm/%A_%a_%t_log.out --error /lab/runs/sweeps/seeds/slurm/%A_%a_%t_log.err --kill-on-bad-exit=1 /home/ann/trainyard/.venv/bin/python -u -m submitit.core._submit /lab/runs/sweeps/seeds/slurm


# teardown
source /lab/runs/sweeps/seeds/slurm/attempt.sh end $?