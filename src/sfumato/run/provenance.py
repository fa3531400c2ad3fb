"""Where training begins: which weights, and what beginning with them costs the private images.

Weights remember the images they were trained on. Whether that matters is decided here, before anything is
trained: public images cost nothing; a private release costs what it states; anything else is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from sfumato.accounting import Event, event_from_dict
from sfumato.data import KNOWN_SETS, DataSplits, ImageSet, normalisation_for
from sfumato.errors import ConfigError, PrivacyError
from sfumato.ledger.ledger import Ledger
from sfumato.models import find_variant
from sfumato.recipes.recipe import ModelSettings, PrivacySettings, Recipe
from sfumato.run.ancestry import FROM_IMAGENET, UNNAMED, Ancestor
from sfumato.run.networks import zoo_network
from sfumato.run.pretraining import check_public_data, check_same_stage, stage_recipe
from sfumato.run.weights import Checkpoint, read_checkpoint, saw_these_images


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """Where the weights come from, for the statement; ``events`` is what they cost these private images."""

    data: str | None
    public: bool
    events: tuple[Event, ...] = ()
    fingerprint: str | None = None
    ancestors: tuple[Ancestor, ...] = ()  # all data behind the weights that no guarantee covers
    mean: tuple[float, ...] | None = None  # how images were normalised for these weights
    std: tuple[float, ...] | None = None
    uncounted_search: bool = False  # the settings of a private beginning were chosen at a cost it left out

    @property
    def unprotected(self) -> tuple[str, ...]:
        """Their names, for the release."""
        return tuple(one.data for one in self.ancestors)

    @property
    def text(self) -> str:
        """For the statement and the model card."""
        origin = "weights" if self.data is None else f"weights trained on {self.data}"
        if self.public:
            return (
                f"Training began with {origin}, which are taken to be public: the guarantee covers none of "
                "the images behind them."
            )
        search = " It does NOT count the search for their settings." if self.uncounted_search else ""
        return (
            f"Training began with privately trained {origin}; ε counts the steps that made them, as if all "
            f"were taken on the present images.{search}"
        )


IMAGENET = Beginning(
    data="ImageNet",
    public=True,
    ancestors=tuple(Ancestor(data=name) for name in ("ImageNet", *FROM_IMAGENET)),
)


def find_beginning(
    recipe: Recipe, splits: DataSplits, *, pretrained: Path | None, own_model: bool = False
) -> tuple[Checkpoint | None, Beginning | None]:
    """The weights that training begins with, judged: None if the model has them, draws them, or a first stage
    is still to train them. Where they come from is known in all cases; None for random ones."""
    settings, stage = recipe.model, recipe.pretraining
    if stage is not None and own_model:
        raise ConfigError(
            "own-model-two-stages",
            "the recipe has a [pretraining] section, but the network is the caller's own",
            why="The first stage builds a network of the zoo, whose weights would not fit.",
            fix="Pre-train the network yourself and pass it trained, with a recipe without [pretraining].",
        )
    public = None if stage is None else check_public_data(stage, splits)
    place = settings.weights or pretrained
    imagenet = not own_model and bool(
        {**find_variant(settings.name).options(), **settings.options}.get("pretrained")
    )
    if place is None and stage is None:
        if imagenet:
            if recipe.privacy.enabled and splits.train.name in FROM_IMAGENET:
                raise saw_these_images(f"the images of {splits.train.name} are of ImageNet, as the weights")
            return None, IMAGENET
        if settings.trained != "all" and not own_model:
            raise ConfigError(
                "nothing-to-fine-tune",
                f'model.trained = "{settings.trained}", but the layers to keep have random weights',
                fix="Give --weights, a [pretraining] section, or --set model.options.pretrained=true.",
            )
        return None, None
    planned = place is None  # the first stage is still to come: what its weights will say of themselves
    checkpoint = planned_checkpoint(recipe, public, imagenet=imagenet) if planned else read_checkpoint(place)
    if stage is not None and not planned:
        check_same_stage(checkpoint, stage_recipe(recipe, splits.train), public)
    beginning = judge(
        checkpoint,
        settings=settings,
        privacy=recipe.privacy,
        train=splits.train,
        public_data=None if public is None else f"{'ImageNet and ' if imagenet else ''}{public.name}",
    )
    return None if planned else checkpoint, beginning


def planned_checkpoint(recipe: Recipe, public: ImageSet, *, imagenet: bool) -> Checkpoint:
    """The weights of a first stage before they are trained: all but the weights themselves."""
    before = IMAGENET if imagenet else None
    with torch.device("meta"):
        network = zoo_network(recipe.model, public)
    mean, std = normalisation(network, public, before)
    origin = None if before is None else {"data": before.data}
    return Checkpoint(
        path=Path("pretraining"),
        weights={},
        config={"data": public.name, "mean": mean, "std": std},
        privacy={"epsilon": None, "releasable": False, "weights_from": origin},
        fingerprint=public.fingerprint,
        ancestors=() if before is None else before.ancestors,
    )


def with_input_size(recipe: Recipe, train: ImageSet) -> Recipe:
    """The recipe with images resized to what public weights expect, unless it says another size."""
    options, variant = recipe.model.options, find_variant(recipe.model.name)
    if not options.get("pretrained") or "input_size" in options or "input_size" not in variant.options():
        return recipe
    if train.images.shape[-1] == variant.input_size:
        return recipe
    sized = {**options, "input_size": variant.input_size}
    return replace(recipe, model=replace(recipe.model, options=sized))


def normalisation(
    network: nn.Module | None, train: ImageSet, beginning: Beginning | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Public constants: those that the first weights were made with, else those of the images' name."""
    channels = train.images.shape[1]
    if beginning is not None and beginning.mean is not None and len(beginning.mean) in (1, channels):
        return beginning.mean, beginning.std
    expected = getattr(network, "preprocessing", None)
    if beginning is not None and expected is not None:
        return expected.mean[:channels], expected.std[:channels]
    return normalisation_for(train.name, channels)


