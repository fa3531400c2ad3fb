"""The shapes in annotations are true, since every test runs with them checked; and cost users nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from sfumato.gradients import ClippedSum, clip_factors
from sfumato.gradients.piece import weighted_sum
from sfumato.gradients.segments import segments_of
from sfumato.noise import add_noise
from sfumato.randomness import SeededSource
from sfumato.sampling import PoissonSampling

jaxtyping = pytest.importorskip("jaxtyping")
pytest.importorskip("beartype")
SOURCE = SeededSource(0)


def total(*, norms, losses):
    return ClippedSum(
        gradients={"w": torch.zeros(4)}, norms=torch.ones(norms), losses=torch.ones(losses), sensitivity=1.0
    )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: clip_factors(torch.ones(3, 2), 1.0),  # a norm for each unit, not several
        lambda: weighted_sum(torch.ones(4, 5), torch.ones(3)),  # as many factors as units
        lambda: segments_of(torch.ones(3)),  # sizes are whole numbers
        lambda: total(norms=3, losses=2),  # one of each for a unit
        lambda: add_noise({"w": torch.ones(2, dtype=torch.int64)}, stddev=1.0, source=SOURCE, step=0),
        lambda: PoissonSampling(sampling_rate=0.5, num_steps=1).batch(3, "seed", 0),
    ],
)
def test_a_wrong_shape_is_refused_under_the_hook(wrong):
    with pytest.raises(jaxtyping.TypeCheckError):
        wrong()


def test_right_shapes_pass():
    assert clip_factors(torch.tensor([0.5, 2.0]), 1).tolist() == [1.0, 0.5]
    assert weighted_sum(torch.ones(4, 5), torch.ones(4)).tolist() == [4.0] * 5
    assert segments_of(torch.tensor([1, 2])).num_units == 2
    assert total(norms=3, losses=3).sensitivity == 1
    assert add_noise({"w": torch.ones(2)}, stddev=1.0, source=SOURCE, step=0)["w"].shape == (2,)
    assert PoissonSampling(sampling_rate=1, num_steps=1).batch(3, SOURCE, 0).tolist() == [0, 1, 2]


def test_the_package_works_without_jaxtyping_and_never_imports_it():
    code = (
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('jaxtyping', 'beartype'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "import torch, sfumato.noise, sfumato.sampling\n"
        "from sfumato.gradients import clip_factors\n"
        "assert clip_factors(torch.ones(2), 0.5).tolist() == [0.5, 0.5]\n"
        "assert 'jaxtyping' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
