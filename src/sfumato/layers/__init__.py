"""Layers and factories that the model families are built from."""

from __future__ import annotations

from sfumato.layers.activation import Activation, TemperedSigmoid, make_activation
from sfumato.layers.convolution import WSConv2d, same_padding
from sfumato.layers.initialisation import Initialisation, fan_in_normal_, initialise, xavier_selu_
from sfumato.layers.normalisation import FrozenBatchNorm, Norm, make_norm, make_scale_norm, suitable_groups
from sfumato.layers.padding import SamePad2d, same_conv2d
from sfumato.layers.scale import Scale
from sfumato.layers.scaled_activation import NfActivation, ScaledActivation
from sfumato.layers.squeeze import SqueezeExcite

__all__ = [
    "Activation",
    "FrozenBatchNorm",
    "Initialisation",
    "NfActivation",
    "Norm",
    "SamePad2d",
    "Scale",
    "ScaledActivation",
    "SqueezeExcite",
    "TemperedSigmoid",
    "WSConv2d",
    "fan_in_normal_",
    "initialise",
    "make_activation",
    "make_norm",
    "make_scale_norm",
    "same_conv2d",
    "same_padding",
    "suitable_groups",
    "xavier_selu_",
]
