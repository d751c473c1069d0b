"""The command line: a table of commands, each in a module that is imported when it is run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from io import TextIOWrapper
from typing import Any

from staticlm.errors import StaticLMError

COMMANDS = {
    "export": "Export a Hugging Face model to an artifact directory.",
    "inspect": "Show what a .pte program promises and holds.",
    "generate": "Generate text with an artifact.",
    "validate": "Compare an artifact with the model it came from.",
    "eval": "Measure how well an artifact predicts a text.",
    "bench": "Measure an artifact.",
    "conformance": "Make or run the conformance kit of the I/O contract.",
}
"""Command name -> one line of help; the command is `run` in `staticlm.cli.<name>`."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as of a program that the signal ended."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 done, 1 a check failed, 2 refused or misused, 130 interrupted.

    Args:
        arguments: Command line without the program's name; None takes the process's own.
    """
    line = sys.argv[1:] if arguments is None else list(arguments)
    for stream in (sys.stdout, sys.stderr):
        # A terminal or pipe that cannot show a character gets its number, not a traceback.
        if isinstance(stream, TextIOWrapper) and stream.errors != "surrogateescape":
            stream.reconfigure(errors="backslashreplace")
    try:
        app(next((word for word in line if not word.startswith("-")), None))(
            args=line, prog_name="staticlm"
        )
    except StaticLMError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader went away (`| head`): there is nobody to tell, and nothing to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def app(wanted: str | None) -> Any:
    """The command group, with only the wanted command's module imported.

    Running an artifact must not import what exporting one needs, and a list of commands neither.
    """
    import typer

    group = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
    group.callback()(_about)
    for name, text in COMMANDS.items():
        if find_spec(f"{__name__}.{name}") is None:
            continue
        run = import_module(f"{__name__}.{name}").run if name == wanted else _not_wanted
        group.command(name, help=text)(run)
    return group


def _about() -> None:
    """Hugging Face models as fixed-shape ExecuTorch programs."""


def _not_wanted() -> None:
    """Stands for a command that is only listed."""
