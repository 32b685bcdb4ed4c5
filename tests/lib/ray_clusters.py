"""Clusters of Ray of several nodes on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def cluster(*cores: int, store_mib: int = 100) -> Iterator[Any]:
    """A cluster of nodes with so many cores each; the first is its head. Its environment is set."""
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "120"}
    node = dict(object_store_memory=store_mib << 20, include_dashboard=False)
    nodes = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": cores[0]})
    try:
        for count in cores[1:]:
            nodes.add_node(**node, num_cpus=count)
        os.environ["RAY_ADDRESS"] = nodes.address
        yield nodes
    finally:
        nodes.shutdown()
        os.environ.clear()
        os.environ.update(before)


def variables() -> dict[str, str]:
    """That a rank needs to find the cluster: the tests' fork server is older than it."""
    return {k: v for k, v in os.environ.items() if k.startswith("RAY_")}
