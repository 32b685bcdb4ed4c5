"""Everything that this package does only on a GPU, once, on one of them: in less than 9 minutes.

    python scripts/gpu.py            (or: make gpu)

Correctness (the doctor and its self-test, the tests that need a GPU: attention kernels, events,
waiting), the benchmark, and a profiled run of recipes/mllm_1gpu.yaml on the demo corpus. Writes
benchmarks/gpu_run.json, gpu.json and gpu_measured.json (for `dry-run --measured`); the trace and
the page of the run are in runs/gpu. Exit code 2 without a GPU, 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOTAL_S = 530.0
RUN_DIR = "runs/gpu"
PROFILED = [  # a few steps of a model that fits on one GPU of 80 GB
    f"run.dir={RUN_DIR}", "run.resume=never", "data.path=demo_data", "train.num_steps=14",
    "train.warmup_steps=2", "profile.steps=9-10", "checkpoint.every_steps=-1", "fsdp.memory_gb=0"]
GPU_TESTS = ["tests/models/test_attention.py", "tests/runtime/test_measured.py",
             "tests/e2e/test_no_sync.py"]
# Name -> (arguments of Python, most seconds).
PARTS = {
    "doctor": (["-m", "orchmllm", "doctor", "recipes/mllm_1gpu.yaml", *PROFILED], 60),
    "self-test": (["-m", "orchmllm", "doctor", "--self-test"], 120),
    "tests": (["-m", "pytest", "-q", "-m", "gpu", *GPU_TESTS], 150),
    "profiled run": (["-m", "orchmllm", "train", "recipes/mllm_1gpu.yaml", *PROFILED],
                     150),
    "report": (["-m", "orchmllm", "report", RUN_DIR], 30),
    "benchmark": (["scripts/bench_gpu.py", "--json", "benchmarks/gpu.json", "--out",
                   "benchmarks/gpu_measured.json"], 240),
}


def run(arguments: list[str], limit_s: float) -> dict:
    """Runs Python, shows what it says; exit code (124: it took too long), seconds, the end of the
    output."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, code = process.communicate(timeout=limit_s)[0], process.returncode
    except subprocess.TimeoutExpired:
        process.terminate()  # a run ends its ranks
        try:
            output = process.communicate(timeout=30)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0]
        code = 124
    print(output, flush=True)
    return {"command": ["python", *arguments], "exit_code": code,
            "seconds": time.perf_counter() - started, "output": output.splitlines()[-40:]}


def steps_of_the_run() -> dict:
    """Medians over the steps that follow the first three and are not profiled."""
    path = ROOT / RUN_DIR / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()
            ] if path.is_file() else []
    rows = [r for r in rows if r.get("step", 0) >= 3 and "loss" in r and r["step"] not in (9, 10)]
    if not rows:
        return {}
    return {key: statistics.median(r[key] for r in rows if r[key] is not None) for key in (
        "step_s", "tokens_per_s", "mfu", "data_wait_s", "exchange_ms")
        if any(r[key] is not None for r in rows)}


def main(argv: list[str]) -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        print("no GPU found: this needs one CUDA device that torch can use "
              "(orchmllm doctor says more)", file=sys.stderr)
        return 2
    started, found = time.perf_counter(), {}
    for name, (arguments, limit_s) in PARTS.items():
        print(f"== {name}", flush=True)
        left = TOTAL_S - (time.perf_counter() - started)
        found[name] = run(arguments, max(min(limit_s, left), 1.0))
    report = {
        "device": torch.cuda.get_device_name(0), "torch": torch.__version__,
        "cuda": torch.version.cuda, "seconds": time.perf_counter() - started,
        "run": steps_of_the_run(), "parts": found}
    out = ROOT / "benchmarks" / "gpu_run.json"
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    failed = [name for name, part in found.items() if part["exit_code"]]
    print(f"{report['device']}: {len(found) - len(failed)} of {len(found)} parts passed in "
          f"{report['seconds']:.0f} s" + f"; failed: {', '.join(failed)}" * bool(failed)
          + f"; written: {out.relative_to(ROOT)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