def judge(
    checkpoint: Checkpoint,
    *,
    settings: ModelSettings,
    privacy: PrivacySettings,
    train: ImageSet,
    public_data: str | None = None,
) -> Beginning:
    """What beginning with these weights costs the private images; refuses what would not be counted.

    ``public_data`` names the data of a pre-training whose weights these are.

    Guarantee: weights count as free only if the user declares their images public, and never if they are
    known to have seen these images. Releases with a guarantee are otherwise composed with the new run.
    """
    config = checkpoint.config or {}
    shared = {
        "data": public_data or checkpoint.all_data,
        "fingerprint": checkpoint.fingerprint,
        "mean": tuple(config["mean"]) if config else None,
        "std": tuple(config["std"]) if config else None,
    }
    declared = settings.weights_are_public or public_data is not None
    # the steps of a private release are counted if this run counts any; else nothing covers its images
    counted = checkpoint.is_private and not declared and privacy.enabled
    own = Ancestor(data=checkpoint.data or UNNAMED, fingerprint=checkpoint.fingerprint)
    shared["ancestors"] = checkpoint.ancestors if counted else (*checkpoint.ancestors, own)
    if privacy.enabled and train.name in [one.data for one in checkpoint.ancestors]:
        raise saw_these_images(f"{checkpoint.path} began with weights trained on {train.name}, unprotected")
    if not privacy.enabled:
        return Beginning(public=True, **shared)
    if declared:
        same_name = checkpoint.data == train.name and train.name in KNOWN_SETS
        if checkpoint.fingerprint == train.fingerprint or same_name:
            raise saw_these_images(f"{checkpoint.path} was trained on {train.name}, the private images")
        return Beginning(public=True, **shared)
    if not checkpoint.is_private:
        raise _unprotected(checkpoint)
    stated = checkpoint.privacy
    for key in ("unit", "neighbouring"):
        if stated[key] != getattr(privacy, key):
            raise PrivacyError(
                "weights-other-unit",
                f"the weights state {key} {stated[key]!r}, this run {getattr(privacy, key)!r}",
                why="Guarantees of different kinds cannot be added up to one ε.",
                fix=f"Set privacy.{key}={stated[key]}, or model.weights_are_public=true if no private image "
                "of this run went into the weights.",
            )
    return Beginning(
        public=False,
        events=tuple(map(event_from_dict, stated["events"])),
        uncounted_search=bool(stated.get("uncounted_search")),
        **shared,
    )


def check_apart(beginning: Beginning | None, train: ImageSet, ledger: Ledger) -> None:
    """Refuse weights behind which some of these private images stand unprotected, or might.

    Compared is content, through the whole chain of runs. What was declared public for these images is
    refused only if it is known to hold one. What an earlier run declared for other images is not believed
    here: it must be known to hold none, to this ledger or by a name that everybody knows.
    """
    if beginning is None:
        return
    declared = beginning.public or beginning.fingerprint == train.fingerprint
    for one in beginning.ancestors:
        mark = one.fingerprint
        if mark is not None and (mark == train.fingerprint or ledger.share_images(mark, train.content_ids)):
            raise saw_these_images(f"the weights of {one.data} were trained on images that are private here")
        if not declared and not one.is_well_known and (mark is None or not ledger.knows_images(mark)):
            raise PrivacyError(
                "unknown-ancestors",
                f"behind the privately trained weights stand others, of {one.data}, and nothing here tells "
                "which images these were.",
                why="They were declared public for other private images than those of this run.",
                fix="Give the whole run folder of the weights, where the ledger knows its runs; or, if no "
                "private image of this run went into any of them, --set model.weights_are_public=true.",
            )


def _unprotected(checkpoint: Checkpoint) -> PrivacyError:
    known = checkpoint.privacy
    if known is None:
        what = "is a bare file: nothing says how it was trained"
    elif known["epsilon"] is None:
        what = f"was trained without privacy on {checkpoint.data}"
    else:
        what = f"was trained on {checkpoint.data} with a seed: its noise can be subtracted"
    return PrivacyError(
        "unprotected-weights",
        f"{checkpoint.path} {what}.",
        why="Weights remember their training images, and ε would not cover a private one among them.",
        fix="If all images behind the weights are public: --set model.weights_are_public=true. If not, "
        "do not begin with them.",
    )
