#!/usr/bin/env bash
# A run by srun, one task per GPU: sbatch -N 320 scripts/launch/slurm.sh recipes/mllm84b.yaml
#
# The number of nodes is sbatch's, GPUs per node are the allocation's. Five minutes before the time
# limit SLURM sends SIGTERM to all tasks: every rank saves and leaves, and the job is queued again,
# to resume (run.resume=auto). Further arguments are overrides of the recipe.
#SBATCH --job-name=orchmllm
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=orchmllm-%j.log
set -euo pipefail

[ $# -ge 1 ] || { sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
recipe=$1
shift
# sbatch runs a copy of this file: the repository is where the job was submitted.
root=${ORCHMLLM_ROOT:-${SLURM_SUBMIT_DIR:-.}}
cd "$root"
# shellcheck source=scripts/launch/common.sh
. scripts/launch/common.sh

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
export_network_defaults "$MASTER_ADDR"
python -m orchmllm.train "$recipe" --validate --ranks "$SLURM_NTASKS" "$@"

code=0
# Ranks read SLURM_PROCID, SLURM_LOCALID and SLURM_NTASKS themselves (orchmllm.launch.world_from).
srun --kill-on-bad-exit=1 --cpu-bind=none \
  scripts/launch/on_gpu_cores.sh python -m orchmllm.train "$recipe" --ranks "$SLURM_NTASKS" "$@" || code=$?
if [ "$code" -eq 143 ]; then  # 128 + SIGTERM: all ranks have saved
  echo "stopped before the time limit; queueing the job again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
