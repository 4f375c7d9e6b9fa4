"""The command line: ``evenep run`` and ``evenep inspect``."""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import EvenEPError
from .inspect import inspect
from .run import run

app = typer.Typer(
    name="evenep",
    help="Balanced expert parallelism: every rank does the same work, whatever the router chose.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command()(run)
app.command()(inspect)

EXIT_ERROR = 2


def main() -> None:
    """Entry point: an error meant for people prints as its message and exits with 2."""
    try:
        app()
    except EvenEPError as error:
        text = f"[red]{type(error).__name__}[/red]: {escape(str(error))}"
        Console(stderr=True).print(text, highlight=False)
        sys.exit(EXIT_ERROR)
