"""`make gpu`: lines, limits and carried wheels, without running a part for real."""

from __future__ import annotations

import gzip
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from orchmllm.models.whole_flops import part_counts
from scripts.gpu import __main__ as kit
from scripts.gpu import carry, gradients, lines, setup, trace
from scripts.gpu.parts import GPU_TESTS, PARTS, Part, Place
from tests.lib.commands import ROOT
from tests.lib.recipes import read

SETUP = {"python": "3", "torch": "2", "cuda": None, "transformers": "5", "gpus": 0,
         "device": "CPU", "memory_bytes": 0, "unpacked": [], "missing": ["soxr>=0.5"],
         "built": False}
LINE = {"part": "tests", "status": "ok", "started": "2026-01-01T00:00:00+00:00", "seconds": 1.0,
        "cpu_s": 2.0, "limit_s": 60.0, "command": ["python"], "exit_code": 0, "tiny": True,
        "commit": None, "device": "CPU", "problems": [],
        "figures": {"passed": 3, "failed": 0, "skipped": 1}}


def test_a_line_that_is_not_of_the_schema_is_told():
    assert lines.problems_of(LINE) == []
    for change, said in (
            ({"status": "good"}, "not one of ok"), ({"seconds": "1"}, "not a number"),
            ({"seconds": float("nan")}, "not a number"), ({"exit_code": True}, "not a count"),
            ({"more": 1}, "more is not in the schema"), ({"part": "test"}, "part 'test'"),
            ({"problems": ["x"]}, "there are problems"), ({"command": [1]}, "not a list"),
            ({"figures": {"passed": 3}}, "figures.failed is missing"),
            ({"figures": {"passed": 0.5}, "status": "timeout"}, "not a count")):
        assert said in "; ".join(lines.problems_of(LINE | change)), change
    assert lines.problems_of(LINE | {"status": "timeout", "figures": {"passed": 3}}) == []
    assert lines.problems_of({k: v for k, v in LINE.items() if k != "device"})
    bench = LINE | {"part": "bench", "figures": {"gain": {"natural": 1.1}, "mfu": 3}}
    assert len(lines.problems_of(bench)) == 2


def test_every_part_has_figures_and_its_tests_and_files():
    assert PARTS.keys() == lines.FIGURES.keys()
    assert all(part.limit_s <= 300 for part in PARTS.values())
    marked = {p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").rglob("test_*.py")
              if re.search(r"^@pytest\.mark\.gpu|^pytestmark.*gpu", p.read_text(), re.M)}
    assert marked == set(GPU_TESTS)
    models = read("mllm_1gpu").model, gradients.model(tiny=False)
    first, second = (part_counts(model)["llm"].outputs for model in models)
    assert first == second  # the kernels of the loss that runs use
    needed = re.search(r"requires = \[(.*)\]", (ROOT / "pyproject.toml").read_text())[1]
    assert tuple(re.findall(r'"(.*?)"', needed)) == setup.TO_BUILD


def told(folder, name: str) -> list[dict]:
    found = lines.read(folder / "results.jsonl")
    assert [lines.problems_of(line) for line in found] == [[]] * len(found)
    return [line for line in found if line["part"] == name]


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """Some short parts in place of the kit's; the folder that it writes."""
    def write(figures: dict) -> object:
        return lambda place, name: ["-c", "import pathlib, sys; pathlib.Path(sys.argv[1])."
                                    "write_text(sys.argv[2])", str(place.result(name)),
                                    json.dumps(figures)]

    ok = {"saved_bytes": 1, "save_s": 1.0, "stall_s": 0.0, "step_s": 1.0, "resumed_at_step": 4,
          "loss_difference": 0.0, "rss_before_bytes": 1, "rss_saving_bytes": 2, "resume_s": 1.0}
    short = {"setup": Part("", 10, write(SETUP)), "resume": Part("", 60, write(ok)),
             "gradients": Part("", 0.5, lambda *_: ["-c", "import time; time.sleep(600)"],
                               lambda *_: {"errors": {"float32": 1e-6}}),
             "drop-in": Part("", 60, write({"loss_difference": "x"})),
             "doctor": Part("", 60, lambda place, name: ["-c", "raise SystemExit('no disk')"],
                            lambda path, output: {})}
    monkeypatch.setattr(kit, "PARTS", short)
    monkeypatch.setattr(Place, "work", property(lambda self: tmp_path / "work"))
    return tmp_path


