"""The audit over two ranks: both compute, a fault that only ranks have is found, and no thread is left."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import torch

from sfumato.audit import mechanism
from sfumato.audit.mechanism import MechanismAudit
from sfumato.audit.mechanism_results import run_mechanism_audit
from sfumato.audit.pipeline import Pipeline
from sfumato.errors import RunError
from sfumato.privacy.plan import Plan
from sfumato.training.ranked_sum import RankedSum

FULL = Plan(num_examples=13, batch_size=13, num_steps=2, noise_multiplier=1e-3, delta=1e-5, sampling="full")


@pytest.fixture(autouse=True)
def one_thread():
    threads, running = torch.get_num_threads(), threading.active_count()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert threading.active_count() == running  # the second rank ended


@pytest.fixture
def shares(monkeypatch):
    """How many units each rank took, step by step."""
    seen, original = [], RankedSum._answer

    def answer(self, indices, step, *, cuts, keys):
        seen.append((step, self.ranks.number, cuts[self.ranks.number + 1] - cuts[self.ranks.number]))
        return original(self, indices, step, cuts=cuts, keys=keys)

    monkeypatch.setattr(RankedSum, "_answer", answer)
    return seen


def test_both_ranks_compute_a_share_of_every_step(shares):
    seen = Pipeline(plan=FULL, over=frozenset({"ranks"}), num_canaries=4).observe([True] * 4)
    assert np.allclose(seen.projections, 1, atol=0.01)
    assert sorted(shares) == [(0, 0, 6), (0, 1, 7), (1, 0, 6), (1, 1, 7)]
    shares.clear()
    Pipeline(plan=FULL, num_canaries=4).observe([True] * 4)
    assert not shares  # control: without ranks nobody else is asked


def test_a_fault_that_only_ranks_have_is_found_over_ranks_alone(monkeypatch):
    monkeypatch.setattr(mechanism, "PROBES", 20)
    over_ranks = MechanismAudit(epsilon=4.0, over=("head", "ranks"), num_canaries=16, confidence=0.999)
    alone = dataclasses.replace(over_ranks, over=("head",))
    assert not run_mechanism_audit(over_ranks, trainings=30)[0].violations
    original = RankedSum._checked

    def shrunk(self, *args):
        total = original(self, *args)
        return dataclasses.replace(total, sensitivity=total.sensitivity / self.ranks.size)

    monkeypatch.setattr(RankedSum, "_checked", shrunk)
    assert "noise" in " ".join(run_mechanism_audit(over_ranks, trainings=30)[0].violations)
    assert not run_mechanism_audit(alone, trainings=30)[0].violations  # control


def test_what_fails_on_the_second_rank_is_raised_by_the_audit(monkeypatch):
    original = Pipeline._own_sum

    def failing(self, units, model, source):
        own = original(self, units, model, source)
        if model is not self._models[2]:
            return own

        class Broken:
            num_units = own.num_units

            def __call__(self, indices, step):
                raise ValueError("no memory left")

        return Broken()

    monkeypatch.setattr(Pipeline, "_own_sum", failing)
    with pytest.raises(RunError, match="no memory left"):
        Pipeline(plan=FULL, over=frozenset({"ranks"}), num_canaries=4).observe([True] * 4)
