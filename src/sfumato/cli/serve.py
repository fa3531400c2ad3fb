"""``sfumato serve``: a page on this machine to try a model on an image."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("serve")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8765,
    show_default=True,
    help="Where it listens; 0: any free one.",
)
def command(run: Path, port: int) -> None:
    """Try a finished RUN or a release folder on images, in a page that only this machine can open."""
    from sfumato.release.card import headline
    from sfumato.release.release import load
    from sfumato.serve.app import HOST, bind, create_app, run_server

    released = load(run)
    app = create_app(released)
    with bind(port) as listening:
        click.echo(f"http://{HOST}:{listening.getsockname()[1]}/   (this machine only; Ctrl-C ends it)")
        if not released.privacy["releasable"]:
            click.secho(headline(released.privacy), fg="red", err=True)
        run_server(app, listening)
