"""The record of a model: what is named in it is there, and both kinds are asked alike."""

from __future__ import annotations

import inspect

import pytest

from orchmllm.config.model import ModelConfig
from orchmllm.models.spec import OWN_PARTS, WHOLE, Member, ModelSpec, spec_of


@pytest.mark.parametrize("name", [n for n, m in vars(ModelSpec).items() if isinstance(m, Member)])
def test_both_kinds_are_asked_with_the_same_arguments(name):
    own, whole = (inspect.signature(getattr(spec, name)).parameters.values()
                  for spec in (OWN_PARTS, WHOLE))
    assert [(p.name, p.kind) for p in own] == [(p.name, p.kind) for p in whole]


def test_the_folder_of_a_whole_model_chooses_its_record():
    assert spec_of(ModelConfig()) is OWN_PARTS
    assert spec_of(ModelConfig(pretrained="x")) is spec_of(ModelConfig(config="x")) is WHOLE
