"""`staticlm conformance`: make the contract's kit, and hold a runner against it."""

from __future__ import annotations

import json
import shlex
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from staticlm.errors import Code, UsageError

if TYPE_CHECKING:
    from staticlm.conformance.run import Report


class Action(str, Enum):
    """What to do with the kit."""

    MAKE = "make"
    RUN = "run"


def run(
    action: Annotated[Action, typer.Argument(help="Make a kit, or run one.", show_default=False)],
    kit: Annotated[Path, typer.Argument(help="The kit's directory.", show_default=False)],
    runner: Annotated[
        str | None,
        typer.Option(help="Command that speaks the protocol.  [default: this package's runtime]"),
    ] = None,
    driver: Annotated[
        str, typer.Option(help="Driver of this package's runtime: auto, native or stock.")
    ] = "auto",
    case: Annotated[
        list[str] | None, typer.Option(help="Run this case only; may be repeated.")
    ] = None,
    exported: Annotated[
        bool, typer.Option("--exported", help="Also export tiny transformers models (make).")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON (run).")
    ] = False,
) -> None:
    """Make or run the conformance kit of hf_static version 1. Exits with 1 when a case fails."""
    if action is Action.MAKE:
        _refuse("make", runner=runner, case=case, json=as_json or None)
        _make(kit, exported)
        return
    _refuse("run", exported=exported or None)
    report = _run(kit, runner, driver, case or [])
    if as_json:
        typer.echo(json.dumps(_body(report)))
    else:
        _print(report)
    if not report.passed:
        raise typer.Exit(1)


def _refuse(action: str, **options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise UsageError(
                Code.USAGE,
                f"`conformance {action}` takes no --{name}",
                remedy="Leave the option out.",
            )


def _make(kit: Path, exported: bool) -> None:
    from rich.console import Console

    from staticlm.cli.quiet import quiet_libraries

    console = Console(stderr=True)
    with quiet_libraries(), console.status("import") as status:
        from staticlm.conformance.make import make_kit

        make_kit(kit, exported=exported, progress=status.update)
    typer.echo(str(kit))


def _run(kit: Path, runner: str | None, driver: str, cases: list[str]) -> Report:
    from rich.console import Console

    from staticlm.conformance.kit import read_kit
    from staticlm.conformance.run import default_command, run_kit

    opened = read_kit(kit)
    known = {case.name for case in opened.cases}
    for name in cases:
        if name not in known:
            raise UsageError(
                Code.USAGE,
                f"the kit has no case {name!r}",
                expected=f"one of {', '.join(sorted(known))}",
            )
    try:
        command = default_command(driver) if runner is None else shlex.split(runner)
    except ValueError as error:
        raise UsageError(Code.USAGE, "the runner's command", found=str(error)) from None
    if not command:
        raise UsageError(Code.USAGE, "the runner's command is empty", expected="a program")
    with Console(stderr=True).status("start the runner") as status:
        return run_kit(opened, command, only=cases, progress=status.update)


def _body(report: Report) -> dict[str, Any]:
    return {
        "runner": report.runner,
        "passed": report.passed,
        "clauses": {
            clause: {"passed": good, "cases": total}
            for clause, (good, total) in report.clauses().items()
        },
        "cases": [
            {"name": one.case, "clauses": one.clauses, "failure": one.failure, "note": one.note}
            for one in report.outcomes
        ],
    }


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    out = Console()
    table = Table("clause", "cases", "result")
    for clause, (good, total) in report.clauses().items():
        table.add_row(clause, f"{good} of {total}", "kept" if good == total else "BROKEN")
    out.print(table)
    for one in report.outcomes:
        if one.failure:
            out.print(f"{one.case} ({', '.join(one.clauses)}): {one.failure}", highlight=False)
        elif one.note:
            out.print(f"{one.case}: {one.note}", highlight=False)
    good = sum(not one.failure for one in report.outcomes)
    verdict = "passed" if report.passed else "FAILED"
    out.print(
        f"{verdict}: {good} of {len(report.outcomes)} cases, {report.runner}", highlight=False
    )
