"""Layers and factories that the model families are built from."""

from __future__ import annotations

from sfumato.layers.activation import Activation, TemperedSigmoid, make_activation
from sfumato.layers.convolution import WSConv2d, same_padding
from sfumato.layers.initialisation import Initialisation, fan_in_normal_, initialise, xavier_selu_
from sfumato.layers.normalisation import Norm, make_norm, make_scale_norm, suitable_groups
from sfumato.layers.scale import Scale

__all__ = [
    "Activation",
    "Initialisation",
    "Norm",
    "Scale",
    "TemperedSigmoid",
    "WSConv2d",
    "fan_in_normal_",
    "initialise",
    "make_activation",
    "make_norm",
    "make_scale_norm",
    "same_padding",
    "suitable_groups",
    "xavier_selu_",
]
