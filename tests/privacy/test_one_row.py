"""A scheme, a mechanism or an accountant is added by one row: recipes, schema and commands know it then."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import json
from dataclasses import dataclass, replace

from sfumato.accounting import ACCOUNTANTS, SampledGaussian
from sfumato.accounting.renyi import RdpAccountant
from sfumato.privacy.noise_mechanisms import MECHANISMS, Gaussian
from sfumato.privacy.sampling_schemes import SCHEMES, Full


class Cautious(RdpAccountant):
    name, title = "cautious", "Rényi differential privacy of twice as many steps"

    def curve(self, events, neighbouring):
        twice = tuple(replace(event, num_steps=2 * event.num_steps) for event in events)
        return super().curve(twice, neighbouring)


class Everyone(Full):
    name = "everyone"


class Coarse(Gaussian):
    name = "coarse"

    def event(self, noise_multiplier):
        return SampledGaussian(noise_multiplier=noise_multiplier / 2)


ACCOUNTANTS["cautious"], SCHEMES["everyone"], MECHANISMS["coarse"] = Cautious(), Everyone(), Coarse()

# only now: their choices are those of the tables
from click.testing import CliRunner
from sfumato.cli import cli
from sfumato.errors import ConfigError
from sfumato.privacy import Plan
from sfumato.recipes.recipe import Recipe, with_settings
from sfumato.recipes.schema import recipe_schema
from sfumato.run.planning import build_plan

chosen = {"accountant": "cautious", "sampling": "everyone", "mechanism": "coarse"}
settings = {f"privacy.{name}": value for name, value in chosen.items()}
recipe = with_settings(Recipe(), {**settings, "privacy.noise_multiplier": 40.0, "training.num_steps": 20})
plan = build_plan(recipe, num_units=1000)
assert Plan.from_dict(json.loads(json.dumps(plan.as_dict()))) == plan
exact = Plan(num_examples=1000, batch_size=1000, num_steps=40, noise_multiplier=20.0, delta=plan.delta,
             sampling="full", accountant="rdp")
assert plan.epsilon == exact.epsilon
assert Cautious.title in plan.statement().text

properties = recipe_schema()["properties"]["privacy"]["properties"]
for name, value in chosen.items():
    assert value in properties[name]["enum"]
flags = [word for name, value in chosen.items() for word in (f"--{name}", value)]
given = "--num-examples 1000 --noise-multiplier 40 --num-steps 20 --json --delta".split()
result = CliRunner().invoke(cli, ["budget", *flags, *given, str(plan.delta)])
assert json.loads(result.output)["epsilon"] == plan.epsilon, result.output

try:  # control: what has no row is refused
    with_settings(Recipe(), {"privacy.accountant": "careless"})
except ConfigError as error:
    assert "pld, rdp, cautious" in str(error)
else:
    raise AssertionError("accepted")
"""


def test_a_row_is_all_that_a_component_needs():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
