"""Weights that saw private images without protection stay refused, through any chain of runs and names."""

from __future__ import annotations

import shutil
import stat
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from sfumato.data import DataSplits
from sfumato.errors import PrivacyError
from sfumato.ledger.ledger import Ledger
from sfumato.run.ancestry import ANCESTRY_FILE, UNNAMED
from sfumato.run.session import train
from small_runs import small_recipe, small_set

FEW = {"training__num_steps": 2, "training__batch_size": 12, "privacy__delta": 1e-2}


def images(seed: int, name: str) -> DataSplits:
    return DataSplits(train=small_set(48, seed=seed, name=name))


def from_weights(place, **changes):
    return small_recipe(**{**FEW, "privacy__epsilon": 20.0, "model__weights": str(place), **changes})


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A without privacy on P; B privately on Q, from A, which is declared public for Q."""
    home = tmp_path_factory.mktemp("chain")
    with Ledger.open(home / "ledger.sqlite") as book:
        plain = small_recipe(
            **FEW, privacy__enabled=False, privacy__epsilon=None, training__learning_rate=0.1
        )
        train(plain, out=home / "A", data=images(1, "P"), ledger=book)
        recipe = from_weights(home / "A", model__weights_are_public=True, privacy__epsilon=4.0)
        train(recipe, out=home / "B", data=images(2, "Q"), ledger=book)
    return home


@pytest.fixture
def book(chain):
    with Ledger.open(chain / "ledger.sqlite") as ledger:
        yield ledger


def refusal(recipe, out, data, book) -> str:
    with pytest.raises(PrivacyError) as caught:
        train(recipe, out=out, data=data, ledger=book)
    assert not out.exists()
    return caught.value.code


@pytest.mark.parametrize("name", ["P", "renamed"])
def test_images_behind_the_chain_are_recognised_under_any_name(chain, book, tmp_path, name):
    out = tmp_path / "C"
    assert refusal(from_weights(chain / "B"), out, images(1, name), book) == "weights-saw-these-images"
    declared = from_weights(chain / "B", model__weights_are_public=True)
    assert refusal(declared, out, images(1, name), book) == "weights-saw-these-images"


def test_one_shared_image_is_enough(chain, book, tmp_path):
    mixed = images(3, "mixed")
    pixels = mixed.train.images.clone()
    pixels[5] = images(1, "P").train.images[7]
    stained = replace(mixed, train=replace(mixed.train, images=pixels, content_ids=None, fingerprint=""))
    assert refusal(from_weights(chain / "B"), tmp_path / "C", stained, book) == "weights-saw-these-images"
    train(from_weights(chain / "B"), out=tmp_path / "C", data=mixed, ledger=book)  # the control


def test_what_nothing_tells_of_must_be_declared(chain, book, tmp_path):
    alone = shutil.copytree(chain / "B/release", tmp_path / "release")
    with Ledger.open(tmp_path / "other.sqlite") as other:  # knows no run
        for place, ledger in ((alone, book), (chain / "B", other)):
            code = refusal(from_weights(place), tmp_path / "C", images(4, "others"), ledger)
            assert code == "unknown-ancestors"
        train(
            from_weights(chain / "B"), out=tmp_path / "D", data=images(2, "Q"), ledger=other
        )  # declared once
    declared = from_weights(alone, model__weights_are_public=True)
    result = train(declared, out=tmp_path / "C", data=images(4, "others"), ledger=book)
    assert "taken to be public" in result.privacy["statement"]


def test_a_bare_file_is_remembered_as_unknown(chain, book, tmp_path):
    save_file(load_file(chain / "A/release/model.safetensors"), tmp_path / "bare.safetensors")
    bare = from_weights(tmp_path / "bare.safetensors", model__weights_are_public=True, privacy__epsilon=4.0)
    result = train(bare, out=tmp_path / "B", data=images(2, "Q"), ledger=book)
    assert result.privacy["weights_from"]["unprotected"] == [UNNAMED]
    code = refusal(from_weights(tmp_path / "B"), tmp_path / "C", images(1, "renamed"), book)
    assert code == "unknown-ancestors"


def test_fingerprints_stay_in_the_state_folder(chain):
    mark = images(1, "P").train.fingerprint
    kept = chain / "B/state" / ANCESTRY_FILE
    assert mark in kept.read_text()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    files = [path for path in (chain / "B").rglob("*") if path.is_file() and "state" not in path.parts]
    assert not any(mark.encode() in path.read_bytes() for path in files)
