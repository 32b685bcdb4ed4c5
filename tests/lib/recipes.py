"""The repository's recipes, and variants of the tiny one."""

from __future__ import annotations

from dataclasses import replace

from orchmllm.config.job import resolve
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import Recipe, load_recipe
from orchmllm.models.whole_flops import plan_spec
from orchmllm.plan.assign import PlanSpec
from tests.lib.commands import ROOT
from tests.lib.synthetic import MODEL, recipe

RECIPES = ROOT / "recipes"


def read(name: str) -> Recipe:
    return load_recipe(RECIPES / f"{name}.yaml")


def frozen(*parts: str, model: ModelConfig = MODEL) -> ModelConfig:
    """A model, the tiny one, with these of vision, audio, connector and llm frozen."""
    return replace(model, connectors_frozen="connector" in parts, **{
        p: replace(getattr(model, p), frozen=True) for p in parts if p != "connector"})


def small_spec(model: ModelConfig) -> PlanSpec:
    """What a plan of the tiny recipe depends on, with another model, on nodes of 8 ranks."""
    return plan_spec(resolve(recipe(model=model), 8, 8))
