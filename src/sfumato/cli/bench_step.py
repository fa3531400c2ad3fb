"""sfumato bench step: a whole private step, part by part, beside a plain one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from sfumato.cli import echo_json


@click.command("step")
@click.argument("data", required=False)
@click.option("--model", default="wrn_16_4", show_default=True, help="A model of the zoo.")
@click.option("--image-size", type=click.IntRange(8, 1024), help="As for train; generated images: 32.")
@click.option("--views", default=1, show_default=True, type=click.IntRange(1), help="Rows of each image.")
@click.option("--batch-size", default=256, show_default=True, type=click.IntRange(1), help="Expected.")
@click.option("--microbatch-size", default=64, show_default=True, type=click.IntRange(1), help="Rows.")
@click.option("--precision", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16"]))
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1, 100))
@click.option("--append", type=click.Path(path_type=Path), help="Add the result to this file of JSON lines.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    data: str | None,
    model: str,
    image_size: int | None,
    views: int,
    batch_size: int,
    microbatch_size: int,
    precision: str,
    rounds: int,
    append: Path | None,
    as_json: bool,
) -> None:
    """Whole private steps beside plain PyTorch steps with the same views, in turn.

    Sampling, reading, augmentation, gradient, noise, ledger, optimizer and average are those of `train`; the
    ledger is one in a temporary folder, so that nothing is spent. Without DATA images are generated.
    """
    from sfumato.bench.step import bench_step
    from sfumato.cli.progress import make_progress

    progress = make_progress(quiet=as_json)
    try:
        result = bench_step(
            model,
            data=data,
            image_size=image_size,
            batch_size=batch_size,
            views=views,
            microbatch_size=microbatch_size,
            bfloat16=precision == "bfloat16",
            rounds=rounds,
            on_progress=lambda done, total: progress.computed("reading images", done, total),
        )
    finally:
        progress.close()
    if append:
        append.parent.mkdir(parents=True, exist_ok=True)
        with append.open("a") as file:
            file.write(json.dumps(result) + "\n")
    if as_json:
        echo_json(result)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    click.echo(
        f"{result['model']}, batches of {result['batch_size']} x {result['views']} views out of "
        f"{result['num_examples']:,} images, {result['precision']}, {result['rounds']} interleaved rounds"
    )
    whole, share = result["milliseconds_per_image"], result["share_of_peak"]
    click.echo("  processor time per image, and share of the private step")
    for name, milliseconds in result["parts"].items():
        click.echo(f"    {name:14s} {milliseconds:9.3f} ms   {milliseconds / whole['private']:6.1%}")
    for name in ("private", "plain"):
        click.echo(
            f"  {name:16s} {whole[name]:9.3f} ms   {share[name]:4.0%} of the machine's matrix products"
        )
    click.echo(
        f"  private / plain  {result['ratio']:.3f} ({result['least_ratio']:.3f} to "
        f"{result['most_ratio']:.3f}); by the clock {result['ratio_by_the_clock']:.3f}"
    )
    click.echo(f"  Decoding, once before all steps: {result['decoding_milliseconds']:.3f} ms for each image.")
