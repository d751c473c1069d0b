"""`staticlm validate`: a program against the model it was exported from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer


def run(
    artifact: Annotated[
        Path, typer.Argument(help="An artifact directory or a program.", show_default=False)
    ],
    reference: Annotated[
        str,
        typer.Option(help="The source model: directory, GGUF file or hub id.", show_default=False),
    ],
    driver: Annotated[str, typer.Option(help="Driver: auto, native or stock.")] = "auto",
    greedy_tokens: Annotated[int, typer.Option(help="Tokens to generate greedily.")] = 32,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Relative logits difference that passes.  [default: by dtype]"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random prompt.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check that stepwise, chunked and eager logits agree. Exits with 1 when they do not."""
    from rich.console import Console
    from rich.table import Table

    from staticlm.cli.quiet import quiet_libraries
    from staticlm.validation import validate

    console = Console(stderr=True)
    with quiet_libraries(), console.status("load") as status:
        result = validate(
            artifact,
            reference,
            driver=driver,
            greedy_tokens=greedy_tokens,
            tolerance=tolerance,
            seed=seed,
            progress=status.update,
        )
    if as_json:
        body = dataclasses.asdict(result) | {
            "passed": result.passed,
            "worst": result.worst,
            "median": result.share(0.5),
        }
        typer.echo(json.dumps(body))
    else:
        table = Table("prompt", "tokens", "chunked", "stepwise", "between", "same argmax")
        for case in result.cases:
            table.add_row(
                case.name,
                str(case.length),
                f"{case.chunked:.1e}",
                "-" if case.stepwise is None else f"{case.stepwise:.1e}",
                "-" if case.between is None else f"{case.between:.1e}",
                f"{case.argmax:.0%}",
            )
        out = Console()
        out.print(table)
        verdict = "passed" if result.passed else "FAILED"
        out.print(f"{verdict}: {result.summary()}", highlight=False, soft_wrap=True)
    if not result.passed:
        raise typer.Exit(1)
