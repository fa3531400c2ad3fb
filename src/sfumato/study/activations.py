"""Activations around every residual addition: Klause et al. 2022, figures 1 and 2.

V_R comes along the residual path, V_F along the convolutional path, V_A is their sum, and V_A^S what the norm
behind the sum makes of it, where there is one (ScaleNorm).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from sfumato.errors import ModelError
from sfumato.models.scale_norm import find_additions, norm_after
from sfumato.study.documents import COLOURS, INK, StudyResult, new_figure, styled
from sfumato.study.subjects import Subject, not_private

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SYMBOLS = {"V_R": "$V_R$", "V_F": "$V_F$", "V_A": "$V_A$", "V_A^S": "$V_A^S$"}
PATHS = {"V_R": "residual path", "V_F": "convolutional path", "V_A": "sum", "V_A^S": "sum after ScaleNorm"}
_NUM_BINS = 80
_OUTSIDE = 0.001  # share of the first values that may fall outside the bins at either end


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """All values at one place of a block, over images, channels and positions."""

    mean: float
    deviation: float
    skewness: float  # 0 for what is symmetric about its mean
    positive: float  # share of values above zero
    num_values: int
    edges: list[float]
    counts: list[int]  # between the edges; values outside them are in none


@dataclass(frozen=True, kw_only=True)
class Block:
    """One residual addition: its distributions by V_R, V_F, V_A and, with ScaleNorm, V_A^S."""

    place: str
    values: dict[str, Distribution]

    @property
    def output(self) -> str:
        """What leaves the block: V_A^S if its sum is normalised, else V_A."""
        return "V_A^S" if "V_A^S" in self.values else "V_A"


class _Tally:
    """Moments and a histogram of values that arrive in pieces; sums in float64, about the first mean."""

    def __init__(self) -> None:
        self.count, self.positive = 0, 0
        self.sums = torch.zeros(3, dtype=torch.float64)
        self.shift = 0.0
        self.edges = self.counts = torch.zeros(0)

    def add(self, values: Tensor) -> None:
        flat = values.detach().flatten().double()
        if not self.count:
            self.shift = flat.mean().item()
            ordered = flat.sort().values
            cut = int(_OUTSIDE * len(flat))
            low, high = ordered[cut].item(), ordered[-1 - cut].item()
            room = 0.15 * (high - low) or 0.5
            self.edges = torch.linspace(low - room, high + room, _NUM_BINS + 1, dtype=torch.float64)
            self.counts = torch.zeros(_NUM_BINS, dtype=torch.float64)
        away = flat - self.shift
        self.sums += torch.stack([away.sum(), away.square().sum(), away.pow(3).sum()])
        self.counts += torch.histogram(flat, self.edges).hist
        self.count += len(flat)
        self.positive += int((flat > 0).sum())

    def distribution(self) -> Distribution:
        first, second, third = (self.sums / self.count).tolist()
        variance = max(second - first**2, 0.0)
        third_moment = third - 3 * first * second + 2 * first**3
        return Distribution(
            mean=self.shift + first,
            deviation=math.sqrt(variance),
            skewness=third_moment / variance**1.5 if variance > 0 else 0.0,
            positive=self.positive / self.count,
            num_values=self.count,
            edges=self.edges.tolist(),
            counts=[int(count) for count in self.counts.tolist()],
        )


class _Recorder(fx.Interpreter):
    """Runs the graph and hands the values of some nodes over."""

    def __init__(self, module: fx.GraphModule, tallies: dict[fx.Node, list[_Tally]]) -> None:
        super().__init__(module)
        self.tallies = tallies

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        for tally in self.tallies.get(n, ()):  # before a layer that works in place can change it
            tally.add(value)
        return value


def measure_activations(
    subject: Subject, *, batch_size: int = 32, on_progress: Callable[[int, int], None] | None = None
) -> list[Block]:
    """The distributions at every residual addition, in the order of the forward pass.

    Of the two summands the one with more layers behind it is V_F. Raises ``ModelError`` for a net without
    additions, and for one that cannot be traced.
    """
    graph, additions = _find(subject)
    tallies: dict[fx.Node, list[_Tally]] = {}
    blocks: list[tuple[str, dict[str, _Tally]]] = []
    depths = _depths(graph)
    for number, node in enumerate(additions, 1):
        residual, convolutional = sorted(node.all_input_nodes[:2], key=lambda one: depths[one])
        places = {"V_R": residual, "V_F": convolutional, "V_A": node}
        norm = norm_after(graph, node)
        if norm is not None:
            places["V_A^S"] = norm
        block = {name: _Tally() for name in places}
        for name, place in places.items():
            tallies.setdefault(place, []).append(block[name])
        blocks.append((f"block {number}", block))
    recorder = _Recorder(graph, tallies)
    with torch.inference_mode():
        for start in range(0, len(subject.inputs), batch_size):
            recorder.run(subject.inputs[start : start + batch_size])
            if on_progress is not None:
                on_progress(min(start + batch_size, len(subject.inputs)), len(subject.inputs))
    return [
        Block(place=place, values={name: tally.distribution() for name, tally in block.items()})
        for place, block in blocks
    ]


def _find(subject: Subject) -> tuple[fx.GraphModule, list[fx.Node]]:
    try:
        if subject.inputs.ndim != 4:
            raise ModelError("no-residual-blocks", "it is a head on fixed features")
        graph, additions = find_additions(subject.model, subject.inputs[:2])
        if not additions:
            raise ModelError("no-residual-blocks", "it adds no paths")
    except ModelError as error:
        raise ModelError(
            "no-residual-blocks",
            f"{subject.name} has no residual blocks to look at: {error.what}",
            why="The study compares the paths that meet in a residual addition.",
            fix="Choose a residual net: resnet9, scale_resnet9, wrn_16_4, resnet18 and others.",
        ) from error
    return graph, additions


def _depths(graph: fx.GraphModule) -> dict[fx.Node, int]:
    """Layers on the longest way from the image to each node."""
    depths: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        before = max((depths[argument] for argument in node.all_input_nodes), default=0)
        depths[node] = before + (node.op == "call_module")
    return depths


def activations_result(measured: Sequence[tuple[Subject, list[Block]]]) -> StudyResult:
    """Document and rows of all subjects."""
    nets = [
        {
            **subject.described(),
            "blocks": [
                {"place": block.place, "values": {key: asdict(value) for key, value in block.values.items()}}
                for block in blocks
            ],
        }
        for subject, blocks in measured
    ]
    rows = [
        {
            "net": subject.name,
            "trained": subject.trained,
            "epsilon": subject.epsilon,
            "block": block.place,
            "activation": key,
            "mean": value.mean,
            "deviation": value.deviation,
            "skewness": value.skewness,
            "positive": value.positive,
            "num_values": value.num_values,
        }
        for subject, blocks in measured
        for block in blocks
        for key, value in block.values.items()
    ]
    sensitive = next((subject.split for subject, _ in measured if subject.sensitive), None)
    notice = None if sensitive is None else not_private(sensitive)
    return StudyResult(study="activations", document={"nets": nets}, rows=rows, notice=notice)


@styled
def draw_activations(measured: Sequence[tuple[Subject, list[Block]]], *, block: int = -1) -> Figure:
    """A row for each net, and V_R, V_F and what leaves the block across, as in the paper's figure 2.

    ``block`` is counted from 0; the default is the last. A column has one scale, so that nets compare.
    """
    figure, axes = new_figure(6.9, 1.75 * len(measured) + 0.25, len(measured), 3, sharex="col")
    chosen = [(subject, blocks[min(block, len(blocks) - 1)]) for subject, blocks in measured]
    for row, (subject, one) in enumerate(chosen):
        for column, key in enumerate(("V_R", "V_F", one.output)):
            _draw(axes[row, column], key, one.values[key], COLOURS[row % len(COLOURS)])
        axes[row, 0].set_ylabel(f"{subject.label}\n{one.place} · density", size=8)
    for column in range(3):
        shown = [one.values[key] for _, one in chosen for key in [("V_R", "V_F", one.output)[column]]]
        axes[0, column].set_xlim(min(v.edges[0] for v in shown), max(v.edges[-1] for v in shown))
        axes[-1, column].set_xlabel("activation")
    return figure


def _draw(axes: Axes, key: str, value: Distribution, colour: str) -> None:
    width = value.edges[1] - value.edges[0]
    density = [count / (value.num_values * width) for count in value.counts]
    axes.stairs(density, value.edges, fill=True, color=colour, alpha=0.35, linewidth=0)
    axes.stairs(density, value.edges, color=colour, linewidth=0.9)
    axes.axvline(value.mean, color=INK, linewidth=0.9, linestyle=(0, (4, 2)))
    axes.set_title(f"{SYMBOLS[key]}  {PATHS[key]}", loc="left", size=8.5)
    text = f"mean {_signed(value.mean)}\nstd. dev. {value.deviation:.2f}\nskewness {_signed(value.skewness)}"
    axes.text(0.98, 0.96, text, transform=axes.transAxes, ha="right", va="top", size=7.2, linespacing=1.35)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def _signed(value: float) -> str:
    """Two decimals with a sign as it is printed; zero has none."""
    text = f"{value:+.2f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")
