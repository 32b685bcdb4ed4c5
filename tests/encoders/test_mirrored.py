"""Integers that the host keeps beside the device, against the same computation with plain ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from orchmllm.encoders.mirrored import Mirrored, mirrored
from tests.lib.no_sync import NoSync

IDS = torch.tensor([[3, 9, 9, 1, 9, 2]])


def rows() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return (torch.randn(1, 6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True))


def put(x: Tensor, features: Tensor, ids: Tensor) -> Tensor:
    out = x.clone()
    out[ids == 9] = out[ids == 9, :] + features[:3]
    return out


COMPUTED = {
    "rows by a mask": lambda x, f, ids: x[ids == 9],
    "a mask among indices": lambda x, f, ids: x[:, (ids == 9)[0], 1],
    "rows put by a mask": put,
    "rows scattered": lambda x, f, ids: x.masked_scatter((ids == 9)[..., None], f),
    "rows scattered by a wide mask": lambda x, f, ids: x.masked_scatter(
        (ids == 9)[..., None].expand_as(x), f[:3]),
    "values scattered": lambda x, f, ids: x.masked_scatter(
        torch.stack([ids == k for k in (9, 1, 3, 4)], -1), f),
    "rows by positions": lambda x, f, ids: x[0, ids[0] % 6],
    "repeated": lambda x, f, ids: f.repeat_interleave(ids[0, :5], 0),
    "filled": lambda x, f, ids: x.masked_fill((ids == 9)[..., None], 0.0),
    "mixed": lambda x, f, ids: x * (ids > torch.arange(6))[..., None] + ids.float()[..., None],
    "read": lambda x, f, ids: x[:, : int((ids == 9).sum())] * ids.max() + ids.tolist()[0][0]}


@pytest.mark.parametrize("name", list(COMPUTED))
def test_values_and_gradients_are_those_of_plain_tensors(name):
    (x, f), (y, g) = rows(), rows()
    wanted, found = COMPUTED[name](x, f, IDS), COMPUTED[name](y, g, Mirrored(IDS, "cpu"))
    assert type(found) is Tensor and torch.equal(found, wanted)
    weights = torch.randn(wanted.shape)
    (wanted * weights).sum().backward()
    (found * weights).sum().backward()
    for one, other in ((x.grad, y.grad), (f.grad, g.grad)):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize("name", ["rows by a mask", "rows put by a mask", "rows scattered",
                                  "rows scattered by a wide mask", "repeated"])
def test_what_depends_on_them_does_not_wait(name):
    (x, f), ids = rows(), Mirrored(IDS, "cpu")
    with NoSync():
        COMPUTED[name](x, f, ids).sum().backward()


def test_they_cannot_be_changed_and_have_to_have_enough_rows():
    ids = Mirrored(IDS, "cpu")
    with pytest.raises(RuntimeError, match="would change integers of a batch in place"):
        ids[:, 0] = 1
    x, features = rows()
    with pytest.raises(RuntimeError, match="a mask chooses 12 values, of which there are 8"):
        x.masked_scatter((ids == 9)[..., None], features[:2])


def test_a_copy_is_changed_in_place_until_it_is_read():
    """As models blank the tokens of media before they look tokens up."""
    given = mirrored(np.array([[1, 9, 2]]), "cpu")
    copy = given.clone()
    copy[given == 9] = 0
    assert copy.tolist() == [[1, 0, 2]] and given.tolist() == [[1, 9, 2]]
    table = torch.arange(10.0)
    assert table[copy].tolist() == [[1.0, 0.0, 2.0]]
    mask = given == 9
    mask.masked_fill_(given == 2, True)  # what was made of others
    assert mask.tolist() == [[False, True, True]]
    for changed in (given, copy):
        with pytest.raises(RuntimeError, match="would change integers of a batch in place"):
            changed[given == 9] = 5
