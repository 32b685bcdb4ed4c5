"""What one rank checks of its machine and of the recipe, without the other ranks. A check that
cannot be made here (no GPU, no recipe) is left out."""

from __future__ import annotations

import os
import platform
import resource
import shlex
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, TypeVar

from orchmllm.config.recipe import Recipe, RecipeError, read_recipe
from orchmllm.launch import World
from orchmllm.runtime import preflight

MIN_SHM_BYTES, MIN_FREE_BYTES = 1 << 30, 2 << 30
MIN_DISK_BYTES_PER_S = 50e6
WRITTEN_BYTES = 64 << 20  # to measure the disk
TRIED_HEAD_DIM = 128  # where no recipe is given
IN_TREE = "in the clone: pip install ."
CONNECTIONS = 2  # of a rank to the store of rank 0
LOOKUP_S, MOST_LOOKUPS_S = 20.0, 30.0  # that one name may take; those of all connections
BOUNDED_THREAD = "doctor"

T = TypeVar("T")


class Check(NamedTuple):
    """cure: what to do if it is not ok. alike: all ranks should find the same. value: a figure of
    which no rank should have much less than the others."""

    name: str
    ok: bool
    what: str
    cure: str = ""
    alike: bool = False
    value: float = 0.0


def guarded(name: str, check: Callable[..., Iterator[Check]], *args) -> list[Check]:
    """Its checks; an unforeseen error is one that failed."""
    found = []
    try:
        for one in check(*args):
            found.append(one)
    except Exception as e:
        found.append(Check(name, False, f"{type(e).__name__}: {e}",
                           "see the message; what it names is missing or broken"))
    return found


def bounded(work: Callable[[], T], seconds: float) -> T:
    """What work() returns or raises; futures.TimeoutError after `seconds`. Its thread is then left
    behind (gloo tries to connect several times as long as it is told to, and NCCL may hang)."""
    found: futures.Future = futures.Future()

    def run() -> None:
        try:
            found.set_result(work())
        except Exception as e:
            found.set_exception(e)

    threading.Thread(target=run, name=BOUNDED_THREAD, daemon=True).start()
    return found.result(seconds)


def software() -> Iterator[Check]:
    """Python, packages, the core, the compiler."""
    yield Check("Python", True, platform.python_version(), alike=True)
    yield from _packages()
    compiler = (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()[0]
    path = shutil.which(compiler) or shutil.which("c++") or shutil.which("g++")
    yield Check("compiler", path is not None, path or f"no C++ compiler ({compiler}, c++, g++)",
                "apt install g++, or set CXX: building the core and fsdp.compile need it")
    from orchmllm.plan.balance import balance

    try:
        ranks = balance([5, 1, 4], num_ranks=2, policy="greedy").tolist()
    except ImportError as e:
        yield Check("core", False, str(e).split(":")[0],
                    f"python setup.py build_ext --inplace, or {IN_TREE}")
    else:
        yield Check("core", ranks == [0, 1, 1], "orchmllm._core plans", "build it again: python "
                    "setup.py build_ext --inplace --force")


def _packages() -> Iterator[Check]:
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(text) for text in metadata.requires("orchmllm") or ()]
    except metadata.PackageNotFoundError:
        yield Check("packages", False, "orchmllm is not installed", IN_TREE)
        return
    wrong, found = {}, {}
    for one in needed:
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            name = f"{one.name}{one.specifier}"
            try:
                found[one.name] = metadata.version(one.name)
            except metadata.PackageNotFoundError:
                wrong[name] = f"{name} is missing"
                continue
            if not one.specifier.contains(found[one.name], prereleases=True):
                wrong[name] = f"{name} is needed, {found[one.name]} is there"
    shown = ", ".join(f"{n} {found[n]}" for n in ("numpy", "transformers") if n in found)
    yield Check("packages", not wrong, "; ".join(wrong.values()) or (
        f"{len(found)} are there: {shown}"), f"pip install {shlex.join(wrong)}", alike=True)


