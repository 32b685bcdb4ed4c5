#!/usr/bin/env bash
# Prints a TrainJob of Kubeflow Trainer (trainer.kubeflow.org/v1alpha1) for a run:
#
#   IMAGE=registry/orchmllm NODES=320 scripts/launch/trainjob.sh recipes/mllm84b.yaml | kubectl apply -f -
#
# One pod per node. RUNTIME (default torch-distributed): the ClusterTrainingRuntime, which tells pods
# their place (PET_NODE_RANK, PET_MASTER_ADDR), and says how often a pod that failed is started again
# and which fast network it has. NAME (orchmllm), GPUS per node (8), CLAIM: PersistentVolumeClaim
# with data and runs, mounted at /workspace/data and /workspace/runs (orchmllm).
set -euo pipefail

if [ $# -lt 1 ] || [ -z "${IMAGE:-}" ] || [ -z "${NODES:-}" ]; then
  sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
gpus=${GPUS:-8}
command="'scripts/launch/torchrun.sh'"
for item in "$@"; do
  command+=", '${item//\'/\'\'}'"  # as YAML, in which only the quote itself is special
done
cat <<YAML
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: ${NAME:-orchmllm}
spec:
  runtimeRef: {name: ${RUNTIME:-torch-distributed}}
  trainer:
    image: "${IMAGE}"
    numNodes: ${NODES}
    numProcPerNode: ${gpus}
    command: [${command}]
    resourcesPerNode:
      limits: {nvidia.com/gpu: ${gpus}}
  podTemplateOverrides:
    - targetJobs: [{name: node}]
      spec:
        containers:
          - name: node
            volumeMounts:
              - {name: shared, mountPath: /workspace/data, subPath: data}
              - {name: shared, mountPath: /workspace/runs, subPath: runs}
              - {name: shm, mountPath: /dev/shm}
        volumes:
          - name: shared
            persistentVolumeClaim: {claimName: "${CLAIM:-orchmllm}"}
          - name: shm
            emptyDir: {medium: Memory}
YAML
