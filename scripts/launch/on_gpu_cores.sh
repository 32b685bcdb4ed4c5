#!/usr/bin/env bash
# Runs a rank on the cores next to its GPU, whose memory the kernel then gives it, too:
#
#   LOCAL_RANK=0 scripts/launch/on_gpu_cores.sh python -m orchmllm.train recipes/mllm_1gpu.yaml
#
# The place of the rank on its node is LOCAL_RANK (torchrun) or SLURM_LOCALID. Where the cores are
# not known, or not allowed to this process, the command runs as it is.
set -euo pipefail

[ $# -ge 1 ] || { sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
place=${LOCAL_RANK:-${SLURM_LOCALID:-0}}
IFS=, read -r -a visible <<< "${CUDA_VISIBLE_DEVICES:-}"
gpu=$place
[ "${#visible[@]}" -ne 1 ] || gpu=${visible[0]}  # srun --gpus-per-task=1 shows one
[ "${#visible[@]}" -le 1 ] || gpu=${visible[$place]:-$place}
bus=$(nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader -i "$gpu" 2>/dev/null) || bus=
bus=${bus,,}  # 00000000:17:00.0; the kernel's name has a domain of four digits
cores=$(cat "/sys/bus/pci/devices/${bus#0000}/local_cpulist" 2>/dev/null) || cores=
if [ -n "$cores" ] && taskset -c "$cores" true 2>/dev/null; then
  exec taskset -c "$cores" "$@"
fi
exec "$@"
