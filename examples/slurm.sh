#!/usr/bin/env bash
# Four machines of eight GPUs: sbatch examples/slurm.sh CONFIG [a.b=c ...]
#SBATCH --job-name=samestep
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=SIGTERM@120
set -euo pipefail
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# One torchrun a machine; each starts a rank for every GPU. A rank that dies ends all, and --max-restarts goes on from the
# newest checkpoint. output_dir must be on a file system that all machines share.
srun torchrun \
    --nnodes="$SLURM_NNODES" --nproc-per-node="$SLURM_GPUS_ON_NODE" --max-restarts=3 \
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$head:29500" \
    --no-python samestep train "$@" --resume auto