def test_what_fails_hangs_or_tells_nonsense_has_its_line(parts, capsys):
    assert kit.main(["--tiny", "--out", str(parts)]) == 1
    said = capsys.readouterr().out
    assert "missing: soxr>=0.5" in said and "no disk" in said
    assert {name: told(parts, name)[0]["status"] for name in kit.PARTS} == {
        "setup": "ok", "resume": "ok", "gradients": "timeout", "drop-in": "failed",
        "doctor": "failed"}
    hung, wrong, doctor = (told(parts, name)[0] for name in ("gradients", "drop-in", "doctor"))
    assert hung["figures"] == {"errors": {"float32": 1e-6}} and hung["exit_code"] is None
    assert "'x', not a number" in wrong["problems"][0] and wrong["figures"] == {}
    assert doctor["problems"] == ["exit code 1: no disk"]
    assert "| resume | ok |" in (parts / "summary.md").read_text()
    assert kit.main(["resume", "--tiny", "--out", str(parts)]) == 0
    assert len(told(parts, "resume")) == 2 and len(told(parts, "doctor")) == 1


def test_what_no_time_is_left_for_is_named(parts, capsys):
    for minutes in ("0.05", "0.4"):  # less than half of what setup may take, too
        assert kit.main(["--tiny", "--minutes", minutes, "--out", str(parts)]) == 0
        assert "python -m scripts.gpu resume gradients drop-in doctor" in capsys.readouterr().out
        assert {line["part"] for line in lines.read(parts / "results.jsonl")} == {"setup"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_unknown_parts_are_refused(parts, capsys):
    assert kit.main(["--out", str(parts)]) == 2
    assert "no GPU found" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        kit.main(["resum"])
    assert stop.value.code == 2 and "resum: no such part" in capsys.readouterr().err


KILLED = """
import subprocess, sys
from scripts.gpu import __main__ as kit
from scripts.gpu.parts import PARTS, Part

if sys.argv[1:] == ["part"]:
    subprocess.run(["setsid", "sleep", "77"])
else:
    PARTS["setup"] = Part("", 60, lambda *_: ["-c", ""], lambda *_: {setup})
    PARTS["doctor"] = Part("", 60, lambda *_: [{script!r}, "part"], lambda *_: {{}})
    kit.signal.signal(kit.signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(kit.main(["doctor", "--tiny", "--out", {out!r}]))
"""


def runs(pid: int) -> bool:
    """Whether a process is there and is not just waiting for its parent to read how it ended."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] not in "ZX"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_kit_that_is_killed_keeps_its_lines(tmp_path, number):
    """While its second part runs, which has started a process in a session of its own; where it can
    answer the signal, it ends both."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(setup=SETUP, script=str(script), out=str(tmp_path)))
    process = subprocess.Popen([sys.executable, script], cwd=ROOT,
                               env=os.environ | {"PYTHONPATH": str(ROOT)})
    while len(started := kit.descendants(process.pid)) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(300) == (128 + number if number == signal.SIGTERM else -number)
    assert told(tmp_path, "setup")[0]["status"] == "ok" and not told(tmp_path, "doctor")
    assert "| setup | ok |" in (tmp_path / "summary.md").read_text()
    while number == signal.SIGTERM and any(map(runs, started)):  # pytest's limit ends it
        time.sleep(0.05)
    for child in filter(runs, started):
        os.kill(child, signal.SIGKILL)


def wheel(folder, name: str, version: str, *needs: str, tag: str = "py3-none-any") -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as file:
        file.writestr(f"{name}.py", f"version = '{version}'\n")
        file.writestr(f"{info}/METADATA", "\n".join(
            ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}",
             *(f"Requires-Dist: {need}" for need in needs)]) + "\n")


def test_wheels_of_what_lacks_are_unpacked_with_what_they_need(tmp_path, monkeypatch):
    site = tmp_path / "site"
    monkeypatch.setattr(setup, "site_folder", lambda: site)
    monkeypatch.setattr(sys, "path", list(sys.path))
    wheel(tmp_path, "kitone", "2.0", "kittwo>=1", "kitfour; extra == 'x'")
    wheel(tmp_path, "kittwo", "1.5", "kitthree==3")
    wheel(tmp_path, "numpy", "0.1")  # the one that is there is newer
    wheel(tmp_path, "kitfive", "1.0", tag="cp27-cp27m-win32")
    done = setup.unpack(["kitone", "numpy>=1", "kitfive"], tmp_path)
    assert done == ["kitone-2.0-py3-none-any.whl", "kittwo-1.5-py3-none-any.whl"]
    assert setup.lacking(["kitone", "kitfive"]) == ["kitfive", "kitthree==3"]
    assert setup.lacking(["kitone>=3"]) == ["kitone>=3"]
    assert sorted(p.name for p in site.glob("*.py")) == ["kitone.py", "kittwo.py"]


