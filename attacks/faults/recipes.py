"""Planted faults in the reading of recipes: a setting that is not what it says would be a false guarantee."""

from planting import fault, rewrite


@fault("unknown-settings-ignored", tests=("recipes/test_recipe.py",))
def unknown_settings_ignored(patch):
    from dataclasses import fields

    from sfumato.recipes import recipe, settings

    original = settings.from_table

    def tolerant(kind, table, **where):
        names = {item.name for item in fields(kind)}
        return original(kind, {key: value for key, value in table.items() if key in names}, **where)

    for module in (settings, recipe):  # sections are read by the former, whole recipes from the latter
        patch.setattr(module, "from_table", tolerant)


@fault("infinite-settings-accepted", tests=("recipes/test_recipe.py::test_what_cannot_be_meant_is_refused",))
def infinite_settings_accepted(patch):
    import sfumato.recipes.settings as settings

    patch.setattr(settings, "_all_finite", lambda value: True)


@fault("strings-read-as-numbers", tests=("recipes/test_recipe.py::test_what_cannot_be_meant_is_refused",))
def strings_read_as_numbers(patch):
    rewrite(
        patch,
        "sfumato.recipes.settings:_checked",
        "msgspec.convert(_plain(value), wanted)",
        "msgspec.convert(_plain(value), wanted, strict=False)",
    )


@fault("resumed-under-other-privacy", tests=("recipes/test_recipe.py",))
def resumed_under_other_privacy(patch):
    rewrite(
        patch,
        "sfumato.recipes.recipe:differences",
        '("performance", "reference")',
        '("performance", "reference", "privacy")',
    )


@fault(
    "options-of-another-model-kept",
    tests=("cli/test_cli_run.py::test_another_model_does_not_inherit_the_options_of_the_recipes",),
)
def options_of_another_model_kept(patch):
    rewrite(patch, "sfumato.recipes.recipe:with_settings", "not keep_options and", "keep_options and")
