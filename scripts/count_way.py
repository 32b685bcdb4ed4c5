"""Counts what a reader meets who follows one row: the distinct functions and files of this package
that run while a step is made of rows and trained on.

    python scripts/count_way.py [--base REVISION] [--list WAY]

Five ways: the trainer with a composition, by dispatch `tensors` and `load`, and with a tiny
Qwen2-VL (`whole`); a loop with BalancedDataLoader; and images through balance_encoders. Each runs
on one rank with a profile hook in every thread; recorded are steps after the first, so nothing of
the set-up counts. `either` is what a reader meets who follows rows of `load` and of `whole`.
--base: the same of another revision, checked out and built in a temporary folder. --list: the
functions of one way, by file.

A change of file is a call from a function of one file into one of another. Lambdas and
comprehensions count as part of the function that holds them.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path

from compare_versions import ROOT, TINY, checked_out, tiny_demo

TRAINER = [*TINY, "launch.nproc_per_node=1", "data.num_workers=0", "train.num_steps=4"]
WAYS = ("tensors", "load", "whole", "loader", "encoders")
EITHER = "either", ("load", "whole")


class Recorder:
    """Which functions of `package` run, in all threads, between record(True) and record(False) of
    the main thread, which is not slowed down before."""

    def __init__(self, package: Path) -> None:
        self.prefix, self.on = str(package) + os.sep, False
        self.functions: set[tuple[str, str]] = set()
        self.changes: set[tuple[tuple[str, str], tuple[str, str]]] = set()
        threading.setprofile(self._see)  # of threads that begin later

    def record(self, on: bool) -> None:
        self.on = on
        sys.setprofile(self._see if on else None)

    def _see(self, frame, event: str, _: object) -> None:
        if event != "call" or not self.on or not (callee := self._place(frame)):
            return
        self.functions.add(callee)
        while (frame := frame.f_back) is not None:  # the caller in the package, if there is one
            if caller := self._place(frame):
                if caller[0] != callee[0]:
                    self.changes.add((caller, callee))
                return

    def _place(self, frame) -> tuple[str, str] | None:
        """(file below the package, function that is written there), None for other code."""
        code = frame.f_code
        if not code.co_filename.startswith(self.prefix):
            return None
        name = code.co_qualname.split(".<locals>.<")[0]
        return code.co_filename[len(self.prefix):], name.removesuffix(".<module>")

    def result(self) -> dict[str, list]:
        return {"functions": sorted(self.functions), "changes": sorted(self.changes)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_trainer(recorder: Recorder, way: str, data: Path, folder: Path) -> None:
    """Steps 2 and 3 of a run of 4."""
    from orchmllm.trainer import Trainer

    read = Trainer._read
    seen = 0

    def counted(*args):
        nonlocal seen
        result = read(*args)
        seen += 1
        recorder.record(seen in (1, 2))
        return result

    Trainer._read = counted
    from orchmllm import train

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    recipe = whole_recipe(folder) if way == "whole" else [
        *json.loads((data / "recipe.json").read_text()), *TRAINER, f"balance.dispatch={way}"]
    if train.main([*recipe, f"run.dir={folder / way}"]):
        raise RuntimeError(f"the run of {way} failed")


def whole_recipe(folder: Path) -> list[str]:
    """The arguments for training a tiny Qwen2-VL on rows with images."""
    import torch

    from tests.lib.whole_folders import write_model, write_rows

    for name in ("model", "rows"):
        (folder / name).mkdir()
    write_model("qwen2_vl", folder / "model", torch.float32)
    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps({
        "model": {"pretrained": str(folder / "model")},
        "data": {"path": str(write_rows(folder / "rows", 60, "qwen2_vl")), "num_workers": 0,
                 "index_dir": str(folder / "index")},
        "train": {"num_steps": 4, "batch_size": 4}, "launch": {"nproc_per_node": 1},
        "fsdp": {"param_dtype": "float32"}}), encoding="utf-8")
    return [str(recipe)]


def run_loader(recorder: Recorder, _: str) -> None:
    """Batches 2 and 3 of a text-only loop."""
    import torch

    from orchmllm import BalancedDataLoader

    rows = [torch.arange(5 + k % 7) for k in range(40)]
    loader = BalancedDataLoader(
        rows, batch_size=2, lengths=list(map(len, rows)),
        collate_fn=lambda batch: {"input_ids": torch.cat(batch), "labels": torch.cat(batch)})
    weight = torch.ones((), requires_grad=True)
    for k, batch in enumerate(loader):
        recorder.record(k in (0, 1))
        loader.scale_sum(weight * batch["input_ids"].sum()).backward()


def run_encoders(recorder: Recorder, _: str) -> None:
    """The second forward and backward with images of a tiny Qwen2.5-VL."""
    from orchmllm import balance_encoders
    from tests.lib.encoder_models import FAMILIES, Item, batch

    family = FAMILIES["qwen2_5_vl"]
    model = family.build()
    balance_encoders(model)
    for k in range(2):
        recorder.record(k == 1)
        model(**batch(family, model, [Item("image", 3), Item("image", 1)], seed=k)).loss.backward()
    recorder.record(False)


def child(way: str, tree: Path, data: Path, out: Path) -> None:
    """One way in this process, with the package of `tree`; writes what was recorded to `out`."""
    recorder = Recorder(tree / "orchmllm")
    with tempfile.TemporaryDirectory() as folder:
        if way in ("tensors", "load", "whole"):
            run_trainer(recorder, way, data, Path(folder))
        else:
            import torch.distributed as dist

            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0,
                                    world_size=1)
            {"loader": run_loader, "encoders": run_encoders}[way](recorder, folder)
            dist.destroy_process_group()
    out.write_text(json.dumps(recorder.result()), encoding="utf-8")


def count(tree: Path, way: str, data: Path, folder: Path) -> dict[str, list]:
    """What one way meets in the package of `tree`."""
    out = folder / "way.json"
    subprocess.run([sys.executable, __file__, "--child", way, str(tree), str(data), str(out)],
                   cwd=tree, env={**os.environ, "PYTHONPATH": str(tree),
                                  "CUDA_VISIBLE_DEVICES": ""},
                   check=True, stdout=subprocess.DEVNULL)
    found = json.loads(out.read_text(encoding="utf-8"))
    if not found["functions"]:
        raise RuntimeError(f"{way}: nothing was recorded")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", metavar="REVISION")
    parser.add_argument("--list", choices=WAYS, metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], *map(Path, args.child[1:]))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "data"
        recipe = tiny_demo(data)
        (data / "recipe.json").write_text(json.dumps(recipe), encoding="utf-8")
        if args.list:
            listing(count(ROOT, args.list, data, folder))
            return
        trees = {"this tree": ROOT}
        if args.base:
            trees = {args.base: checked_out(args.base, folder), **trees}
        try:
            print(f"{'way':<10} {'revision':<12} {'functions':>9} {'files':>6} "
                  f"{'changes of file':>16}")
            for label, tree in trees.items():
                found = {way: count(tree, way, data, folder) for way in WAYS}
                name, of = EITHER
                found[name] = {what: sorted({tuple(map(tuple, x)) if what == "changes" else tuple(x)
                                             for way in of for x in found[way][what]})
                               for what in ("functions", "changes")}
                for way, met in found.items():
                    files = {file for file, _ in met["functions"]}
                    print(f"{way:<10} {label:<12} {len(met['functions']):>9} {len(files):>6} "
                          f"{len(met['changes']):>16}", flush=True)
        finally:
            if args.base:
                subprocess.run(["git", "worktree", "remove", "--force", str(trees[args.base])],
                               cwd=ROOT)


def listing(found: dict[str, list]) -> None:
    """The functions by file."""
    of_file = defaultdict(list)
    for file, function in found["functions"]:
        of_file[file].append(function)
    for file, functions in of_file.items():
        print(f"{file} ({len(functions)})", *functions, sep="\n    ")


if __name__ == "__main__":
    main()
