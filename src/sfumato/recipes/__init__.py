"""Recipes: every setting of a run in one file, those of the papers among them."""

from sfumato.recipes.recipe import Recipe, load_recipe, with_settings

__all__ = ["Recipe", "load_recipe", "with_settings"]
