"""The options of ``sfumato train`` that send metrics to TensorBoard and MLflow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from sfumato.run.metric_logs import MirroredMetrics
    from sfumato.run.monitor import Observer

_META = "sfumato.log"


def _keep(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    ctx.meta.setdefault(_META, {})[parameter.name] = value
    return value


def log_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options; ``mirrored`` reads them."""
    function = click.option(
        "--log-sensitive",
        is_flag=True,
        expose_value=False,
        callback=_keep,
        help="Send losses and norms too, which NO guarantee covers.",
    )(function)
    return click.option(
        "--log",
        metavar="NAMES",
        expose_value=False,
        callback=_keep,
        help="Send public metrics to tensorboard, mlflow, or both with a comma.",
    )(function)


def mirrored(observer: Observer, folder: Path) -> MirroredMetrics | None:
    """``observer`` with the logs that were asked for behind it; None if none were."""
    context = click.get_current_context(silent=True)
    given = {} if context is None else context.meta.get(_META, {})
    names, sensitive = given.get("log"), bool(given.get("log_sensitive"))
    if not names:
        if sensitive:
            raise ConfigError(
                "unknown-log",
                "--log-sensitive is given, but no --log.",
                fix="Add --log tensorboard or mlflow.",
            )
        return None
    from sfumato.release.run_folder import RunFolder
    from sfumato.run.metric_logs import MirroredMetrics, open_logs

    if sensitive:
        click.secho(
            "SENSITIVE: training losses, norms and private scores are sent to the logs. No guarantee covers "
            "them: keep these logs as you keep the images.",
            fg="red",
            bold=True,
            err=True,
        )
    run = RunFolder(folder)
    return MirroredMetrics(observer, run, open_logs(names.split(","), run), sensitive=sensitive)
