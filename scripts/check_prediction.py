"""Predicted beside measured: critical-path CPU time of the demo model, balancing off and on, with
nothing, the LLM or everything recomputed.

    python scripts/check_prediction.py [--ranks 2,4] [--steps 10] [--json FILE]

Measured by `orchmllm compare` (real gloo ranks; CPU time of each rank's thread in each phase, the
slowest rank of each phase added up; what other processes do changes little). Predicted by
orchmllm.tools.predict.step_time on the same batches. Exit code 1 if a ratio off / on is more than
10% off, or two of five settings on the same ranks that are predicted more than 10% apart come in
the other order: settings that are closer are a tie for a model that may be off by as much.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from orchmllm.config.job import resolve
from orchmllm.config.recipe import Recipe, load_recipe
from orchmllm.data.formats.open import index_path
from orchmllm.data.sampler import GlobalSampler
from orchmllm.models.whole_flops import plan_spec
from orchmllm.plan.assign import PHASES
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.step import plan_step
from orchmllm.sharding.memory import MemoryModel
from orchmllm.tools.compare import main as compare
from orchmllm.tools.compare import variant
from orchmllm.tools.data.command import index_all
from orchmllm.tools.predict.examples import dataset_of
from orchmllm.tools.predict.hardware import Hardware
from orchmllm.tools.predict.step_time import slowest_compute, work_of

ROOT = Path(__file__).parents[1]
TOLERANCE = 0.1  # relative
CHOICES = {"nothing": ("none", "none"), "LLM": ("none", "full"), "everything": ("full", "full")}
ORDERED = [("nothing", "on"), ("nothing", "off"), ("LLM", "on"), ("everything", "on"),
           ("everything", "off")]


def predicted(recipe: Recipe, ranks: int, steps: int) -> dict[str, float]:
    """off, on -> seconds of the slowest ranks, up to a factor: the time model on the batches that
    training draws."""
    rows = dataset_of(recipe)
    [index] = index_all(rows.sources, rows.reader, index_path(recipe.data.index_dir), 1)
    rows, batch = range(len(index) - recipe.data.num_validation), recipe.train.batch_size
    sampler = GlobalSampler(rows, ranks * batch, seed=recipe.run.seed)
    found = dict.fromkeys(("off", "on"), 0.0)
    memory = MemoryModel.of(resolve(recipe, ranks, 2))
    for step in range(steps):
        layout = BatchLayout.concat([index.layout(*[sampler.batch(step)] * 2)], [batch] * ranks)
        for name in found:
            plan = plan_step(layout, plan_spec(resolve(
                variant(recipe, name == "on"), layout.num_ranks, 2)))
            work = work_of(plan, recipe.model)
            found[name] += sum(sum(slowest_compute(
                work, p, memory, recipe.fsdp.checkpointing(p), Hardware())[0][0]) for p in PHASES)
    return found


def measured(path: Path, overrides: list[str], run_dir: Path) -> dict[str, float]:
    """off, on -> CPU seconds of the critical path."""
    if compare([str(path), *overrides]):
        raise RuntimeError("orchmllm compare failed")
    return json.loads((run_dir / "comparison.json").read_text())["critical_path_s"]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="comma-separated (2,4)")
    parser.add_argument("--steps", type=int, default=10, help="of each run (10)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    report, wrong, path = {}, False, ROOT / "recipes" / "demo.yaml"
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        subprocess.run([sys.executable, ROOT / "scripts" / "make_demo_data.py", "--out", data],
                       check=True)
        for ranks in map(int, args.ranks.split(",")):
            times: dict[tuple[str, str], tuple[float, float]] = {}
            for name, (towers, llm) in CHOICES.items():
                run_dir = Path(folder) / f"{ranks}_{name}"
                overrides = [
                    f"data.path={data}", f"model.config={data}/model",
                    f"data.index_dir={folder}/index", f"run.dir={run_dir}",
                    f"train.num_steps={args.steps}",
                    f"launch.nproc_per_node={ranks}", f"fsdp.activation_checkpointing={towers}",
                    f"fsdp.llm_checkpointing={llm}"]
                said = predicted(load_recipe(path, overrides), ranks, args.steps)
                real = measured(path, overrides, run_dir)
                times |= {(name, how): (said[how], real[how]) for how in ("off", "on")}
            rows = []
            for name in CHOICES:
                theirs, ours = (times[name, "off"][k] / times[name, "on"][k] for k in (1, 0))
                wrong |= abs(ours / theirs - 1) > TOLERANCE
                rows.append({"recomputed": name, "measured": theirs, "predicted": ours})
                print(f"{ranks} ranks, recomputed: {name:<11} off / on measured {theirs:.3f}, "
                      f"predicted {ours:.3f} ({ours / theirs - 1:+.1%})", flush=True)
            orders = [sorted(ORDERED, key=lambda s, k=k: times[s][k]) for k in (0, 1)]
            swapped = [(a, b) for a in ORDERED for b in ORDERED
                       if times[a][0] * (1 + TOLERANCE) < times[b][0] and times[a][1] > times[b][1]]
            wrong |= bool(swapped)
            print(f"{ranks} ranks, fastest first: predicted {orders[0]}\n"
                  f"{'':9}{'the same' if orders[0] == orders[1] else 'another'} order measured: "
                  f"{orders[1]}", flush=True)
            report[ranks] = {"ratios": rows, "predicted_order": orders[0],
                             "measured_order": orders[1], "swapped": swapped}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
