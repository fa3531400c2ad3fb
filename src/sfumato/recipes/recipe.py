"""Recipes: everything that defines a run, as frozen dataclasses and as strict TOML.

A recipe holds only public values. A key that is not a setting is an error with a suggestion, never ignored:
a misspelt privacy argument that passes silently would be a false guarantee.
"""

from __future__ import annotations

import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from sfumato.accounting import check_budget, check_delta
from sfumato.errors import ConfigError, did_you_mean
from sfumato.recipes.choices import AccountantName, LossName, MechanismName, SchemeName
from sfumato.recipes.data_settings import DataSettings
from sfumato.recipes.decision_settings import DecisionSettings
from sfumato.recipes.families import member_index, member_table
from sfumato.recipes.feature_settings import FeatureSettings
from sfumato.recipes.model_settings import ModelSettings
from sfumato.recipes.reference import ReferenceSettings
from sfumato.recipes.settings import (
    AboveZero,
    Count,
    FromOne,
    HalfTurn,
    Inside,
    NotNegative,
    Positive,
    Scalar,
    Share,
    from_table,
    options_table,
    setting,
    table_to_toml,
    to_table,
    to_toml,
    unknown_key,
    without_none,
)


@dataclass(frozen=True, kw_only=True)
class PretrainingSettings:
    """[pretraining]: a first stage without privacy, on PUBLIC images; its weights begin the private one."""

    data: str | None = setting(None, "public images: cifar100, generated, another known name or a folder")
    num_epochs: NotNegative = setting(20.0, "expected passes over them")
    batch_size: Positive = setting(128, "expected images per step")
    optimizer: str = setting("SGD", "any of torch.optim")
    learning_rate: NotNegative = setting(0.1, "the first one")
    optimizer_options: Mapping[str, Scalar] = options_table("its other arguments")
    schedule: Literal["constant", "cosine"] = setting("cosine", "the rate over time; cosine ends at 0")
    views: Count = setting(1, "random views of an image in a step; 0: the image as it is")
    padding: Count = setting(4, "pixels of mirror padding before the random crop")
    flip: bool = setting(True, "horizontal flips")
    seed: Count = setting(0, "of this stage: nothing in it is secret")


@dataclass(frozen=True, kw_only=True)
class PrivacySettings:
    """[privacy]: the guarantee. Give epsilon or noise_multiplier; the other one follows."""

    enabled: bool = setting(True, "false trains without any privacy, for baselines and public data")
    epsilon: AboveZero | None = setting(None, "the budget; the noise is calibrated to it", check=check_budget)
    delta: Inside | None = setting(
        None, "absent: the largest power of ten up to 1 / (2 x number of units)", check=check_delta
    )
    noise_multiplier: AboveZero | None = setting(None, "noise per unit of sensitivity, when fixed by hand")
    clip_norm: AboveZero = setting(1.0, "bound on the norm of one unit's gradient")
    unit: Literal["image", "patient"] = setting("image", "what one guarantee protects")
    max_images_per_patient: Positive = setting(4, "images taken of one patient in one step, at random")
    accountant: AccountantName = setting("pld", "how epsilon is computed")
    neighbouring: Literal["add-or-remove", "replace-one"] = setting("add-or-remove", "what neighbours are")
    clipping: Literal["flat", "automatic", "per-layer"] = setting(
        "flat", "how: one norm over all; normalised (Bu et al. 2022); each layer to its share"
    )
    sampling: SchemeName = setting("poisson", "full: every unit in every step")
    mechanism: MechanismName = setting("gaussian", "the kind of noise")
    tuning_runs: FromOne | None = setting(None, "mean number of runs of a counted search")
    uncounted_search: bool = setting(False, "settings were chosen on these data and epsilon leaves it out")


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """[training]: the optimisation."""

    batch_size: Positive | None = setting(None, "expected units per step; absent: an eighth of them")
    num_steps: Positive | None = setting(None, "updates; give this or num_epochs")
    num_epochs: NotNegative | None = setting(None, "expected passes over the data")
    loss: LossName | None = setting(
        None, "of one image; absent: cross-entropy, binary-cross-entropy where images have findings"
    )
    class_weights: Literal["balanced"] | tuple[float, ...] | None = setting(
        None, "of the classes in the loss; balanced: one over how frequent they are"
    )
    positive_weights: tuple[float, ...] = setting(
        (), "of images that have a finding: one number, or one for each finding; public constants"
    )
    optimizer: str = setting("SGD", "any of torch.optim, e.g. SGD, NAdam, AdamW; or AdamBC")
    learning_rate: NotNegative | None = setting(
        None, "see normalised_update; absent: 1, on fixed features what the budget gives"
    )
    optimizer_options: Mapping[str, Scalar] = options_table(
        "its other arguments, e.g. momentum, weight_decay"
    )
    kalman_gain: Inside | None = setting(None, "κ of the filter of DiSK (Zhang et al. 2025), e.g. 0.7")
    normalised_update: bool = setting(True, "divide the noisy sum by clip_norm too, as De et al. do")
    ema_decay: Share = setting(0.0, "decay of the averaged weights; 0 releases the last ones")
    evaluate_every: Count = setting(0, "steps between evaluations; 0: about ten in all")
    early_stopping: Count = setting(0, "evaluations without improvement before stopping; 0: never")
    seed: Count | None = setting(None, "reproducible and therefore NOT releasable")


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """[schedule]: the learning rate over time."""

    name: Literal["constant", "step", "cosine", "plateau"] = setting("constant", "its form")
    factor: Share = setting(0.5, "step, plateau: multiply the rate by this")
    every_epochs: NotNegative = setting(5.0, "step: so many expected epochs between changes")
    patience_epochs: NotNegative = setting(3.0, "plateau: epochs without a better public score")
    final: Share = setting(0.0, "cosine: last rate as a share of the first")