def device(world: World | None, recipe: Recipe | None) -> Iterator[Check]:
    """torch, CUDA, NCCL, the GPU of this rank, attention."""
    import torch

    yield Check("torch", True, torch.__version__, alike=True)
    if not torch.cuda.is_available():
        gpus = _gpus_of_the_driver()
        yield Check("GPU", not gpus, f"torch {torch.__version__} cannot use {gpus[0]}" if gpus
                    else "none found: ranks compute on the CPU",
                    "install a torch for the driver's CUDA (nvidia-smi shows its version)",
                    alike=True)
    else:
        yield from _gpu(world)
    from orchmllm.models.attention import attention_backend

    cuda = torch.cuda.is_available()
    where = "cuda" if cuda else "cpu"
    if recipe:
        from orchmllm.models.whole_model import attention_kernels
        from orchmllm.sharding.fsdp import compute_dtype

        kinds = {*attention_kernels(recipe.model, where, compute_dtype(recipe.fsdp)).values()}
    else:
        kinds = {attention_backend(where, torch.bfloat16 if cuda else torch.float32,
                                   TRIED_HEAD_DIM).description}
    slow = cuda and any(kind.startswith("scaled_dot_product") for kind in kinds)
    yield Check("attention", not slow, "; ".join(sorted(kinds)), "use fsdp.compute_dtype=bfloat16 "
                "and a torch of 2.10 or newer, or install flash-attn", alike=True)


def _gpu(world: World | None) -> Iterator[Check]:
    import torch

    from orchmllm.launch import device_of

    where = device_of(world) if world else torch.device("cuda", 0)
    torch.cuda.set_device(where)
    name = torch.cuda.get_device_name(where)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    yield Check("GPU", True, f"{name}, CUDA {torch.version.cuda}, NCCL {nccl}", alike=True)
    free, total = torch.cuda.mem_get_info(where)
    yield Check("GPU memory", free > 0.9 * total, f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free",
                "nvidia-smi names the processes that hold it: end them")
    a = torch.ones(4096, 4096, dtype=torch.bfloat16, device=where)
    for _ in range(3):
        a @ a
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        a @ a
    end.record()
    end.synchronize()
    speed = 20 * 2 * 4096**3 / (start.elapsed_time(end) * 1e-3)
    yield Check("GPU speed", True, f"{speed / 1e12:.0f} TFLOP/s in bfloat16", value=speed)


def _gpus_of_the_driver() -> list[str]:
    """Names of the GPUs that nvidia-smi shows; none where it fails."""
    if not shutil.which("nvidia-smi"):
        return []
    done = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
                          capture_output=True, text=True, timeout=30)
    return done.stdout.splitlines() if done.returncode == 0 else []


