#!/bin/bash

# Parameters
#SBATCH --account=biometrics
#SBATCH --cpus-per-task=6
#SBATCH --error=/shared/runs/fingerprint_1m/NEW/slurm/%j_0_log.err
#SBATCH --gres=gpu:p100:1
#SBATCH --job-name=fingerprint_1m
#SBATCH --mail-type=END
#SBATCH --mem=28GB
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/runs/fingerprint_1m/NEW/slurm/%j_0_log.out
#SBATCH --partition=p100
#SBATCH --propagate=NONE
#SBATCH --qos=normal
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --time=2880

# setup
export TRAINYARD_RUN=/shared/runs/fingerprint_1m/NEW
export TRAINYARD_LIMITS='preempted=1000 time_limit=100 node_failure=10 crash=2 hung=5 disk_full=30 disk_error=10' TRAINYARD_SIGNAL_S=120
export TRAINYARD_REQUEUE_S=900
source /shared/runs/fingerprint_1m/NEW/slurm/attempt.sh begin
(  # the site's lines and the ranks: whatever shell options, traps or exit they contain, `end` is reached
trap : TERM
module load slurm-scripts
trap : TERM
export TRAINYARD_SCRATCH="/local/$SLURM_JOB_ID"
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export PYTHONPATH=/shared/runs/fingerprint_1m/NEW/code
: >|"$TRAINYARD_RUN/slurm/started-$TRAINYARD_ATTEMPT"

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /shared/runs/fingerprint_1m/NEW/slurm/%j_%t_log.out --error /shared/runs/fingerprint_1m/NEW/slurm/%j_%t_log.err --export=ALL --kill-on-bad-exit=1 --cpu-bind=cores /shared/trainyard/.venv/bin/python -P -u -m trainyard.node.start_rank /shared/runs/fingerprint_1m/NEW/slurm


# teardown
)
source /shared/runs/fingerprint_1m/NEW/slurm/attempt.sh end $?
