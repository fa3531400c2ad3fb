"""Where the first weights come from, and what training from them costs the private images.

Weights remember the images they were trained on. Whether that matters is decided here, before anything is
trained: public images cost nothing; a private release costs what it states; anything else is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from torch import nn

from sfumato.accounting import Event, event_from_dict
from sfumato.data import KNOWN_SETS, DataSplits, ImageSet, normalisation_for
from sfumato.errors import ConfigError, PrivacyError
from sfumato.ledger.ledger import Ledger
from sfumato.models import find_variant
from sfumato.models.backbones import is_backbone
from sfumato.recipes.recipe import ModelSettings, PretrainingSettings, PrivacySettings, Recipe
from sfumato.release.documents import Config, ModelDescription, Origin, Privacy
from sfumato.release.release import FORMAT
from sfumato.run.ancestry import FROM_IMAGENET, UNNAMED, Ancestor
from sfumato.run.backbones import BackboneRecord
from sfumato.run.networks import zoo_network
from sfumato.run.pretraining import check_public_data, check_same_stage, stage_recipe
from sfumato.run.weights import Checkpoint, begin_with, read_checkpoint, saw_these_images

Constants = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation of pixels, per channel


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where the weights come from, for the statement; ``events`` is what they cost these private images."""

    data: str | None
    public: bool
    events: tuple[Event, ...] = ()
    fingerprint: str | None = None
    ancestors: tuple[Ancestor, ...] = ()  # all data behind the weights that no guarantee covers
    constants: Constants | None = None  # how images were normalised for these weights
    backbone: BackboneRecord | None = None
    declared: bool = True  # that none of the private images were behind the backbone
    uncounted_search: bool = False  # the settings of private weights were chosen at a cost they left out

    @property
    def unprotected(self) -> tuple[str, ...]:
        """The names of the ancestors, for the release."""
        return tuple(ancestor.data for ancestor in self.ancestors)

    @property
    def text(self) -> str:
        """For the statement and the model card."""
        origin = "weights" if self.data is None else f"weights trained on {self.data}"
        if self.backbone is not None:
            if not self.declared:
                return (
                    f"Training began with {self.backbone.text}. Nobody declared which images are behind it."
                )
            return (
                f"Training began with {self.backbone.text}. Whoever trained this model declares that none of "
                "the private images were among those that the backbone was trained on; the guarantee covers "
                "none of these."
            )
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


IMAGENET = Provenance(
    data="ImageNet",
    public=True,
    ancestors=tuple(Ancestor(data=name) for name in ("ImageNet", *FROM_IMAGENET)),
)


def find_provenance(
    recipe: Recipe, splits: DataSplits, *, pretrained: Path | None, custom_model: bool = False
) -> tuple[Checkpoint | None, Provenance | None]:
    """The weights that training starts from, and where they come from; refuses uncounted ones.

    No checkpoint: the model has its weights, draws them, or a first stage is still to train them. No
    provenance: they are random. ``custom_model``: the network is the caller's, not the zoo's.
    """
    settings, pretraining = recipe.model, recipe.pretraining
    path = settings.weights or pretrained
    if pretraining is not None:
        if custom_model:
            raise ConfigError(
                "own-model-two-stages",
                "the recipe has a [pretraining] section, but the network is the caller's own",
                why="The first stage builds a network of the zoo, whose weights would not fit.",
                fix="Pre-train the network yourself and pass it trained, with a recipe without "
                "[pretraining].",
            )
        return _after_pretraining(recipe, pretraining, splits, path)
    if path is None and is_backbone(settings.name) and not custom_model:
        raise ConfigError(
            "no-backbone-weights",
            f"{settings.name} has no weights to begin with.",
            why="Nothing is downloaded, and random features are of no use.",
            fix="Give the file: --backbone-weights FILE.safetensors",
        )
    if path is not None:
        checkpoint = begin_with(path, settings)
        return checkpoint, assess(checkpoint, settings=settings, privacy=recipe.privacy, train=splits.train)
    if custom_model:
        return None, None
    if _starts_from_imagenet(settings):
        if recipe.privacy.enabled and splits.train.name in FROM_IMAGENET:
            raise saw_these_images(f"the images of {splits.train.name} are of ImageNet, as the weights")
        return None, IMAGENET
    if settings.trained != "all":
        raise ConfigError(
            "nothing-to-fine-tune",
            f'model.trained = "{settings.trained}", but the layers to keep have random weights',
            fix="Give --weights, a [pretraining] section, or --set model.options.pretrained=true.",
        )
    return None, None


