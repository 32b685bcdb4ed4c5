"""What logging costs, as a share of a step of the demo model, both measured in one run.

    python scripts/bench_logging.py [--recipe recipes/demo.yaml] [section.key=value ...]

One rank on the CPU trains; each step's row is then made, written and shown in every way there is
(plain lines, a bar, TensorBoard where it is installed), and each way is timed. Prints the median
over the steps of time / step. Exit code 1 if a way costs 1% of a step or more.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

MAX_SHARE = 0.01
WARM_UP_STEPS = 3


class Terminal(io.TextIOBase):
    """A terminal that shows nothing."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/demo.yaml")
    parser.add_argument("--steps", type=int, default=20, help="steps that count")
    parser.add_argument("--num-ranks", type=int, default=8, help="ranks that a row tells about")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args(argv)


def seconds(do: Callable[[], object]) -> float:
    started = time.perf_counter()
    do()
    return time.perf_counter() - started


def measure(trainer, folder: Path, num_steps: int, num_ranks: int) -> dict[str, list[float]]:
    """Way of logging -> seconds of each step; `step`: those of training."""
    from orchmllm.config.recipe import RunConfig
    from orchmllm.runtime.display import RunDisplay
    from orchmllm.runtime.metrics import metrics_log

    run, log = RunConfig(dir=str(folder)), metrics_log(folder)
    displays = {"plain lines": RunDisplay(run), "bar": RunDisplay(run)}
    if importlib.util.find_spec("tensorboard"):
        displays["TensorBoard"] = RunDisplay(dataclasses.replace(
            run, trackers=("tensorboard",)))
    streams = {name: Terminal() if name == "bar" else io.StringIO() for name in displays}
    for name, display in displays.items():
        with contextlib.redirect_stderr(streams[name]):
            display.start(num_steps)
    out = defaultdict(list)
    for step in trainer.loader():
        row = {}
        out["step"].append(seconds(lambda step=step, row=row: row.update(trainer.train_step(step))))
        row["cpu_s"] = {p: x * num_ranks for p, x in row["cpu_s"].items()}
        out["metrics.jsonl"].append(seconds(lambda row=row: log.write(row)))
        for name, display in displays.items():
            with contextlib.redirect_stdout(streams[name]):
                out[name].append(seconds(lambda d=display, row=row: d.step(row)))
    for display in displays.values():
        display.close()
    log.close()
    return {name: x[WARM_UP_STEPS:] for name, x in out.items()}


def main(argv: list[str]) -> int:
    args = parse(argv)
    import torch
    import torch.distributed as dist

    from orchmllm.config.recipe import load_recipe
    from orchmllm.launch import World
    from orchmllm.trainer import Trainer

    torch.set_num_threads(1)
    num_steps = WARM_UP_STEPS + args.steps
    with tempfile.TemporaryDirectory() as name:
        recipe = load_recipe(args.recipe, [
            *args.overrides, f"train.num_steps={num_steps}", f"run.dir={name}"])
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            world = World(0, 1, 0, 1, "localhost", 0)
            times = measure(Trainer(recipe, world), Path(name), num_steps, args.num_ranks)
        finally:
            dist.destroy_process_group()
    return report(times)


def report(times: dict[str, list[float]]) -> int:
    step, common = times.pop("step"), times.pop("metrics.jsonl")
    print(f"a step: {1e3 * statistics.median(step):.1f} ms (median of {len(step)})")
    worst = 0.0
    for name, shown in {"": [0.0] * len(step), **times}.items():
        both = [a + b for a, b in zip(common, shown, strict=True)]
        share = statistics.median(a / b for a, b in zip(both, step, strict=True))
        worst = max(worst, share)
        print(f"{' and '.join(('metrics.jsonl', *filter(None, [name]))):<30}"
              f"{1e3 * statistics.median(both):8.3f} ms {100 * share:7.3f}% of a step")
    print(f"{'below' if worst < MAX_SHARE else 'not below'} {100 * MAX_SHARE:g}%")
    return int(worst >= MAX_SHARE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
