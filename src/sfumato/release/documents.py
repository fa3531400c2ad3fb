"""The shapes of the JSON documents in a run's folder: what a reader may rely on, whoever wrote them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, Required, TypedDict

from msgspec import Meta

from sfumato.data.images import Task
from sfumato.data.readers.decode import Fit

Count = Annotated[int, Meta(ge=0, le=2**53)]
Share = Annotated[float, Meta(ge=0, le=1)]
NonNegative = Annotated[float, Meta(ge=0)]
Side = Annotated[int, Meta(ge=1, le=1024)]  # what data can be resized to
Channels = Annotated[int, Meta(ge=1, le=16)]
Split = Literal["train", "val", "test"]
# Constants far outside would only carry pixels beyond all numbers.
Shift = Annotated[float, Meta(ge=-1e6, le=1e6)]
Scale = Annotated[float, Meta(ge=1e-6, le=1e6)]
Level = Annotated[float, Meta(ge=-1e9, le=1e9)]


class ModelDescription(TypedDict):
    """A network of the zoo; without a name it is the user's own. ``create_model`` checks the options."""

    name: str | None
    options: dict[str, Any]


class DecisionDocument(TypedDict):
    """How outputs become a class; see ``training.decision``."""

    shift: list[Annotated[float, Meta(ge=-1e3, le=1e3)]] | None
    temperature: Annotated[float, Meta(ge=1e-3, le=1e3)]
    threshold: Annotated[float, Meta(gt=0, lt=1)]
    positive: Count
    thresholds: NotRequired[list[Annotated[float, Meta(gt=0, lt=1)]]]  # of several findings


class RenderingDocument(TypedDict):
    """How values of more than 8 bits become 8: public constants; see ``data.readers.rendering``."""

    window: NotRequired[Annotated[tuple[Level, ...], Meta(min_length=2, max_length=2)]]
    range: NotRequired[Annotated[tuple[Level, ...], Meta(min_length=2, max_length=2)]]
    bits: NotRequired[Annotated[int, Meta(ge=9, le=16)]]
    frame: NotRequired[Annotated[int, Meta(ge=0, le=10**6)]]


class AdaptedDocument(TypedDict):
    """What the decision was set from for another place; see ``release.another_place``."""

    prevalence: list[Share]  # declared, of each class or finding
    num_images: Count
    num_units: Count
    unit: Literal["image", "patient"]


class Config(TypedDict):
    """``release/config.json``: how to build and feed the model."""

    format: int
    model: ModelDescription
    task: NotRequired[Task]  # absent: earlier versions, one class per image
    classes: Annotated[list[str], Meta(min_length=1)]
    image_size: Side
    channels: Channels
    mean: Annotated[list[Shift], Meta(min_length=1)]
    std: Annotated[list[Scale], Meta(min_length=1)]
    fit: Fit
    rendering: NotRequired[RenderingDocument]  # absent: as the files say
    data: str
    decision: NotRequired[DecisionDocument]  # absent in releases of earlier versions: the largest output
    adapted: NotRequired[AdaptedDocument]  # absent: the decision is the training's own


class ResolvedDocument(TypedDict):
    """``resolved.json``: every value of a run that its recipe leaves to the budget or to the data."""

    data: str
    task: NotRequired[Task]  # absent: earlier versions, one class per image
    classes: Annotated[list[str], Meta(min_length=1)]
    image_size: Side
    channels: Channels
    mean: Annotated[list[Shift], Meta(min_length=1)]
    std: Annotated[list[Scale], Meta(min_length=1)]
    model: ModelDescription
    features: dict[str, Any] | None
    unit: Literal["image", "patient"]
    num_units: Count
    delta: Share | None
    noise_multiplier: NonNegative | None
    batch_size: NonNegative
    sampling_rate: Share
    num_steps: Count
    loss: NotRequired[str | None]
    learning_rate: NonNegative
    evaluate_every: Count
    microbatch_size: Count | None


class GaussianEvent(TypedDict):
    """A mechanism as ``accounting.event_to_dict`` writes it."""

    kind: str
    noise_multiplier: NotRequired[NonNegative]
    sampling_rate: NotRequired[Share]
    num_steps: NotRequired[Count]
    discrete: NotRequired[bool]


class PrivacyEvent(GaussianEvent):
    """A mechanism, or a search among runs."""

    events: NotRequired[list[GaussianEvent]]
    mean_runs: NotRequired[NonNegative]
    shape: NotRequired[NonNegative | Literal["poisson"]]


class SearchDocument(TypedDict):
    """The search that found the settings: what each part of it may cost; see ``privacy.search``."""

    strategy: Literal["random-stopping", "scaled", "public"]
    num_trials: NonNegative
    shape: NonNegative | Literal["poisson"]
    trial: list[GaussianEvent]
    score: list[GaussianEvent]
    final: list[GaussianEvent]
    scored_on: str


