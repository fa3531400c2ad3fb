"""sfumato adapt as a user calls it: a new folder that the other commands use, and an original left alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

import sfumato
from sfumato.cli import main
from sfumato.models import create_model
from sfumato.privacy.plan import Plan
from sfumato.release.card import model_card
from sfumato.release.release import FORMAT, read_description, write_release


@pytest.fixture
def call(capsys):
    def run(*arguments):
        code = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = exit.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def write_brightness_release(folder, *, classes=("well", "ill"), task="single-label", decision=None):
    """A release whose last class is the likelier the brighter an image is; from level 64 on of two classes."""
    torch.manual_seed(0)
    model = create_model("lenet", num_classes=len(classes), in_channels=1)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.0)
    last = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1]
    torch.nn.init.zeros_(last.weight)
    return folder, model, last, task, decision
