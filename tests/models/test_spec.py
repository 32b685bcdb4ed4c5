"""The record of a model: what is named in it is there, and both kinds are asked alike."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

from orchmllm.config.model import ModelConfig
from orchmllm.models.spec import OWN_PARTS, WHOLE, Later, ModelSpec, spec_of


@pytest.mark.parametrize("name", [f.name for f in fields(ModelSpec) if f.type == "Callable"])
def test_both_kinds_are_asked_with_the_same_arguments(name):
    own, whole = (inspect.signature(getattr(member, "function", member)).parameters.values()
                  for member in (getattr(OWN_PARTS, name), getattr(WHOLE, name)))
    named = [[p.name for p in given] for given in (own, whole)]
    kinds = [[p.kind for p in given] for given in (own, whole)]
    assert named[0] == named[1] and kinds[0] == kinds[1]


def test_a_member_that_is_not_there_raises():
    with pytest.raises(AttributeError):
        Later("models.names:no_such_function")()


def test_the_folder_of_a_whole_model_chooses_its_record():
    assert spec_of(ModelConfig()) is OWN_PARTS
    assert spec_of(ModelConfig(pretrained="x")) is spec_of(ModelConfig(config="x")) is WHOLE
