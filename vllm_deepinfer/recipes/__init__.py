"""Deployments as data: the schema, its loading, and what is wrong with a recipe before anything starts."""

from vllm_deepinfer.recipes.errors import RecipeError
from vllm_deepinfer.recipes.load import load_recipe
from vllm_deepinfer.recipes.schema import Recipe

__all__ = ["Recipe", "RecipeError", "load_recipe"]
