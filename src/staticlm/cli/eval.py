"""`staticlm eval`: perplexity of an artifact, beside its source's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from staticlm.errors import Code, UsageError


def run(
    artifact: Annotated[
        Path, typer.Argument(help="An artifact directory or a program.", show_default=False)
    ],
    reference: Annotated[
        str | None,
        typer.Option(help="The source model, to compare with.", show_default=False),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text file.  [default: a text of this package]")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of the text to take.")] = None,
    driver: Annotated[str, typer.Option(help="Driver: auto, native or stock.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure perplexity, and the loss against the source model."""
    from rich.console import Console

    from staticlm.cli.quiet import quiet_libraries
    from staticlm.evaluation import evaluate

    console = Console(stderr=True)
    with quiet_libraries(), console.status("load") as status:
        result = evaluate(
            artifact,
            reference,
            text=None if text is None else _read(text),
            max_tokens=max_tokens,
            driver=driver,
            progress=status.update,
        )
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result) | {"loss": result.loss}))
        return
    typer.echo(f"perplexity {result.perplexity:.4f} over {result.tokens} tokens")
    if result.reference is not None:
        typer.echo(
            f"source {result.reference:.4f}: {result.loss:+.2%}, same most likely token "
            f"{result.argmax:.1%}, divergence {result.divergence:.2e} nats"
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            Code.USAGE, f"{path} cannot be read", found=str(error)[:200], expected="a UTF-8 text"
        ) from None
