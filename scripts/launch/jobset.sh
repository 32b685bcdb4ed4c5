#!/usr/bin/env bash
# Prints a Kubernetes JobSet (jobset.x-k8s.io/v1alpha2) for a run:
#
#   IMAGE=registry/orchmllm NODES=320 RDMA=rdma/ib=8 scripts/launch/jobset.sh \
#     recipes/mllm84b.yaml | kubectl apply -f -
#
# One pod per node. RDMA: the resource by which the cluster gives a pod its fast network, and how
# many of it (kubectl describe node lists them, as rdma/hca_shared_devices_a=1 or
# vpc.amazonaws.com/efa=32); RDMA=none for TCP, which is many times slower; one node needs none.
# NAME (default orchmllm), GPUS per node (8), CLAIM: PersistentVolumeClaim with data and runs,
# mounted at /workspace/data and /workspace/runs (orchmllm). Pods learn their place from the JobSet:
# node rank from the completion index, node 0 from its stable host name.
set -euo pipefail

if [ $# -lt 1 ] || [ -z "${IMAGE:-}" ] || [ -z "${NODES:-}" ]; then
  sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
rdma=${RDMA:-}
network="" memory=""
if [[ "$rdma" == *=* ]]; then
  network=", ${rdma%=*}: ${rdma##*=}"
  memory="
                  securityContext: {capabilities: {add: [IPC_LOCK]}}  # RDMA pins memory"
elif [ "$rdma" != none ] && { [ -n "$rdma" ] || [ "$NODES" -gt 1 ]; }; then
  echo "RDMA is '$rdma': name the network resource of the $NODES nodes and how many of it a pod" \
    "gets, such as RDMA=rdma/ib=8, or say RDMA=none for TCP" >&2
  exit 2
fi
recipe=$1
shift
name=${NAME:-orchmllm}
gpus=${GPUS:-8}
quoted() { printf "'%s'" "${1//\'/\'\'}"; }  # as YAML, in which only the quote itself is special
overrides=""
for item in "$@"; do
  overrides+=", $(quoted "$item")"
done
cat <<YAML
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: ${name}
spec:
  # Every start resumes from the newest sound checkpoint. What the recipe or this cluster lacks
  # (exit code 2) is not cured by another start.
  failurePolicy:
    maxRestarts: 20
    rules:
      - {name: refused, action: FailJobSet, onJobFailureReasons: [PodFailurePolicy]}
  network: {enableDNSHostnames: true}
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          parallelism: ${NODES}
          completions: ${NODES}
          completionMode: Indexed
          backoffLimit: 0
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes: {containerName: ranks, operator: In, values: [2]}
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: 300  # SIGTERM: the ranks save and leave
              containers:
                - name: ranks
                  image: "${IMAGE}"
                  workingDir: /workspace
                  command: ["scripts/launch/torchrun.sh", $(quoted "$recipe")${overrides}]
                  env:
                    - {name: NNODES, value: "${NODES}"}
                    - {name: NPROC, value: "${gpus}"}
                    - {name: MASTER_ADDR, value: "${name}-node-0-0.${name}"}
                    - {name: MASTER_PORT, value: "29500"}
                    - name: NODE_RANK
                      valueFrom:
                        fieldRef:
                          fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"
                  resources:
                    limits: {nvidia.com/gpu: ${gpus}${network}}${memory}
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