@dataclass(frozen=True, kw_only=True)
class AugmentationSettings:
    """[augmentation]: K views of each image, averaged before the one clip."""

    views: Count = setting(0, "K; 0 trains on the images as they are")
    padding: Count = setting(4, "pixels of mirror padding before the random crop")
    flip: bool = setting(True, "horizontal flips")
    mixed_views: Count = setting(0, "further views, each mixed of two of them (DP-Mix, Bao et al. 2023)")
    mix_alpha: AboveZero = setting(0.2, "α of Beta(α, α), from which the weight in a mixture is drawn")
    zoom: Share = setting(0.0, "views 1/(1 + zoom) to 1 + zoom times as large; 0: none of it, as below")
    stretch: Share = setting(0.0, "width against height, as a share up and down")
    rotation: HalfTurn = setting(0.0, "degrees to either side")
    shift: Share = setting(0.0, "of the side, each way")
    gamma: Share = setting(0.0, "exponents of the grey values from 1/(1 + gamma) to 1 + gamma")
    contrast: Share = setting(0.0, "distances from middle grey times 1 ± this")
    brightness: Share = setting(0.0, "added or taken away, of a white that is 1")
    sharpness: Share = setting(0.0, "1: from a blur over 3 pixels to as much sharpening")
    grain: Share = setting(0.0, "largest standard deviation of added noise, of a white that is 1")


# Of views, beyond crops and flips; data.distortion.Distortion has the same names
DISTORTIONS = (
    "zoom",
    "stretch",
    "rotation",
    "shift",
    "gamma",
    "contrast",
    "brightness",
    "sharpness",
    "grain",
)


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """[audit]: canaries in the training, so that `sfumato audit run` can attack it when it is finished."""

    canaries: Annotated[int, Meta(ge=0, le=100_000)] = setting(
        0, "units of their own, each in by a fair coin; the real ones pay nothing; 0: no audit"
    )
    kind: Literal["gradient", "mislabelled", "noise", "optimised"] = setting(
        "gradient", "a gradient of full length, watched step by step; or images, judged by the final model"
    )


@dataclass(frozen=True, kw_only=True)
class PerformanceSettings:
    """[performance]: cannot change epsilon; may differ on resume."""

    microbatch_size: Positive | None = setting(None, "rows in memory at once; absent: from free memory")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1")
    precision: Literal["float32", "bfloat16"] = setting(
        "float32", "of the engine's passes; norms and sums are in float32 or better either way"
    )
    save_every_seconds: NotNegative = setting(60.0, "time between saved states")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run, completely: what `recipe.toml` in the run's folder holds."""

    reference: ReferenceSettings | None = None
    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    augmentation: AugmentationSettings = field(default_factory=AugmentationSettings)
    features: FeatureSettings | None = None
    pretraining: PretrainingSettings | None = None
    decision: DecisionSettings = field(default_factory=DecisionSettings)
    audit: AuditSettings = field(default_factory=AuditSettings)
    performance: PerformanceSettings = field(default_factory=PerformanceSettings)

    def __post_init__(self) -> None:
        if self.training.num_steps is not None and self.training.num_epochs is not None:
            raise ConfigError(
                "steps-and-epochs",
                f"num_steps = {self.training.num_steps} and num_epochs = {self.training.num_epochs} "
                "both say how long to train",
                fix="keep one of the two; --set training.num_epochs=none removes the recipe's",
            )


