"""Checks on the plan and on what surrounds a run."""

from __future__ import annotations

import importlib.util
import os

import torch

from sfumato.doctor.findings import Finding
from sfumato.features.precision import bfloat16_is_faster
from sfumato.privacy.plan import Plan
from sfumato.privacy.statement import round_up

_TRACKERS = {  # environment variable that names a remote service -> package that would talk to it
    "WANDB_API_KEY": "wandb",
    "MLFLOW_TRACKING_URI": "mlflow",
    "COMET_API_KEY": "comet_ml",
    "NEPTUNE_API_TOKEN": "neptune",
    "CLEARML_API_ACCESS_KEY": "clearml",
}


def examine_plan(plan: Plan) -> list[Finding]:
    """What makes a plan's figures weak."""
    findings = []
    if plan.delta > 1 / plan.num_examples:
        findings.append(
            Finding(
                severity="void",
                code="delta-too-large",
                what=f"delta is {plan.delta:g}, above 1/{plan.num_examples}.",
                cure=f"Use {0.1 / plan.num_examples:.0e} or less.",
            )
        )
    elif plan.delta > 0.5 / plan.num_examples:
        findings.append(
            Finding(
                severity="weak",
                code="delta-near-limit",
                what=f"delta is {plan.delta:g}, close to 1/{plan.num_examples}.",
                cure=f"{0.1 / plan.num_examples:.0e} is better, and costs little.",
            )
        )
    if plan.epsilon > 10:
        findings.append(
            Finding(
                severity="weak",
                code="large-epsilon",
                what=f"epsilon is {round_up(plan.epsilon)}: a membership test may be nearly certain.",
                cure="Aim at 8 or less; sfumato budget shows what that needs.",
            )
        )
    if plan.uncounted_search:
        findings.append(
            Finding(
                severity="weak",
                code="uncounted-search",
                what="settings were chosen on the private data, and epsilon leaves that search out.",
                cure="Count it with tuning_runs, or choose settings on public data.",
            )
        )
    return findings


def examine_precision(device: torch.device) -> list[Finding]:
    """What a run whose passes are in bfloat16 should know of ``device``."""
    if bfloat16_is_faster(device):
        return []
    return [
        Finding(
            severity="note",
            code="slow-bfloat16",
            what='performance.precision is "bfloat16", which this processor multiplies slower than float32: '
            "steps may take ten times as long.",
            cure="--set performance.precision=float32 changes no epsilon, also on resume.",
        )
    ]


def examine_surroundings() -> list[Finding]:
    """Remote trackers that could carry losses, norms or private scores to another machine."""
    return [
        Finding(
            severity="weak",
            code="remote-tracker",
            what=f"{variable} is set and {package} is installed: a remote tracker is within reach.",
            cure="Sfumato sends nothing itself; send only metrics.jsonl, never what lies in state/.",
        )
        for variable, package in _TRACKERS.items()
        if os.environ.get(variable) and importlib.util.find_spec(package) is not None
    ]
