"""A model class that is registered in this process, and that the project has never seen."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.lib.ranks import run_ranks
from tests.lib.whole_folders import write_rows

pytestmark = [pytest.mark.whole, pytest.mark.dist]
RECIPE = """\
model: {{pretrained: {folder}, proof: {proof}}}
data: {{path: {folder}/data.jsonl, index_dir: {folder}/index}}
train: {{num_steps: 3, batch_size: 3}}
"""


def trained(world, folder: str, proof: str = "true") -> tuple[list[float], list[str], str]:
    """(Losses, what the run says, its error) of a recipe of three lines."""
    from orchmllm.config.recipe import load_recipe
    from tests.lib import never_seen  # noqa: F401
    from tests.lib.training import listened, train

    path, said = Path(folder) / f"recipe{world.rank}.yaml", listened()
    path.write_text(RECIPE.format(folder=folder, proof=proof))
    run = load_recipe(path, [f"run.dir={folder}/run", "run.resume=never"])
    try:
        return [row["loss"] for row in train(world, run)], said, ""
    except Exception as error:
        return [], said, str(error)


def test_it_is_proven_and_trained(tmp_path):
    from tests.lib import never_seen

    never_seen.write(tmp_path)
    write_rows(tmp_path, 24)
    ranks = run_ranks(trained, 2, str(tmp_path))
    for losses, _, error in ranks:
        assert not error and len(losses) == 3 and all(map(math.isfinite, losses))
        assert losses[-1] != losses[0]
    assert any("is trained as transformers trains examples\n" in line for line in ranks[0][1])


def test_all_ranks_learn_that_it_is_refused_and_none_waits(tmp_path):
    """What the model computes now looks at other examples of its row."""
    from tests.lib import never_seen

    never_seen.write(tmp_path, neighbours=True)
    write_rows(tmp_path, 24)
    found = run_ranks(trained, 2, str(tmp_path))
    assert [losses for losses, *_ in found] == [[], []]
    assert len({error for *_, error in found}) == 1
    assert "of its size from what transformers computes" in found[0][2]
    assert "model.proof: false" in found[0][2]


@pytest.mark.slow
def test_without_the_proof_it_is_trained_and_the_log_says_so(tmp_path):
    from tests.lib import never_seen

    never_seen.write(tmp_path, neighbours=True)
    write_rows(tmp_path, 24)
    [(losses, said, error)] = run_ranks(trained, 1, str(tmp_path), "false")
    assert len(losses) == 3 and not error
    assert any("model.proof is false" in line for line in said)
