#!/bin/bash

# Parameters
#SBATCH --cpus-per-task=1
#SBATCH --error=/lab/runs/pricing/submitted-failed/slurm/%j_0_log.err
#SBATCH --gres=gpu:a100:2
#SBATCH --job-name=pricing
#SBATCH --mem=8GB
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --open-mode=append
#SBATCH --output=/lab/runs/pricing/submitted-failed/slurm/%j_0_log.out
#SBATCH --partition=a100
#SBATCH --requeue
#SBATCH --signal=USR2@20
#SBATCH --time=30

# setup
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export PYTHONPATH=/lab/runs/pricing/submitted-failed/code
export TRAINYARD_RUN=/lab/runs/pricing/submitted-failed
export TRAINYARD_LIMITS='preempted=1000 time_limit=100 node_failure=10 crash=2' TRAINYARD_SIGNAL_S=20
source /lab/runs/pricing/submitted-failed/slurm/attempt.sh begin

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /lab/runs/pricing/submitted-failed/slurm/%j_%t_log.out --error /lab/runs/pricing/submitted-failed/slurm/%j_%t_log.err --kill-on-bad-exit=1 /home/ann/trainyard/.venv/bin/python -u -m submitit.core._submit /lab/runs/pricing/submitted-failed/slurm


# teardown
source /lab/runs/pricing/submitted-failed/slurm/attempt.sh end $?