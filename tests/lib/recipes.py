"""The repository's recipes, and variants of the tiny one."""

from __future__ import annotations

from dataclasses import replace

from orchmllm.config.job import resolve
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import Recipe, load_recipe
from orchmllm.models.flops import plan_spec
from orchmllm.plan.assign import PlanSpec
from tests.lib.commands import ROOT
from tests.lib.synthetic import MODEL, recipe

RECIPES = ROOT / "recipes"


def read(name: str) -> Recipe:
    return load_recipe(RECIPES / f"{name}.yaml")


def frozen(*phases: str) -> ModelConfig:
    """The tiny model with these submodules frozen."""
    return replace(MODEL, **{p: replace(getattr(MODEL, p), frozen=True) for p in phases})


def small_spec(model: ModelConfig) -> PlanSpec:
    """What a plan of the tiny recipe depends on, with another model, on nodes of 8 ranks."""
    return plan_spec(resolve(recipe(model=model), 8, 8))
