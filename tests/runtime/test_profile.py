"""profile.steps records a window of steps; a rank whose memory is exhausted leaves what it had to
do."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from orchmllm.batch import Step
from orchmllm.config.recipe import FsdpConfig, ProfileConfig, RecipeError, load_recipe
from orchmllm.trainer import Trainer
from tests.lib.ranks import run_ranks
from tests.lib.synthetic import SHALLOW, SyntheticDataset, recipe

pytestmark = pytest.mark.dist


def run(world, folder: str, steps: str, exhausted_in: int = -1) -> list[int]:
    """Four steps of two microbatches; returns this rank's positions of the LLM in the step in which
    rank 1 asks for memory that no machine has."""
    one = recipe(model=SHALLOW, fsdp=FsdpConfig(activation_checkpointing="auto", memory_gb=9.0))
    one = replace(one, run=replace(one.run, dir=folder), profile=ProfileConfig(steps),
                  train=replace(one.train, num_steps=4, accumulation_steps=2))
    trainer = Trainer(one, world, dataset=SyntheticDataset())
    compute = trainer._compute

    def stepped(step: Step) -> tuple:
        if step.index == exhausted_in:
            for micro in step.micro:
                wanted.append(int(micro.rank_plan.row[:, 2].sum()))
            if world.rank:
                torch.empty(1 << 60, dtype=torch.uint8)
            raise OSError("another one failed first")
        return compute(step)

    def no_memory(*_) -> None:
        raise MemoryError

    wanted: list[int] = []
    trainer._compute = stepped
    try:
        trainer.run()
    except (RuntimeError, OSError) as e:
        trainer.validation_rows, trainer._validation.dispatch = trainer.train_rows, no_memory
        with pytest.raises(RuntimeError) as told:
            trainer.validate()
        return [str(e), wanted, str(told.value)]
    finally:
        trainer.close()
    return wanted


def test_a_window_of_steps_is_recorded(tmp_path):
    run_ranks(run, 2, str(tmp_path), "1-2")
    trace, = (tmp_path / "profile").iterdir()  # of rank 0 alone
    assert trace.name == "steps_1-2_rank0.json"
    events = json.loads(trace.read_text())["traceEvents"]
    updates = [e for e in events if e.get("name", "").startswith("Optimizer.step")]
    assert len(updates) == 2
    assert any("FSDP::all_gather" in e.get("name", "") for e in events)


@pytest.mark.parametrize("steps", ["2-1", "a", "1-"])
def test_a_window_that_is_none(tmp_path, steps):
    path = tmp_path / "r.yaml"
    path.write_text(f"data: {{path: x}}\nprofile: {{steps: '{steps}'}}\n")
    with pytest.raises(RecipeError, match="profile.steps.*write a step, or the first and"):
        load_recipe(path)


def test_exhausted_memory_leaves_the_plan_of_its_step(tmp_path):
    (_, own, _), (says, wanted, validating) = run_ranks(run, 2, str(tmp_path), "", 2)
    path, = (tmp_path / "oom").iterdir()
    assert path.name == "step_2_rank1.json"
    assert says.startswith("out of memory (") and str(path) in says and "lower" in says
    assert validating == ("out of memory (MemoryError); validation keeps nothing that could be "
                          "recomputed: lower train.batch_size")
    # Of the only rank that had no memory.
    chosen = json.loads((tmp_path / "recompute.json").read_text())["next"].values()
    assert sorted(chosen) != ["none"] * 3
    report = json.loads(path.read_text())
    assert (report["step"], report["rank"], len(report["microbatches"])) == (2, 1, 2)
    for micro, *positions in zip(report["microbatches"], own, wanted, strict=True):
        assert micro["positions"]["llm"] == positions
        assert len(micro["positions"]["vision"]) == 2 and micro["example_ids"]