def test_without_a_compiler_the_carried_core_of_these_sources_is_taken(tmp_path, monkeypatch):
    tree, carried = tmp_path / "tree", tmp_path / "carried"
    shutil.copytree(ROOT / "cpp", tree / "cpp")
    (tree / "orchmllm").mkdir()
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    carry.carry_core("2.7", platform.machine(), carried)
    assert not carried.exists()  # nothing that the other Python could not import
    carry.carry_core(python, platform.machine(), carried)
    monkeypatch.setattr(setup, "ROOT", tree)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert not setup.build(carried) and setup.core().stat().st_size > 10_000
    assert not setup.build(tmp_path / "none")  # it is there now
    setup.core().unlink()
    (tree / "cpp" / "bindings.cpp").open("a").write("// another version")
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler .* these sources"):
        setup.build(carried)


@pytest.mark.slow
def test_a_corpus_is_made_where_none_was_carried(tmp_path, monkeypatch):
    carried, made = tmp_path / "carried", tmp_path / "made"
    monkeypatch.setattr(setup, "CORPORA", [carried, made])
    monkeypatch.setattr(setup, "EXAMPLES", 3)
    setup.make_demo_data()
    assert setup.demo_data() == made and (made / "tokenizer.json").exists()
    carried.mkdir()
    (carried / "data.jsonl").touch()
    assert setup.demo_data() == carried


def test_the_table_compares_runs_and_shows_the_last_line_of_a_part():
    steps = {"tokens_min": 16400, "tokens_mean": 17000.0, "steps": 10, "step_s": 0.5,
             "predicted_step_s": 0.4, "predicted_for": "h100-sxm", "first_step_s": 2.0,
             "peak_bytes": 5e10, "peak_of": "tensors", "predicted_peak_bytes": 4.8e10, "mfu": 0.35,
             "predicted_mfu": 0.44, "tokens_per_s": 34000.0, "trace": None,
             "idle_share": 0.02, "longest": ["9.0 ms, 3 x gemm"]}
    runs = [LINE | {"part": name, "figures": steps | {"tokens_per_s": speed}}
            for name, speed in (("train-none", 1.0), ("train-none", 34000.0),
                                ("compiled-none", 40800.0))]
    assert not any(map(lines.problems_of, runs))
    text = lines.table(runs)
    assert ("| compiled-none | ok | 1 | 0.400 | 0.500 | 48.00 | 50.00 | 44.0 | 35.0 | 1.20x | "
            "predicted for h100-sxm; peak of tensors; idle 2.0% |") in text
    assert text.count("train-none") == 1 and "| 1.00x |" in text


def test_a_trace_tells_when_the_gpu_had_nothing_to_do(tmp_path):
    """Kernels of two streams overlap; what runs on the host does not count, nor what was launched
    before the last step's first kernel."""
    def event(start: float, duration: float, name: str, category: str = "kernel",
              launch: int = 0) -> dict:
        return {"cat": category, "ts": start, "dur": duration, "name": name,
                "args": {"correlation": launch}}

    before = [event(-70.0, 1.0, "cudaLaunch", "cuda_runtime", 1), event(-30.0, 25.0, "b", launch=1),
              event(-60.0, 1.0, "Optimizer.step#A", "user_annotation"),
              event(50.0, 1.0, "Optimizer.step#A", "user_annotation"),
              event(-5.0, 4.0, "unknown", launch=2)]
    events = [event(-20.0, 1.0, "cudaLaunch", "cuda_runtime"),
              event(40.0, 20.0, "b"), event(0.0, 30.0, "a"), event(10.0, 10.0, "a"),
              event(20.0, 15.0, "copy", "gpu_memcpy"), event(30.0, 90.0, "host", "cpu_op"), *before]
    for kept, found in ((events, {"idle_share": pytest.approx(5 / 60), "longest": [
            "0.0 ms, 2 x a", "0.0 ms, 1 x b", "0.0 ms, 1 x copy"]}),
                        (before, {"idle_share": None, "longest": []})):
        with gzip.open(tmp_path / "t.json.gz", "wt") as file:
            json.dump({"traceEvents": kept}, file)
        assert trace.read(tmp_path / "t.json.gz") == found


def test_the_docs_show_what_an_h200_gave():
    found = lines.read(ROOT / "benchmarks" / "gpu_h200.jsonl")
    assert not any(map(lines.problems_of, found))
    assert lines.table(found) in (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
