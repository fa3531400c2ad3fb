"""``sfumato bench devices``: where many devices begin to wait for each other, by simulation."""

from __future__ import annotations

from pathlib import Path

import click

from sfumato.cli import echo_json


@click.command("devices")
@click.argument("recipe_name", metavar="RECIPE", default="de2022/cifar10-wrn16-4-eps8")
@click.option("--hardware", default="A100", show_default=True, metavar="NAME", help="The kind of device.")
@click.option("--jitter", default=0.02, show_default=True, type=click.FloatRange(0, 1))
@click.option("--stall-chance", default=1e-4, show_default=True, type=click.FloatRange(0, 1))
@click.option("--stall-seconds", default=1.0, show_default=True, type=click.FloatRange(0))
@click.option("--steps", default=500, show_default=True, type=click.IntRange(1), help="Simulated ones.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="A picture, PNG or SVG.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    recipe_name: str,
    hardware: str,
    jitter: float,
    stall_chance: float,
    stall_seconds: float,
    steps: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Simulate the steps of RECIPE on 1 to 512 devices: Poisson shards, stragglers, a ring of sums, noise.

    Nothing runs but the simulation. Jitter, stalls and the devices' figures are assumptions.
    """
    from sfumato.bench.scaling import bench_scaling, save_scaling_chart
    from sfumato.recipes.recipe import load_recipe
    from sfumato.run.hardware import Trouble, parse_hardware
    from sfumato.run.workload import workload_of

    trouble = Trouble(jitter=jitter, stall_chance=stall_chance, stall_seconds=stall_seconds)
    device = parse_hardware(hardware)
    result = bench_scaling(workload_of(load_recipe(recipe_name)), device, trouble=trouble, num_steps=steps)
    result = {"recipe": recipe_name, **result}
    if out is not None:
        save_scaling_chart(result, out, title=f"{recipe_name}\non {device.device.title}")
    if as_json:
        echo_json(result)
        return
    click.echo(f"{recipe_name} on {device.device.title}, simulated\n")
    click.echo("devices   s per step   efficiency   the same, shared out evenly")
    shards = [row for row in result["rows"] if row["sharding"]]
    shares = [row for row in result["rows"] if not row["sharding"]]
    for one, other in zip(shards, shares, strict=True):
        click.echo(
            f"{one['devices']:7d} {one['seconds_per_step']:12.3g} {100 * one['efficiency']:10.1f} % "
            f"{100 * other['efficiency']:10.1f} %"
        )
    for name, words in (("shards", "shards of their own"), ("shares", "even shares of one batch")):
        limit = result["limit"][name]
        click.echo(f"At least 90 % with {words}: {'never' if limit is None else f'up to {limit} devices'}")
    if out is not None:
        click.echo(f"Wrote {out}")
