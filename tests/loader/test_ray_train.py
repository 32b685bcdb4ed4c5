"""The example of Ray Train: two workers, of which one is lost, on a real cluster."""

from __future__ import annotations

import json

import pytest

from tests.lib.commands import ROOT, python
from tests.lib.examples import EXAMPLES
from tests.lib.ray_clusters import cluster


@pytest.mark.slow
@pytest.mark.dist
def test_workers_of_ray_train_resume_and_are_balanced(tmp_path, monkeypatch):
    """Ray's own loader keeps `scale_sum` of ours. A run that lost a worker in step 8 goes on from
    its checkpoint of step 5 and has the losses of one that was not disturbed."""
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    code = ("import json, with_ray\n"
            f"print(json.dumps([with_ray.main({str(tmp_path)!r}, *args)\n"
            "                  for args in ((False, 0), (True, 0), (True, 8))]))")
    with cluster(2):
        done = python("-c", code, env={"PYTHONPATH": f"{ROOT}:{EXAMPLES}"})
    assert done.returncode == 0, done.stderr[-3000:]
    off, on, lost = json.loads(done.stdout.splitlines()[-1])
    assert len(on) == 32 and on == pytest.approx(off, rel=1e-9)
    assert lost == on
