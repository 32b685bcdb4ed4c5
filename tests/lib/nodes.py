"""Nodes on one machine: network namespaces joined by a bridge. Needs root and iproute2."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

SUBNET = "10.87.3"


def works(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


needs_namespaces = pytest.mark.skipif(
    not (works("unshare", "-n", "true") and works("ip", "netns", "list")),
    reason="network namespaces need root and iproute2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def namespaces(count: int) -> Iterator[list[str]]:
    """Names of `count` namespaces with the addresses SUBNET.1, SUBNET.2 and so on on eth0."""
    tag = "orch" + secrets.token_hex(2)
    names = [f"{tag}n{k}" for k in range(count)]
    try:
        ip("link", "add", tag, "type", "bridge")
        ip("link", "set", tag, "up")
        for k, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", f"{tag}v{k}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{tag}v{k}", "master", tag, "up")
            ip("-n", name, "addr", "add", f"{SUBNET}.{k + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name])
        subprocess.run(["ip", "link", "del", tag])
