"""sfumato bench: speed and memory, measured by taking turns in one process."""

from __future__ import annotations

import json
from pathlib import Path

import click

from sfumato.cli import bench_devices, bench_step, echo_json


@click.group()
def command() -> None:
    """Measure steps, gradients, the head and the reading of images against what the machine allows."""


@command.command()
@click.option("--model", "model", default="wrn_16_4", show_default=True, help="A model of the zoo.")
@click.option("--views", default=1, show_default=True, type=click.IntRange(1), help="Rows of each unit.")
@click.option("--batch", type=click.IntRange(1), help="Units in a step.  [default: 64 / views]")
@click.option("--image-size", default=32, show_default=True, type=click.IntRange(8))
@click.option(
    "--against", default="plain", show_default=True, help="Comma-separated: plain, bfloat16, opacus, vmap."
)
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(1))
@click.option("--append", type=click.Path(path_type=Path), help="Add the result to this file of JSON lines.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def gradients(
    model: str,
    views: int,
    batch: int | None,
    image_size: int,
    against: str,
    rounds: int,
    append: Path | None,
    as_json: bool,
) -> None:
    """Clipped sums beside plain training of the same model on the same images.

    Plain PyTorch gets its faster memory format; every peer clips once per unit.
    """
    from sfumato.bench.gradients import bench_gradients

    peers = tuple(name.strip() for name in against.split(",") if name.strip())
    result = bench_gradients(
        model, views=views, batch_size=batch, image_size=image_size, against=peers, rounds=rounds
    )
    if append:
        append.parent.mkdir(parents=True, exist_ok=True)
        with append.open("a") as file:
            file.write(json.dumps(result) + "\n")
    if as_json:
        echo_json(result)
        return
    click.echo(f"{model}, {result['batch_size']} units x {views} views, {rounds} interleaved rounds")
    plain_time = result["milliseconds_per_image"]["plain"]
    for name, milliseconds in result["milliseconds_per_image"].items():
        memory = result["peak_mebibytes"][name]
        room = "" if memory is None else f"   {memory:7.0f} MiB"
        share = f"   {result['share_of_peak'][name]:4.0%} of the machine's products"
        ratio = f"{milliseconds / plain_time:5.2f} x{room}{share}"
        click.echo(f"  {name:14s} {milliseconds:8.2f} ms per image   {ratio}")


@command.command()
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--num-examples", default=1_000_000, show_default=True, type=click.IntRange(1))
@click.option("--num-features", default=2048, show_default=True, type=click.IntRange(1))
@click.option("--num-classes", default=1000, show_default=True, type=click.IntRange(2))
@click.option("--batch-size", default=262_144, show_default=True, type=click.IntRange(1))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def head(
    rounds: int, num_examples: int, num_features: int, num_classes: int, batch_size: int, as_json: bool
) -> None:
    """A linear head beside the machine's memory and arithmetic, and which of them limits it.

    The features fill 8 GB unless there are fewer examples.
    """
    from sfumato.bench.head import bench_head

    result = bench_head(
        num_examples=num_examples,
        num_features=num_features,
        num_classes=num_classes,
        batch_size=min(batch_size, num_examples),
        rounds=rounds,
    )
    if as_json:
        echo_json(result)
        return
    for name, value in result.items():
        shown = value if isinstance(value, str) else f"{value:.3f}"
        click.echo(f"  {name:26s} {shown:>16s}")


@command.command()
@click.argument("data")
@click.option("--model", default="lenet", show_default=True, help="A model of the zoo.")
@click.option("--image-size", type=click.IntRange(4, 1024), help="As for train.")
@click.option("--views", default=1, show_default=True, type=click.IntRange(1), help="Rows of each image.")
@click.option("--batch-size", default=256, show_default=True, type=click.IntRange(1))
@click.option("--microbatch-size", default=64, show_default=True, type=click.IntRange(1))
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(1))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def data(
    data: str,
    model: str,
    image_size: int | None,
    views: int,
    batch_size: int,
    microbatch_size: int,
    rounds: int,
    as_json: bool,
) -> None:
    """Steps on DATA as it lies on the disk, beside the same steps on a copy of each batch in memory.

    DATA is decoded first, as `train` would; only what exceeds 256 MiB decoded is kept on the disk.
    """
    from sfumato.bench.data import bench_data
    from sfumato.cli.progress import make_progress

    progress = make_progress(quiet=as_json)
    try:
        result = bench_data(
            data,
            model=model,
            image_size=image_size,
            views=views,
            batch_size=batch_size,
            microbatch_size=microbatch_size,
            rounds=rounds,
            on_progress=lambda done, total: progress.computed("reading images", done, total),
        )
    finally:
        progress.close()
    if as_json:
        echo_json(result)
        return
    for name, value in result.items():
        shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        click.echo(f"  {name:33s} {shown:>12s}")


@command.command()
@click.option("--model", "model", default="wrn_16_4", show_default=True, help="A model of the zoo.")
@click.option("--processes", default=2, show_default=True, type=click.IntRange(2), help="One thread each.")
@click.option("--batch", default=1024, show_default=True, type=click.IntRange(1), help="Units in a step.")
@click.option("--views", default=1, show_default=True, type=click.IntRange(1), help="Rows of each unit.")
@click.option("--image-size", default=32, show_default=True, type=click.IntRange(8))
@click.option("--rows", default=64, show_default=True, type=click.IntRange(1), help="In memory at once.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def ranks(
    model: str,
    processes: int,
    batch: int,
    views: int,
    image_size: int,
    rows: int,
    rounds: int,
    as_json: bool,
) -> None:
    """Whole private steps on several processes beside the same steps on one, in turn.

    The machine must be idle, and have a core for each process.
    """
    from sfumato.bench.ranks import bench_ranks

    result = bench_ranks(
        model,
        processes=processes,
        batch_size=batch,
        views=views,
        image_size=image_size,
        max_rows=rows,
        rounds=rounds,
    )
    if as_json:
        echo_json(result)
        return
    click.echo(f"{model}, {batch:,} units x {views} views, {rounds} interleaved rounds")
    click.echo(f"  1 process      {result['seconds_alone']:8.2f} s per step")
    click.echo(f"  {processes} processes    {result['seconds_together']:8.2f} s per step")
    work = float(result["processor_seconds_alone"]) / float(result["processor_seconds_together"])
    click.echo(
        f"  {result['speedup']:.2f} times as fast ({result['least_speedup']:.2f} to "
        f"{result['most_speedup']:.2f}); exchange {1000 * float(result['exchange_seconds']):.0f} ms; "
        f"{work:.2f} by processor time"
    )


@command.command()
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("picture", type=click.Path(dir_okay=False, path_type=Path))
def plot(results: Path, picture: Path) -> None:
    """Draw the ratios in a file of JSON lines, per model and number of views."""
    from sfumato.bench.gradients import save_ratio_chart

    rows = [json.loads(line) for line in results.read_text().splitlines() if line.strip()]
    save_ratio_chart(rows, picture)
    click.echo(f"Wrote {picture}")


command.add_command(bench_devices.command)
command.add_command(bench_step.command)
