# Sourced by the launch scripts: what they have in common. Nothing here assumes a topology.
# shellcheck shell=bash

# GPUs of this machine; 1 rank on a machine without.
gpus_here() {
  local n
  n=$( (nvidia-smi --list-gpus 2>/dev/null || true) | grep -c '^GPU' || true)
  echo "$((n > 0 ? n : 1))"
}

# Network interface towards a host: the one gloo and NCCL's bootstrap should use.
interface_to() {
  local address interface
  address=$(getent ahostsv4 "$1" | awk 'NR == 1 {print $1}')
  [ -n "$address" ] || { echo "cannot resolve $1" >&2; return 1; }
  interface=$(ip -o route get "$address" |
    awk '{for (i = 1; i < NF; i++) if ($i == "dev") dev = $(i + 1)} END {print dev}')
  # The way to this machine's own address is lo, which other nodes cannot reach.
  [ "$interface" != lo ] || interface=$(ip -o -4 addr show to "$address" | awk 'NR == 1 {print $2}')
  echo "$interface"
}

# NCCL and gloo, only where the caller did not say otherwise (see docs/scale.md for each).
export_network_defaults() {
  local interface
  if [ -z "${NCCL_SOCKET_IFNAME:-}" ] && interface=$(interface_to "$1") && [ "$interface" != lo ]
  then
    export NCCL_SOCKET_IFNAME="$interface"
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"
  fi
  export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
  export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-3}"
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
}
