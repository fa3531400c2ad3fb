"""The command line: a thin layer over the Python API.

Commands are imported only when they run, so that ``sfumato --help`` does not wait for torch.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

import click

from sfumato.cli.ranks import rank_of_process, refuse_ranks
from sfumato.errors import SfumatoError

# name -> (module, help). The help stands here so that listing the commands imports none of them.
COMMANDS = {
    "demo": ("sfumato.cli.demo", "Train privately on data that ships inside the package."),
    "advise": ("sfumato.cli.advise", "Compare the ways to train on your images; spends nothing."),
    "train": ("sfumato.cli.train", "Train a private model on a folder of images or a known data set."),
    "evaluate": ("sfumato.cli.evaluate", "Accuracy of a finished run, overall and per class."),
    "adapt": ("sfumato.cli.adapt", "Set the operating point for another place, by unlabelled images."),
    "predict": ("sfumato.cli.predict", "Classify images with a released model."),
    "export": ("sfumato.cli.export", "Write a released model as ONNX or for torch.export."),
    "serve": ("sfumato.cli.serve", "Try a released model on images, in a page on this machine only."),
    "report": ("sfumato.cli.report", "Write report.html for one or several runs."),
    "budget": ("sfumato.cli.budget", "Solve for epsilon, delta, noise, steps or batch size."),
    "doctor": ("sfumato.cli.doctor", "Find what would void the guarantee, before any budget is spent."),
    "audit": ("sfumato.cli.audit", "Attack the guarantee and report what was found."),
    "ledger": ("sfumato.cli.ledger", "Show or cap what each data set has spent."),
    "data": ("sfumato.cli.data", "List, get, import or generate data sets."),
    "models": ("sfumato.cli.models", "List the model zoo, or show one model layer by layer."),
    "recipes": ("sfumato.cli.recipes", "List, show, copy or validate recipes; print their schema."),
    "tune": ("sfumato.cli.tune", "Search settings, with the cost of the search counted in."),
    "reproduce": ("sfumato.cli.reproduce", "Run a table or figure of a paper again, with paired seeds."),
    "study": ("sfumato.cli.study", "Look into networks and runs: data and figures for a paper."),
    "errors": ("sfumato.cli.errors", "Explain the codes of errors."),
    "bench": ("sfumato.cli.bench", "Measure the gradient engine against plain training."),
    "completion": ("sfumato.cli.completion", "Print what makes a shell complete commands and options."),
}


OVER_RANKS = ("train",)  # commands that several processes of torchrun can do together
SAID_BY_FIRST = ("run-stopped", "rank-failed")  # errors that rank 0 explains, so that the others are silent


class LazyGroup(click.Group):
    """A group whose commands live in modules of their own, imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        if name not in OVER_RANKS:
            refuse_ranks(f"sfumato {name}")
        return importlib.import_module(COMMANDS[name][0]).command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS:
            from sfumato.errors import did_you_mean

            hint = did_you_mean(args[0], list(COMMANDS))
            raise click.UsageError(f"there is no command {args[0]!r}. {hint}".rstrip(), ctx=ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(package_name="sfumato")
def cli() -> None:
    """Train image classifiers under differential privacy."""


def split_names(text: str | None) -> list[str] | None:
    """``a,b`` as a list."""
    return None if text is None else [name.strip() for name in text.split(",")]


class Window(click.ParamType):
    """``CENTER,WIDTH``: what a DICOM window is made of."""

    name = "CENTER,WIDTH"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        try:
            center, width = (float(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not CENTER,WIDTH, such as 40,400 or --window=-600,1500.", param, ctx)
        return center, width


def echo_json(value: object) -> None:
    """One JSON document on standard output: what ``--json`` prints."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def main(argv: list[str] | None = None) -> None:
    """Run the command line. Exit codes: 0 ok, 1 failed, 2 usage, 130 interrupted."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        cli.main(args=arguments, prog_name="sfumato", standalone_mode=False)
    except SfumatoError as error:
        if not rank_of_process() or error.code not in SAID_BY_FIRST:
            if "--json" in arguments:
                echo_json(error.as_dict())
            click.echo(str(error), err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        if not rank_of_process():
            click.echo("Interrupted.", err=True)
        sys.exit(130)
    except BrokenPipeError:
        # The reader went away (sfumato ... | head); keep Python's shutdown from complaining about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
