"""The doctor finds what voids the guarantee in data and plan, and lets sound ones pass."""

from __future__ import annotations

from dataclasses import replace

import torch

from sfumato.doctor import Finding, examine_data, examine_plan, examine_surroundings
from sfumato.privacy import Plan
from small_runs import small_set, small_splits


def codes(findings: list[Finding], severity: str | None = None) -> list[str]:
    return [finding.code for finding in findings if severity in (None, finding.severity)]


def test_sound_data_give_only_the_note_about_class_names():
    assert codes(examine_data(small_splits())) == ["public-class-names"]


def test_the_private_images_own_statistics_are_found():
    splits = small_splits(train=60)
    pixels = splits.train.images.float() / 255
    measured = pixels.mean().item(), pixels.std().item()
    assert "private-normalisation" in codes(examine_data(splits, mean=measured[:1], std=measured[1:]), "void")
    assert "private-normalisation" in codes(examine_data(splits, mean=measured[:1]), "void")
    assert "private-normalisation" not in codes(examine_data(splits, mean=[0.5], std=[0.25]))
    assert "private-normalisation" not in codes(examine_data(splits, mean=[0.7], std=[0.9]))


def test_a_class_that_one_unit_brought_is_found():
    train = small_set(61, seed=1)
    labels = torch.where(train.labels == 2, 1, train.labels)
    alone = replace(train, labels=labels.index_fill(0, torch.tensor([5]), 2))
    splits = replace(small_splits(), train=alone)
    assert "class-of-one" in codes(examine_data(splits), "void")
    patient = replace(train, patients=torch.where(train.labels == 2, 0, 1 + torch.arange(61)))
    assert "class-of-one" in codes(examine_data(replace(splits, train=patient), unit="patient"), "void")
    assert "class-of-one" not in codes(examine_data(replace(splits, train=patient), unit="image"))


def test_copies_inside_and_across_splits_are_found():
    train = small_set(30, seed=1)
    doubled = train.select(torch.cat([torch.arange(30), torch.tensor([3, 3])]))
    found = examine_data(replace(small_splits(), train=doubled))
    assert "duplicate-images" in codes(found)
    assert any("one occurs 3 times" in finding.what for finding in found)
    shared = replace(small_splits(train=30), test=train.select(torch.arange(4)))
    assert "shared-images" in codes(examine_data(shared))


def test_patients_in_two_places_are_found():
    train = small_set(24, seed=1, patients=6)
    overlapping = replace(small_splits(), train=train, test=small_set(6, seed=2, patients=3))
    assert {"shared-patients", "images-not-patients"} <= set(codes(examine_data(overlapping)))
    assert "images-not-patients" not in codes(examine_data(overlapping, unit="patient"))
    twice = train.select(torch.cat([torch.arange(24), torch.tensor([0])]))
    mixed = replace(twice, patients=torch.cat([train.patients, torch.tensor([5])]))
    assert "images-of-two-patients" in codes(examine_data(replace(overlapping, train=mixed), unit="patient"))
    assert "images-of-two-patients" not in codes(examine_data(overlapping, unit="patient"))


def test_missing_test_images_are_said_before_anything_is_spent():
    assert "no-test-images" not in codes(examine_data(small_splits()))
    assert "no-test-images" in codes(examine_data(replace(small_splits(), test=None)), "note")
    assert "no-test-images" not in codes(examine_data(replace(small_splits(val=9), test=None), holdout=0.1))


def test_private_validation_images_are_found():
    splits = small_splits(val=9)
    assert "private-validation-set" in codes(examine_data(splits))
    assert "carved" in str(examine_data(splits, holdout=0.1))
    assert "private-validation-set" not in codes(examine_data(replace(splits, val_is_public=True)))


def test_weak_plans_are_found():
    def plan(**changes) -> Plan:
        fixed = {"num_examples": 1000, "batch_size": 100, "num_steps": 50, "allow_large_delta": True}
        return Plan(**{**fixed, "noise_multiplier": 2.0, "delta": 1e-5, **changes})

    assert examine_plan(plan()) == []
    assert codes(examine_plan(plan(delta=2e-3)), "void") == ["delta-too-large"]
    assert codes(examine_plan(plan(delta=9e-4))) == ["delta-near-limit"]
    assert codes(examine_plan(plan(noise_multiplier=0.4))) == ["large-epsilon"]
    assert codes(examine_plan(plan(uncounted_search=True))) == ["uncounted-search"]


def test_a_remote_tracker_within_reach_is_found(monkeypatch, tmp_path):
    assert examine_surroundings() == []
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert examine_surroundings() == []  # the package is not installed
    (tmp_path / "wandb.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert codes(examine_surroundings()) == ["remote-tracker"]
    assert "secret" not in str(examine_surroundings())
