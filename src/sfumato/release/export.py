"""A release as one file for other programs: ONNX, or a program of ``torch.export``; its statement is inside.

The file takes uint8 images (N, C, S, S) and gives logits and probabilities: normalisation is inside. How
files become such images (crop, pad or stretch to S pixels) is in ``sfumato.config``, and so is a threshold.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from sfumato.errors import ModelError
from sfumato.files import replacing
from sfumato.release.card import headline
from sfumato.release.decompositions import DECOMPOSITIONS
from sfumato.release.release import ReleasedModel

if TYPE_CHECKING:
    from torch.export import ExportedProgram

Format = Literal["onnx", "torch-export"]
ENDINGS: dict[Format, str] = {"onnx": ".onnx", "torch-export": ".pt2"}
TOLERANCE = 1e-4
_OUTPUTS = ("logits", "probabilities")


class ExportedClassifier(nn.Module):
    """uint8 images (N, C, S, S) → logits and probabilities (N, classes)."""

    mean: Tensor
    std: Tensor

    def __init__(self, released: ReleasedModel) -> None:
        super().__init__()
        self.model = copy.deepcopy(released.model).eval().requires_grad_(False)
        for module in self.model.modules():
            if getattr(module, "low_precision", False):
                setattr(module, "low_precision", False)  # noqa: B010  # other programs round bfloat16 otherwise
        self.decision, self.task = released.decision, released.task
        channels = released.config["channels"]
        for name in ("mean", "std"):
            values = torch.tensor(released.config[name], dtype=torch.float32)
            self.register_buffer(name, values.expand(channels).reshape(1, channels, 1, 1).clone())

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.decision.correct(self.model((images.float() / 255.0 - self.mean) / self.std))
        return logits, logits.sigmoid() if self.task == "multi-label" else logits.softmax(1)


def described(released: ReleasedModel) -> dict[str, str]:
    """What the file says of itself: the guarantee in words and figures, classes and preprocessing."""
    config = {key: value for key, value in released.config.items() if key != "model"}
    return {
        "sfumato.guarantee": headline(released.privacy),
        "sfumato.statement": released.privacy["statement"],
        "sfumato.privacy": json.dumps(released.privacy),
        "sfumato.config": json.dumps(config),
        "sfumato.classes": json.dumps(released.classes),
    }


def export(released: ReleasedModel, path: Path, *, to: Format) -> float:
    """Write the file; the largest difference of its outputs from the model's, on random images.

    Guarantee: a file whose outputs differ by more than 1e-4 is not left behind.
    """
    classifier = ExportedClassifier(released)
    size, channels = released.config["image_size"], released.config["channels"]
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (3, channels, size, size), dtype=torch.uint8, generator=generator)
    with torch.no_grad():
        expected = classifier(images)
    write, run = (_write_onnx, _run_onnx) if to == "onnx" else (_write_program, _run_program)
    with replacing(path) as temporary, _quiet():
        _attempt(to, lambda: write(classifier, images, temporary, described(released)))
        # not the number of images that it was made with: a file for one number only would be of little use
        got = [_attempt(to, lambda rows=rows: run(temporary, images[:rows])) for rows in (3, 1)]  # type: ignore[misc]
        difference = max(
            (ours[: len(theirs)] - theirs).abs().max().item()
            for outputs in got
            for ours, theirs in zip(expected, outputs, strict=True)
        )
        if not difference <= TOLERANCE:
            raise ModelError(
                "export-differs",
                f"the exported model's outputs differ from the model's by {difference:.3g}.",
                why=f"A file whose outputs are not equal to {TOLERANCE:g} would be another model.",
                fix="Use the other format, or the release itself.",
            )
    return difference


def _attempt(to: str, action: Callable[[], Any]) -> Any:
    """``action``, with every failure of an exporter or runtime as one error that can be acted on."""
    try:
        return action()
    except ModelError:
        raise
    except Exception as error:  # exporters raise whatever the operation that they do not know raises
        other = "torch-export" if to == "onnx" else "onnx"
        raise ModelError(
            "cannot-export",
            f"the model cannot be written as {to}: {type(error).__name__}: {str(error)[:300]}",
            why="One of its operations is not known there.",
            fix=f"Try --to {other}, or use the release itself: sfumato.load.",
        ) from error


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModelError(
            "export-not-installed",
            f"ONNX needs the package {name}, which cannot be imported: {error}",
            fix="pip install 'sfumato[export]', or --to torch-export, which needs nothing.",
        ) from error


def _program(classifier: nn.Module, images: Tensor) -> ExportedProgram:
    """The traced program, for any number of images, without the names of files on this machine."""
    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(classifier, (images,), dynamic_shapes={"images": {0: batch}})
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)
    return program


def _write_program(classifier: nn.Module, images: Tensor, path: Path, said: dict[str, str]) -> None:
    files = {f"{key}.txt": value for key, value in said.items()}
    with open(path, "wb") as file:
        torch.export.save(_program(classifier, images), file, extra_files=files)


def _run_program(path: Path, images: Tensor) -> tuple[Tensor, ...]:
    with open(path, "rb") as file, torch.no_grad():
        return torch.export.load(file).module()(images)


def _write_onnx(classifier: nn.Module, images: Tensor, path: Path, said: dict[str, str]) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        _package(name)
    made = torch.onnx.export(
        _program(classifier, images).run_decompositions(DECOMPOSITIONS),
        input_names=["images"],
        output_names=list(_OUTPUTS),
        dynamo=True,
        verbose=False,
    )
    assert made is not None  # no file was named
    document = made.model_proto
    for function in [document.graph, *document.functions]:
        for node in function.node:
            node.ClearField("metadata_props")  # where each operation stands in which file of this machine
            node.ClearField("doc_string")
    document.ClearField("metadata_props")
    for key, value in said.items():
        document.metadata_props.add(key=key, value=value)
    document.doc_string = said["sfumato.statement"]
    path.write_bytes(document.SerializeToString())


def _run_onnx(path: Path, images: Tensor) -> tuple[Tensor, ...]:
    runtime = _package("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return tuple(torch.from_numpy(each) for each in session.run(list(_OUTPUTS), {"images": images.numpy()}))


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters warn of their own insides; what matters is compared afterwards."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
