"""One thread per process, set before torch starts its pool: ranks share the machine's cores, and
results must not depend on how many it has."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
