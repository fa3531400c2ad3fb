"""Whether a row's output depends on the other rows: measured in numbers, not by names of layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sfumato.doctor.probing import STRICT, State, Tolerance, outputs_of, rows_like, same
from sfumato.doctor.row_kinds import batches
from sfumato.errors import ModelError, PrivacyError

NUM_ROWS = 7  # a prime: few dimensions of a model have this length, or a multiple of it


@dataclass(frozen=True)
class Variant:
    """The same rows in another batch: ``picks[p]`` is the row at place p; those in ``replaced`` are not."""

    what: str
    picks: tuple[int, ...]
    replaced: tuple[int, ...] = ()
    value: float | None = None  # of the replaced places: None for large values

    def rows(self, pool: Tensor) -> Tensor:
        rows = pool[torch.tensor(self.picks, device=pool.device)]
        for place in self.replaced:
            if not pool.is_floating_point():
                rows[place] = rows_like(pool, len(pool) + 1)[-1]
            elif self.value is None:
                rows[place] = 50.0 * torch.randn_like(rows[place]) + 7.0
            else:
                rows[place] = self.value
        return rows

    def kept(self) -> list[int]:
        """The places whose output must be as before."""
        return [place for place in range(len(self.picks)) if place not in self.replaced]


CHANGED = Variant("another example changes", (3, 0, 6, 1, 5, 2, 4), replaced=(2,))
VARIANTS = (
    CHANGED,
    Variant("another example is not a number", (5, 4, 0, 2, 6, 3, 1), replaced=(0, 6), value=math.nan),
    Variant("others are left out and the order changes", (4, 6, 1, 3, 0)),
    Variant("the batch has more rows", (0, 1, 2, 3, 4, 5, 6, 3, 3, 2, 6, 6, 0)),
)


def check_independence(
    model: nn.Module, inputs: Tensor, *, num_rows: int = 0, tolerance: Tolerance = STRICT
) -> list[str]:
    """Raise ``PrivacyError`` if a row's output depends on other rows, on its place, or on earlier passes.

    Guarantee: numeric, not by class names. Seven rows are passed in other orders, with some replaced by large
    values and by values that are not numbers (which spread through every sum, mean and maximum they enter),
    with some left out, repeated, and alone; then once in a batch of ``num_rows``; then rows of many kinds
    (zero, constant, positive, whole levels, …), among their like and not. Every row must give what it gave.
    The modes are the model's present ones. Returns the names of the modules that draw random numbers; those
    are held equal for all rows. What happens only at other sizes or values, or after more passes than these,
    is not seen.
    """
    examination = _Examination(model, rows_like(inputs, NUM_ROWS), tolerance)
    for variant in VARIANTS:
        examination.compare(variant)
    examination.compare_kinds()
    examination.check_single_rows()
    examination.compare(Variant("it is alone in the batch", (5,)))
    if num_rows > NUM_ROWS:
        generator = torch.Generator().manual_seed(1)
        picks = torch.randint(NUM_ROWS, (num_rows,), generator=generator).tolist()
        examination.compare(Variant(f"the batch has {num_rows} rows", tuple(picks)))
    examination.finish()
    return examination.drawing


def check_evaluation(model: nn.Module, inputs: Tensor, *, tolerance: Tolerance = STRICT) -> None:
    """The same check with a single variant, for modes that training uses in part or not at all."""
    _Examination(model, rows_like(inputs, NUM_ROWS), tolerance).compare(CHANGED)


class _Examination:
    """Passes of one model over the same pool of rows, each compared with the first."""

    def __init__(self, model: nn.Module, pool: Tensor, tolerance: Tolerance) -> None:
        self.model, self.pool, self.tolerance = model, pool, tolerance
        self.state = State(model)
        self.plain, self.drawing = outputs_of(model, pool)
        self.changed = self.state.changed()
        self.other_change: dict[str, Tensor] = {}
        if not torch.isfinite(self.plain).all():
            raise ModelError(
                "non-finite-output",
                "the model's output is not finite on plain inputs.",
                fix="Check the initialisation and the scale of the inputs.",
            )
        self._repeat()

    def compare(self, variant: Variant) -> None:
        self.state.restore()
        rows = variant.rows(self.pool)
        outputs, _ = outputs_of(self.model, rows)
        self.other_change = self.other_change or self.state.changed()
        picks = torch.tensor([variant.picks[place] for place in variant.kept()])
        if outputs.shape[1:] == self.plain.shape[1:] and not _moved(
            self.plain[picks], outputs[variant.kept()], self.tolerance
        ):
            return
        raise PrivacyError(
            "mixes-examples",
            f"the output of an example changes when {variant.what}{self._where(variant, rows)}.",
            why="Clipping one example then no longer bounds its influence.",
            fix="Use --set model.options.norm=group, or sfumato.models.make_private_ready(model).",
        )

    def compare_kinds(self) -> None:
        """Rows of each kind among their like, beside one of another kind, and among all."""
        known: dict[int, Tensor | None] = {}
        for what, first, second, places, others in batches(self.pool):
            if id(first) not in known:
                known[id(first)] = self._outputs_or_none(first)
            before, after = known[id(first)], self._outputs_or_none(second)
            if before is None or after is None:
                continue  # a model may refuse such values, as long as it says so
            before, after = before[places], after[others]
            told = before.isfinite().flatten(1).all(1)  # the others have overflowed by themselves
            if before.shape != after.shape or _moved(before[told], after[told], self.tolerance):
                raise PrivacyError(
                    "mixes-examples",
                    f"the output of an example changes with the values of others: {what}.",
                    why="Clipping one example then no longer bounds its influence.",
                    fix="Let the model treat each row on its own, without conditions on the whole batch "
                    "(x.max() > 1, (x < 0).any()); prepare the images before.",
                )

    def _outputs_or_none(self, rows: Tensor) -> Tensor | None:
        self.state.restore()
        try:
            return outputs_of(self.model, rows)[0]
        except ModelError as error:
            if error.code != "forward-fails":
                raise
            return None

    def check_single_rows(self) -> None:
        """Refuse a model that takes one row for something else, as squeeze() does."""
        self.state.restore()
        try:
            shape = tuple(outputs_of(self.model, self.pool[:1])[0].shape[1:])
            problem = None if shape == self.plain.shape[1:] else f"an output of shape (1, {shape})"
        except ModelError as error:
            problem = error.what
        if problem is not None:
            raise ModelError(
                "needs-several-rows",
                f"a batch of a single row fails: {problem}",
                why="Batches are drawn at random, and a microbatch may have a single row.",
                fix="Keep the first dimension: x.flatten(1) instead of x.squeeze().",
            )

    def finish(self) -> None:
        """What a pass leaves behind, checked last: mixing is reported first, with the layer's name."""
        self._repeat()
        parameters = dict(self.model.named_parameters())
        for name in self.changed:
            if name in parameters:
                raise changes_weights(name)
        for name, value in self.changed.items():
            if name in self.other_change and same(value, self.other_change[name]):
                raise PrivacyError(
                    "stateful-forward",
                    f"every forward pass changes the model's buffer {name}, whatever the inputs.",
                    why="How many passes a step takes depends on the private examples drawn for it, and the "
                    "examples of one step would meet different models. Spectral norm does this.",
                    fix="Leave it off, or call its layer in evaluation mode.",
                )
            raise PrivacyError(
                "private-statistics",
                f"a forward pass changes the model's buffer {name}.",
                why="It keeps statistics of private images, which the release would contain without noise.",
                fix="Use --set model.options.norm=group, or sfumato.models.make_private_ready(model).",
            )

    def _repeat(self) -> None:
        self.state.restore()
        outputs, _ = outputs_of(self.model, self.pool)
        if _moved(self.plain, outputs, self.tolerance):
            raise PrivacyError(
                "stateful-forward",
                "the same inputs give other outputs when they are asked again.",
                why="The model keeps something from pass to pass outside its buffers, or draws numbers "
                "outside torch; an example's gradient then depends on those before it.",
                fix="Let forward() depend on its arguments and the parameters only, and draw with torch.",
            )

    def _where(self, variant: Variant, rows: Tensor) -> str:
        """The first layer whose output moves; the sizes for which that is worth the memory are small."""
        if len(rows) > 2 * NUM_ROWS:
            return ""
        self.state.restore()
        before = _layer_outputs(self.model, self.pool)
        self.state.restore()
        after = _layer_outputs(self.model, rows)
        picks = [variant.picks[place] for place in variant.kept()]
        for (name, kind, first), (_, _, second) in zip(before, after, strict=False):
            if len(first) != len(self.pool) or len(second) != len(rows):
                continue  # rows are not its first dimension
            if first.shape[1:] != second.shape[1:] or _moved(
                first[picks], second[variant.kept()], self.tolerance
            ):
                return f" (first such layer: {name}, {kind})"
        return ""


