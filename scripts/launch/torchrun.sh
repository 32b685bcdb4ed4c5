#!/usr/bin/env bash
# One node of a run by torchrun; start it on every node.
#
#   scripts/launch/torchrun.sh recipes/mllm_1gpu.yaml                       # this machine alone
#   MASTER_ADDR=node0 NNODES=4 NODE_RANK=$k scripts/launch/torchrun.sh recipes/mllm10b.yaml
#
# MASTER_ADDR, MASTER_PORT: where node 0 is reached. NPROC: ranks per node (default: its GPUs).
# Kubeflow says the same by PET_NNODES and so on. Further arguments are overrides of the recipe.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/launch/common.sh
. "$here/common.sh"

[ $# -ge 1 ] || { sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
recipe=$1
shift
nodes=${NNODES:-${PET_NNODES:-1}}
ranks=${NPROC:-${PET_NPROC_PER_NODE:-$(gpus_here)}}
address=${MASTER_ADDR:-${PET_MASTER_ADDR:-localhost}}
export_network_defaults "$address"
# A wrong number of ranks is answered here, once, before anything starts.
python -m orchmllm.train "$recipe" --validate --ranks "$((nodes * ranks))" "$@"
# After SIGTERM the ranks finish their step and save; torchrun would kill them after 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
# Else it dies of SIGUSR1, which some schedulers send, and the ranks with it.
export PET_SIGNALS_TO_HANDLE="${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}"
exec torchrun --nnodes "$nodes" --node-rank "${NODE_RANK:-${PET_NODE_RANK:-0}}" --nproc-per-node "$ranks" \
  --master-addr "$address" --master-port "${MASTER_PORT:-${PET_MASTER_PORT:-29500}}" \
  --no-python "$here/on_gpu_cores.sh" python -m orchmllm.train "$recipe" \
  --ranks "$((nodes * ranks))" "$@"