def limits(world_size: int) -> Iterator[Check]:
    """Of the operating system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = 512 + 2 * world_size
    yield Check("file descriptors", soft >= need or soft == resource.RLIM_INFINITY,
                f"{soft} allowed, {need} may be needed",
                f"ulimit -n {2 * need} (the hard limit is {hard})")
    shm = Path("/dev/shm")
    if shm.is_dir():
        free = shutil.disk_usage(shm).free
        yield Check("shared memory", free >= MIN_SHM_BYTES, f"{free / 1e9:.1f} GB free",
                    "remove what is left in /dev/shm; in a container start it with --shm-size=16g")


def names(world: World) -> Iterator[Check]:
    """The time to look up the name of an address. The store of rank 0 looks up that of every
    connection, one after another."""
    try:
        seconds = bounded(partial(_lookup_s, world), LOOKUP_S)
        found = f"{1e3 * seconds:.0f} ms for the name of an address"
    except futures.TimeoutError:
        seconds, found = LOOKUP_S, f"no name of an address in {LOOKUP_S:.0f} s"
    count = CONNECTIONS * world.world_size
    yield Check("name server", count * seconds <= MOST_LOOKUPS_S, found,
                f"list all nodes in /etc/hosts, or mend the name server of /etc/resolv.conf: the "
                f"{count} connections to rank 0 wait {count * seconds:.0f} s for it")


def _lookup_s(world: World) -> float:
    """Of the slower one of the addresses of rank 0 and of this host as rank 0 sees it."""
    family, kind, _, _, there = socket.getaddrinfo(world.master_addr, world.master_port,
                                                   type=socket.SOCK_DGRAM)[0]
    seconds = []
    with socket.socket(family, kind) as s:
        s.connect(there)  # sends nothing
        for address in (there, s.getsockname()):
            started = time.perf_counter()
            with suppress(socket.gaierror):  # no name is fine, if it is soon known
                socket.getnameinfo(address, 0)
            seconds.append(time.perf_counter() - started)
    return max(seconds)


def disk(folder: Path, state_bytes: int) -> Iterator[Check]:
    """Room and speed of the disk of the run folder. state_bytes: of a checkpoint."""
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.is_dir())
    free = shutil.disk_usage(there).free
    cure = "choose another run.dir, or make room"
    yield Check("disk", free >= MIN_FREE_BYTES, f"{there}: {free / 1e9:.1f} GB free", cure)
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".doctor") as file:
            block = os.urandom(1 << 20)
            started = time.perf_counter()
            for _ in range(WRITTEN_BYTES >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            speed = WRITTEN_BYTES / (time.perf_counter() - started)
    except OSError as e:
        yield Check("disk speed", False, f"{there} cannot be written: {e.strerror}", cure)
        return
    save = (f"; a checkpoint of {state_bytes / 1e9:.1f} GB takes one writer "
            f"{state_bytes / speed:.0f} s") * bool(state_bytes)
    yield Check("disk speed", speed >= MIN_DISK_BYTES_PER_S,
                f"{speed / 1e6:.0f} MB/s written{save}", "choose a run.dir on a faster disk")


def recipe_checks(recipe: Recipe, world: World | None, state_bytes: int) -> Iterator[Check]:
    """What a start of the recipe would refuse."""
    from orchmllm.config.job import check_world
    from orchmllm.hf.sources import find_sources
    from orchmllm.tools.doctor.host_memory import job_of

    job = job_of(recipe, world)
    checks = [*preflight.checks(recipe, state_bytes),
              ("pretrained", lambda: find_sources(recipe.model)),
              ("ranks", lambda: check_world(job))]
    for name in dict.fromkeys(name for name, _ in checks):
        found = preflight.problems([check for n, check in checks if n == name])
        fine = f"{job.num_ranks} rank{'s' * (job.num_ranks > 1)}" if name == "ranks" else "fine"
        yield Check(name, not found, "; ".join(found) or fine, "see the message")


def examine(recipe_path: str, overrides: list[str], world: World | None) -> list[Check]:
    """All checks of this rank."""
    recipe, state_bytes, found = None, 0, guarded("software", software)
    if recipe_path:
        try:
            recipe = read_recipe(recipe_path, overrides).recipe
            found.append(Check("recipe", True, f"{recipe_path}: no problems", alike=True))
        except RecipeError as e:
            found.append(Check("recipe", False, str(e), "correct what it names"))
    if recipe:
        from orchmllm.sharding.units import checkpoint_bytes
        from orchmllm.tools.doctor.host_memory import host_memory

        state_bytes = checkpoint_bytes(recipe)
        found += guarded("recipe", recipe_checks, recipe, world, state_bytes)
    found += guarded("torch", device, world, recipe)
    found += guarded("limits", limits, world.world_size if world else 1)
    if world is not None:
        found += guarded("name server", names, world)
    if world is None or world.local_rank == 0:
        if recipe:
            found += guarded("host memory", host_memory, recipe, world)
        found += guarded("disk", disk, Path(recipe.run.dir if recipe else "."), state_bytes)
    return found
