"""The example of Ray Train: two workers, of which one is lost, on a real cluster."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import DistributedSampler

from tests.lib.commands import ROOT, python
from tests.lib.examples import EXAMPLES, load
from tests.lib.ray_clusters import cluster


def of_one_process() -> list[float]:
    """Losses of the same global batches, by torch alone."""
    common = load("common")
    torch.manual_seed(0)
    model, data = common.tiny_llm(), common.TextDataset()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drawn = [list(DistributedSampler(data, 2, rank)) for rank in range(2)]
    losses = []
    for at in range(0, len(drawn[0]), 4):
        batch = common.collate([data[i] for rank in drawn for i in rank[at: at + 4]])
        loss = common.sum_loss(model, batch) / (batch["labels"] != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.dist
def test_workers_of_ray_train_resume_and_learn_what_one_process_does(tmp_path, monkeypatch):
    """Ray's own loader keeps `scale_sum` of ours. A run that loses a worker in step 8 goes on from
    its checkpoint of step 5."""
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    code = ("import json, with_ray\n"
            f"print(json.dumps([with_ray.main({str(tmp_path)!r}, *args)\n"
            "                  for args in ((True, 0), (True, 8))]))")
    with cluster(2):
        done = python("-c", code, env={"PYTHONPATH": f"{ROOT}:{EXAMPLES}"})
    assert done.returncode == 0, done.stderr[-3000:]
    whole, lost = json.loads(done.stdout.splitlines()[-1])
    assert len(whole) == 32 and whole == pytest.approx(of_one_process(), rel=1e-9)
    assert lost == whole
