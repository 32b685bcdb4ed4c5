"""The gain of balancing that a run measures of itself, beside that of `orchmllm compare`.

    python scripts/check_gain.py [--ranks 4] [--steps 200] [--every 4] [--compare-steps 20]

The first is what `orchmllm train` says of the demo with balance.measure_every: the median over its
comparisons. The second trains two models in turn, with balancing off and on. Both are ratios of
critical paths, the CPU time of the slowest rank's thread in each phase, added up; what other
processes do changes little. Exit code 1 if the two differ by more than 0.05.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from orchmllm.plan.gain import Gain, describe
from orchmllm.tools.report.log import read_run

ROOT = Path(__file__).parents[1]
TOLERANCE = 0.05


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200, help="of the run that measures (200)")
    parser.add_argument("--every", type=int, default=4, help="balance.measure_every (4)")
    parser.add_argument("--compare-steps", type=int, default=20,
                        help="of each run of the comparison (20); over many more, rounding makes "
                        "its losses differ")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        data, trained, compared = (f"{folder}/{name}" for name in ("data", "trained", "compared"))
        subprocess.run([sys.executable, ROOT / "scripts" / "make_demo_data.py", "--out", data],
                       check=True)
        given = [ROOT / "recipes" / "demo.yaml", f"data.path={data}", f"model.config={data}/model",
                 f"launch.nproc_per_node={args.ranks}"]
        for command, more in (
                ("train", [f"run.dir={trained}", f"train.num_steps={args.steps}",
                           f"balance.measure_every={args.every}", "checkpoint.every_steps=-1"]),
                ("compare", [f"run.dir={compared}", f"train.num_steps={args.compare_steps}"])):
            subprocess.run([sys.executable, "-m", "orchmllm", command, *given, *more], check=True)
        run = read_run(Path(trained))
        comparison = json.loads((Path(compared) / "comparison.json").read_text(encoding="utf-8"))
    gains = np.stack([run[f"measured.gain.{name}"] for name in Gain._fields], axis=1)
    gains = gains[np.isfinite(gains).all(axis=1)]
    of_run = Gain(*(1 / (1 - np.median(gains, axis=0))))
    of_both = Gain(comparison["predicted_ratio"], comparison["critical_path_ratio"])
    print(f"\n{describe([Gain(*pair) for pair in gains.tolist()])}")
    for name in Gain._fields:
        print(f"critical path as sampled / balanced, {name:<9}: the run "
              f"{getattr(of_run, name):.3f}, compare {getattr(of_both, name):.3f}")
    return int(not abs(of_run.measured - of_both.measured) <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
