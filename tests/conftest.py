"""What many tests share: real images where the machine has them, small folders of images otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from PIL import Image

# Before torch is imported, and for commands that tests start: on small tensors a second thread only waits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
# Shapes in annotations are checked at every call in these. Not in ``gradients.clipped``: what it is given
# wrongly it refuses itself, with an error that says more.
SHAPED = [f"sfumato.gradients.{name}" for name in ("clipping", "piece", "segments", "summation")]
SHAPED += ["sfumato.noise", "sfumato.sampling"]
if find_spec("jaxtyping") and find_spec("beartype"):
    from jaxtyping import install_import_hook

    install_import_hook(SHAPED, "shape_checking.checked")


@pytest.fixture(scope="session")
def real_data(pytestconfig: pytest.Config) -> Iterator[Path]:
    """A folder with the known sets in their official layout, also set as SFUMATO_DATA; else skip.

    It is SFUMATO_DATA itself, or what an ``unpack`` script in a neighbouring ``shared/data`` writes.
    """
    given = os.environ.get("SFUMATO_DATA")
    unpack = ROOT.parent / "shared" / "data" / "unpack"
    if given and (Path(given) / "cifar-10-batches-bin").is_dir():
        home = Path(given)
    elif unpack.is_file():
        home = Path(pytestconfig.cache.mkdir("real_data"))
        with FileLock(home / "lock"):  # tests run in several processes
            if not (home / "ready").exists():
                subprocess.run(
                    [sys.executable, str(unpack), str(home)], check=True, stdout=subprocess.DEVNULL
                )
                (home / "ready").touch()
    else:
        pytest.skip("no real data: set SFUMATO_DATA to a folder with cifar-10-batches-bin and the others")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFUMATO_DATA", str(home))
        yield home


@pytest.fixture
def image_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes ``<split>/<class>/*.png`` with random pixels: ``image_folder(train=4, test=2)``."""

    def write(
        *, classes: tuple[str, ...] = ("cat", "dog"), size: int = 12, grey: bool = False, **splits: int
    ) -> Path:
        folder = tmp_path / "images"
        random = np.random.default_rng(7)
        for split, per_class in (splits or {"train": 4}).items():
            for name in classes:
                (folder / split / name).mkdir(parents=True)
                for number in range(per_class):
                    shape = (size, size) if grey else (size, size, 3)
                    pixels = random.integers(0, 256, shape, dtype=np.uint8)
                    Image.fromarray(pixels).save(folder / split / name / f"p{number // 2}-{number}.png")
        return folder

    return write


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``processor(bfloat16=True)``: from now on one that multiplies bfloat16 faster than float32."""

    def become(*, bfloat16: bool) -> None:
        monkeypatch.setattr("sfumato.features.precision._measured", lambda *_: bfloat16)

    return become