def recipe_from_toml(text: str, *, origin: str = "recipe") -> Recipe:
    """Parse a recipe; ``origin`` is the file name that errors show."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or numbers and levels beyond all bounds
        raise ConfigError("bad-toml", f"{origin}: {error}", fix="Correct the TOML at that place.") from error
    return from_table(Recipe, table, origin=origin)


def recipe_to_toml(recipe: Recipe) -> str:
    """The recipe as TOML: every setting that has a value, with its meaning beside it."""
    return to_toml(recipe)


def with_settings(recipe: Recipe, assignments: Mapping[str, Any], *, keep_options: bool = False) -> Recipe:
    """A new recipe with ``{"section.key": value}`` replaced, names and types checked.

    Of ``num_steps`` and ``num_epochs`` the one that is given replaces the recipe's other one, and a model of
    another name begins without the options of the recipe's: ``width`` is another thing in another family.
    ``keep_options`` is for a smaller model of the same family.
    """
    table = to_table(recipe)
    if not keep_options and assignments.get("model.name", recipe.model.name) != recipe.model.name:
        table["model"].pop("options", None)
    for given, other in (("num_steps", "num_epochs"), ("num_epochs", "num_steps")):
        if assignments.get(f"training.{given}") is not None and f"training.{other}" not in assignments:
            table.get("training", {}).pop(other, None)
    for path, value in assignments.items():
        _check_path(path)
        section, _, rest = path.partition(".")
        target = table.setdefault(section, {})
        *middle, last = rest.split(".")
        for key in middle:
            target = target.setdefault(key, {})
        if value is None:
            target.pop(last, None)
        else:
            target[last] = value
    return from_table(Recipe, table, origin="--set")


def parse_assignment(text: str) -> tuple[str, Any]:
    """``"training.batch_size=512"`` as a path and a TOML value; a bare word is a string, ``none`` removes."""
    path, separator, raw = text.partition("=")
    if not separator or "." not in path:
        raise ConfigError(
            "bad-assignment", f"{text!r} is not section.key=value", fix="for example privacy.clip_norm=1"
        )
    if raw.strip().lower() == "none":
        return path.strip(), None
    try:
        return path.strip(), tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return path.strip(), raw.strip()


def differences(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Settings that differ, as ``{"section.key": (old, new)}``, but for those that cannot change a run."""
    changed = {}
    for section in fields(Recipe):
        if section.name in ("performance", "reference"):
            continue
        a, b = getattr(old, section.name), getattr(new, section.name)
        if a is None or b is None:
            if a is not b:
                changed[section.name] = (a, b)
            continue
        for item in fields(a):
            before, after = getattr(a, item.name), getattr(b, item.name)
            if before != after:
                changed[f"{section.name}.{item.name}"] = (before, after)
    return changed


def list_recipes() -> list[str]:
    """Names of the recipes that ship inside the package, e.g. ``de2022/cifar10-wrn16-4-eps8``."""
    root = resources.files("sfumato") / "recipes"
    names = list(member_index())
    for folder in root.iterdir():
        if folder.is_dir() and folder.name != "families":
            names += [
                f"{folder.name}/{item.name.removesuffix('.toml')}"
                for item in folder.iterdir()
                if item.name.endswith(".toml")
            ]
    return sorted(names)


def recipe_text(name: str) -> str:
    """The TOML of a shipped recipe, or of a file."""
    if name.endswith(".toml"):
        try:
            return Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("no-recipe", f"{name} cannot be read: {error}", fix="check the path") from error
    if name in member_index():
        family, table = member_index()[name][0], member_table(name)
        return f"# a row of {family}: sfumato reproduce {family}\n\n{table_to_toml(Recipe, table)}"
    known = list_recipes()
    if name not in known:
        raise ConfigError(
            "no-recipe",
            f"there is no recipe {name!r}. {did_you_mean(name, known)}".rstrip(),
            fix="see `sfumato recipes list`, or give a file that ends in .toml",
        )
    return (resources.files("sfumato") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")


def load_recipe(name: str) -> Recipe:
    """A shipped recipe by name, or any file that ends in ``.toml``."""
    return recipe_from_toml(recipe_text(name), origin=name)


def _check_path(path: str) -> None:
    """Refuse a misspelt ``section.key`` even when its value is ``none``."""
    kinds = typing.get_type_hints(Recipe)
    section, _, rest = path.partition(".")
    if section not in kinds:
        raise unknown_key("--set", section, list(kinds))
    names = [item.name for item in fields(without_none(kinds[section]))]
    key = rest.partition(".")[0]
    if key not in names:
        raise unknown_key("--set", f"{section}.{key}", names)