class BackboneDocument(TypedDict):
    """The public network that training began with."""

    network: str
    file: str
    sha256: str
    licence: str


class Origin(TypedDict):
    """The data behind the weights that training began with."""

    data: str | None
    public: bool
    unprotected: list[str]
    backbone: NotRequired[BackboneDocument]


class Filing(TypedDict):
    """Which run this is, for whoever files it; see ``run.filing``."""

    date: str
    run_id: str
    units_from: str
    earlier_runs: Count  # private ones on data of the same name
    total_epsilon: NonNegative | None  # of all of them; None: no bound, or no earlier ones


class Privacy(TypedDict, total=False):
    """``release/privacy.json``: the guarantee; ``epsilon`` None if there is none."""

    epsilon: Required[NonNegative | None]
    delta: Required[Share | None]
    unit: Required[Literal["image", "patient"]]
    releasable: Required[bool]
    statement: Required[str]
    neighbouring: Literal["add-or-remove", "replace-one"] | None
    accountant: str | None
    noise_multiplier: NonNegative | None
    clip_norm: NonNegative | None
    sampling_rate: Share | None
    num_steps: Count
    num_examples: Count
    mu_gdp: NonNegative | None
    events: list[PrivacyEvent]
    uncounted_search: bool
    search: SearchDocument | None
    weights_from: Origin | None
    filing: Filing


class Environment(TypedDict):
    """``environment.json``: software and hardware."""

    sfumato: str
    python: str
    packages: dict[str, str]
    system: str
    processor: str | None
    accelerator: str | None
    num_threads: Count
    seconds: Annotated[float, Meta(ge=0, le=1e10)]  # of the steps
    total_seconds: NotRequired[Annotated[float, Meta(ge=0, le=1e10)]]  # with features, checks and scores


class MetricsLine(TypedDict):
    """A line of ``metrics.jsonl``."""

    step: Count
    epsilon: NonNegative | None
    learning_rate: float
    val_accuracy: NotRequired[Share]
    test_accuracy: NotRequired[Share]


class AuditHistogram(TypedDict):
    """Scores of canaries, counted between ``edges``."""

    edges: list[float]
    num_in: list[Count]
    num_out: list[Count]


class AuditDocument(TypedDict):
    """``audit.json``: what ``sfumato audit run`` found."""

    sentence: str
    violations: list[str]
    nominal_epsilon: NonNegative
    epsilon: NonNegative
    plain_epsilon: NonNegative
    ceiling: NonNegative
    confidence: Share
    num_canaries: Count
    histogram: AuditHistogram | None
    roc: list[tuple[Share, Share]]


class FindingDocument(TypedDict):
    """Scores of one finding in ``scores.json``."""

    auc: Share | None
    auc_interval: tuple[Share, Share] | None
    sensitivity: Share | None
    specificity: Share | None
    num_positive: Count
    balanced_accuracy: NotRequired[Share | None]  # earlier versions did not write these
    threshold: NotRequired[Share]


_Level = Annotated[float, Meta(ge=-1, le=1)]
_Points = Annotated[list[tuple[Share, Share]], Meta(max_length=10_000)]


class MeasureDocument(TypedDict):
    """A figure and the ends of its interval; None where it is not defined."""

    value: _Level | None
    lower: _Level | None
    upper: _Level | None


class ClassDocument(TypedDict):
    """One class against all others."""

    num_examples: Count
    auc: MeasureDocument
    average_precision: MeasureDocument
    sensitivity: MeasureDocument
    specificity: MeasureDocument
    precision: MeasureDocument
    f1: MeasureDocument


class CurvesDocument(TypedDict):
    """Points (1 - specificity, sensitivity) and (sensitivity, precision)."""

    roc: _Points
    precision_recall: _Points


class CalibrationDocument(TypedDict):
    """Stated probability and observed share in bins of equal width."""

    error: Share
    brier: NonNegative | None
    stated: list[Share | None]
    observed: list[Share | None]
    counts: list[Count]
    best_temperature: NonNegative
    error_at_best_temperature: Share


class ScoresDocument(TypedDict):
    """``scores.json``: the released model on images whose scores may be shown.

    Of one class per image it has ``per_class`` and ``confusion``, of several findings ``per_finding``.
    """

    split: Split
    accuracy: Share
    num_examples: Count
    per_class: NotRequired[dict[str, Share | None]]
    confusion: NotRequired[list[list[Count]]]
    mean_auc: NotRequired[Share | None]
    per_finding: NotRequired[dict[str, FindingDocument]]
    # earlier versions did not write these
    confidence: NotRequired[Share]
    num_people: NotRequired[Count]
    threshold: NotRequired[Share | None]
    positive: NotRequired[str | None]
    measures: NotRequired[dict[str, MeasureDocument]]
    classes: NotRequired[dict[str, ClassDocument]]
    curves: NotRequired[dict[str, CurvesDocument]]
    calibration: NotRequired[CalibrationDocument]
