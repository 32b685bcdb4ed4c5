"""What is counted: fits have to predict, masks have to be windows, and files are kept."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from orchmllm.counts import kept
from orchmllm.counts.counted import fitted
from orchmllm.counts.masks import reach

ROW = 10_000


def test_a_fit_has_to_predict_what_it_was_not_fitted_to():
    sizes = (64, 128, 192, 320)
    assert fitted(sizes, [5 + 3 * n + 7 * n * n for n in sizes]) == [5, 3, 7]
    with pytest.raises(ValueError, match="not linear and quadratic in the length"):
        fitted(sizes, [3 * n + (n > 192) for n in sizes])


@pytest.mark.parametrize(("rule", "most"), [
    (lambda b, h, q, k: k <= q, 0),
    (lambda b, h, q, k: (k <= q) & (k > q - 7), 7),
    (lambda b, h, q, k: k >= 0, None),
])
def test_a_mask_is_asked_how_far_a_position_sees(rule, most):
    assert reach(rule, ROW) == most


@pytest.mark.parametrize("rule", [
    lambda b, h, q, k: (q - k).abs() < 7,
    lambda b, h, q, k: (k <= q) & (k // 64 == q // 64),
    lambda b, h, q, k: (k <= q) & (k % 2 == q % 2),
])
def test_other_masks_are_refused(rule):
    with pytest.raises(ValueError, match="attention"):
        reach(rule, ROW)


def test_a_file_that_is_damaged_or_of_something_else_is_counted_again(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "FOLDER", str(tmp_path))
    times = []

    def count() -> dict:
        times.append(1)
        return {"flop": [1.5, 2.0]}

    for _ in range(2):
        assert kept.kept(["a"], count) == {"flop": [1.5, 2.0]}
    assert len(times) == 1
    [path] = tmp_path.iterdir()
    good = json.loads(path.read_text())
    for wrong in ("", "{}", "[]", json.dumps(good | {"value": {"flop": [9.0]}}),
                  json.dumps(good | {"about": "another"})):
        path.write_text(wrong)
        assert kept.kept(["a"], count) == {"flop": [1.5, 2.0]}
    assert len(times) == 6 and json.loads(path.read_text()) == good
    assert kept.kept(["b"], count) and len(times) == 7
    with monkeypatch.context() as newer:
        newer.setattr(kept, "_code", lambda: ["of a newer version"])
        assert kept.kept(["a"], count) and len(times) == 8
    for new in ("no package", "torch", "transformers"):
        with monkeypatch.context() as newer:
            newer.setattr(kept, "distributions", lambda name, new=new: [SimpleNamespace(
                version="2" if name == new else "1")])
            kept._code.cache_clear()
            kept.kept(["a"], count)
    kept._code.cache_clear()
    assert len(times) == 11
    for folder in (str(path / "no folder"), "~nobody there/counts"):
        monkeypatch.setattr(kept, "FOLDER", folder)
        assert kept.kept(["a"], count) == {"flop": [1.5, 2.0]}