def _after_pretraining(
    recipe: Recipe, pretraining: PretrainingSettings, splits: DataSplits, path: str | Path | None
) -> tuple[Checkpoint | None, Provenance]:
    """``find_provenance`` for a recipe with a first stage; ``path`` None: it is still to be trained."""
    public = check_public_data(pretraining, splits)
    imagenet = _starts_from_imagenet(recipe.model)
    checkpoint = None if path is None else read_checkpoint(path)
    if checkpoint is not None:
        check_same_stage(checkpoint, stage_recipe(recipe, pretraining, splits.train), public)
    provenance = assess(
        checkpoint or planned_checkpoint(recipe, public, imagenet=imagenet),
        settings=recipe.model,
        privacy=recipe.privacy,
        train=splits.train,
        public_data=f"{'ImageNet and ' if imagenet else ''}{public.name}",
    )
    return checkpoint, provenance


def _starts_from_imagenet(settings: ModelSettings) -> bool:
    options = {**find_variant(settings.name).options(), **settings.options}
    return bool(options.get("pretrained"))


def planned_checkpoint(recipe: Recipe, public: ImageSet, *, imagenet: bool) -> Checkpoint:
    """What the release of a first stage will say, before its weights are trained."""
    before = IMAGENET if imagenet else None
    with torch.device("meta"):
        network = zoo_network(recipe.model, public)
    mean, std = normalisation(network, public, before)
    origin = None
    if before is not None:
        origin = Origin(data=before.data, public=True, unprotected=list(before.unprotected))
    return Checkpoint(
        path=Path("pretraining"),
        weights={},
        config=Config(
            format=FORMAT,
            model=ModelDescription(name=recipe.model.name, options=dict(recipe.model.options)),
            classes=list(public.classes),
            image_size=public.images.shape[-1],
            channels=public.images.shape[1],
            mean=list(mean),
            std=list(std),
            fit=recipe.data.fit,
            data=public.name,
        ),
        privacy=Privacy(
            epsilon=None, delta=None, unit="image", releasable=False, statement="", weights_from=origin
        ),
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


def normalisation(network: nn.Module | None, train: ImageSet, provenance: Provenance | None) -> Constants:
    """Public constants: those that the first weights were made with, else those of the images' name."""
    channels = train.images.shape[1]
    if provenance is not None and provenance.constants is not None:
        mean, std = provenance.constants
        if len(mean) in (1, channels):
            return mean, std
    expected = getattr(network, "preprocessing", None)
    if provenance is not None and expected is not None:
        if channels == 1:  # of a grey image every channel is the same
            return (fmean(expected.mean),), (fmean(expected.std),)
        return expected.mean[:channels], expected.std[:channels]
    return normalisation_for(train.name, channels)


def assess(
    checkpoint: Checkpoint,
    *,
    settings: ModelSettings,
    privacy: PrivacySettings,
    train: ImageSet,
    public_data: str | None = None,
) -> Provenance:
    """What training from these weights costs the private images; refuses what would not be counted.

    ``public_data`` names the data of a pre-training whose weights these are.

    Guarantee: weights count as free only if the user declares their images public, and never if they are
    known to have seen these images. Releases with a guarantee are otherwise composed with the new run.
    """
    config, guarantee = checkpoint.config, checkpoint.guarantee
    declared = settings.weights_are_public or public_data is not None
    # the steps of a private release are counted if this run counts any; else nothing covers its images
    counted = guarantee is not None and not declared and privacy.enabled
    training_data = Ancestor(data=checkpoint.data or UNNAMED, fingerprint=checkpoint.fingerprint)
    provenance = Provenance(
        data=public_data or checkpoint.all_data,
        public=True,
        fingerprint=checkpoint.fingerprint,
        ancestors=checkpoint.ancestors if counted else (*checkpoint.ancestors, training_data),
        backbone=checkpoint.backbone,
        declared=declared,
        constants=None if config is None else (tuple(config["mean"]), tuple(config["std"])),
    )
    if not privacy.enabled:
        return provenance
    if train.name in [ancestor.data for ancestor in checkpoint.ancestors]:
        raise saw_these_images(f"{checkpoint.path} began with weights trained on {train.name}, unprotected")
    if declared:
        if checkpoint.backbone is not None and train.name in FROM_IMAGENET:
            raise saw_these_images(
                f"the images of {train.name} are of ImageNet, as those behind most public backbones"
            )
        same_name = checkpoint.data == train.name and train.name in KNOWN_SETS
        if checkpoint.fingerprint == train.fingerprint or same_name:
            raise saw_these_images(f"{checkpoint.path} was trained on {train.name}, the private images")
        return provenance
    if guarantee is None:
        raise _unprotected(checkpoint)
    _check_same_kind(guarantee, privacy)
    return replace(
        provenance,
        public=False,
        events=tuple(event_from_dict(event) for event in guarantee["events"]),
        uncounted_search=guarantee.get("uncounted_search", False),
    )


def _check_same_kind(guarantee: Privacy, privacy: PrivacySettings) -> None:
    """Refuse a guarantee for other units or neighbours than those of this run."""
    stated = {"unit": guarantee["unit"], "neighbouring": guarantee["neighbouring"]}
    for key, value in stated.items():
        if value != getattr(privacy, key):
            raise PrivacyError(
                "weights-other-unit",
                f"the weights state {key} {value!r}, this run {getattr(privacy, key)!r}",
                why="Guarantees of different kinds cannot be added up to one ε.",
                fix=f"Set privacy.{key}={value}, or model.weights_are_public=true if no private image "
                "of this run went into the weights.",
            )


def check_ancestors(provenance: Provenance | None, train: ImageSet, ledger: Ledger) -> None:
    """Refuse weights that these private images went into without a guarantee, or may have gone into.

    Compared is content, through the whole chain of runs. What was declared public for these images is
    refused only if it is known to hold one. What an earlier run declared for other images is not believed
    here: it must be known to hold none, to this ledger or by a name that everybody knows.
    """
    if provenance is None:
        return
    declared = provenance.public or provenance.fingerprint == train.fingerprint
    for ancestor in provenance.ancestors:
        fingerprint = ancestor.fingerprint
        if fingerprint is not None and (
            fingerprint == train.fingerprint or ledger.share_images(fingerprint, train.known_ids)
        ):
            raise saw_these_images(
                f"the weights of {ancestor.data} were trained on images that are private here"
            )
        known = fingerprint is not None and ledger.knows_images(fingerprint)
        if not declared and not ancestor.is_well_known and not known:
            raise PrivacyError(
                "unknown-ancestors",
                f"behind the privately trained weights stand others, of {ancestor.data}, and nothing here "
                "tells which images these were.",
                why="They were declared public for other private images than those of this run.",
                fix="Give the whole run folder of the weights, where the ledger knows its runs; or, if no "
                "private image of this run went into any of them, --set model.weights_are_public=true.",
            )


def _unprotected(checkpoint: Checkpoint) -> PrivacyError:
    privacy = checkpoint.privacy
    if checkpoint.backbone is not None:
        return PrivacyError(
            "unprotected-weights",
            f"nobody has declared which images {checkpoint.path.name} was trained on.",
            why="Were any of your images in its training data? If so, or if nobody knows, ε would not cover "
            "what its weights remember of them.",
            fix="If none were: --backbone-provenance public. If not, take another backbone.",
        )
    if privacy is None:
        what = "is a bare file: nothing says how it was trained"
    elif privacy["epsilon"] is None:
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