def changes_weights(name: str) -> PrivacyError:
    return PrivacyError(
        "changes-weights",
        f"a forward pass changes the parameter {name} itself.",
        why="Which private examples were seen then shows in the weights, without clip and without noise.",
        fix="Leave it off: an embedding must have max_norm=None.",
    )


def check_embeddings(model: nn.Module) -> None:
    """Refuse embeddings with ``max_norm``: rows of the table that no probe reads would change too."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise changes_weights(f"{name}.weight" if name else "weight")


def check_augmentation(augmentation: Callable[[Tensor, torch.Generator], Tensor], images: Tensor) -> None:
    """Raise ``PrivacyError`` if a view of one image depends on another image, as in mixup or cutmix.

    ``augmentation(images, generator)`` returns the same number of views of each image, those of image 0
    first.
    """

    def views(batch: Tensor) -> Tensor:
        return augmentation(batch, torch.Generator(device=batch.device).manual_seed(0))

    disturbed = images.clone()
    disturbed[-1] = 1.0 - disturbed[-1] * 3.0
    plain, other = views(images), views(disturbed)
    kept = len(plain) // len(images) * (len(images) - 1)
    if not torch.equal(plain[:kept], other[:kept]):
        raise PrivacyError(
            "mixes-examples",
            "a view of image 0 changes when another image changes.",
            why="Clipping one unit's gradient then no longer bounds the unit's influence.",
            fix="Use augmentation that treats each image on its own: no mixup, cutmix or batch statistics.",
        )


def _layer_outputs(model: nn.Module, inputs: Tensor) -> list[tuple[str, str, Tensor]]:
    """(name, class, output) of every module in the order in which they finish, the model itself last."""
    outputs: list[tuple[str, str, Tensor]] = []

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, _: object, output: object) -> None:
            if isinstance(output, Tensor) and output.ndim:
                outputs.append((name or "the model", type(module).__name__, output.detach().clone()))

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules()]
    try:
        outputs_of(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def _moved(first: Tensor, second: Tensor, tolerance: Tolerance) -> bool:
    """Whether two outputs of the same rows differ by more than rounding, or stopped to be numbers."""
    first, second = first.double(), second.double()
    if not first.numel():
        return False
    scale = first.abs().max().item() + 1e-12
    return not (first - second).abs().max().item() <= tolerance.outputs * scale
