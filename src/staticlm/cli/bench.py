"""`staticlm bench`: how fast an artifact starts, reads and writes here, and what memory it takes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from staticlm.benchmark.machine import describe_machine, read_bandwidth
from staticlm.benchmark.plot import check_plotting, write_plot
from staticlm.benchmark.rounds import SCHEMA, run_rounds
from staticlm.benchmark.settings import WARMUP_STEPS, make_settings
from staticlm.runtime.drivers import get_driver
from staticlm.runtime.runner import load
from staticlm.runtime.speculation import verify_method


def run(
    artifact: Annotated[Path, typer.Argument(help="Artifact directory, or a .pte file.")],
    driver: Annotated[
        list[str] | None,
        typer.Option(help="auto, native or stock; repeat to compare.  [default: auto]"),
    ] = None,
    threads: Annotated[int, typer.Option(help="ExecuTorch's threads.")] = 2,
    repeats: Annotated[int, typer.Option(help="Rounds; each driver has a process in each.")] = 3,
    prompt: Annotated[
        list[int] | None,
        typer.Option(help="Prompt length; repeatable.  [default: 128, 512, near the capacity]"),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(help="Context of decode; repeatable.  [default: short, middle, full]"),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Decode steps per context.")] = None,
    speculate: Annotated[
        bool, typer.Option("--speculate", help="Compare prompt-lookup with plain decoding too.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture: speed and memory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Measure an artifact."""
    if plot is not None:
        check_plotting(plot)
    names = tuple(driver or ("auto",))
    for name in names:
        get_driver(name)
    # Loaded once here: every refusal comes before the first round, and the file is cached for all.
    with load(artifact, driver=names[0]) as runner:
        contract = runner.contract
        if speculate:
            verify_method(contract, "prompt-lookup", None)
    settings = make_settings(
        contract,
        prompts=prompt,
        contexts=context,
        steps=steps,
        repeats=repeats,
        threads=threads,
        drivers=names,
        speculate=speculate,
    )
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "artifact": str(artifact),
        "capacity": contract.max_context_len,
        "machine": describe_machine(),
        "settings": {**asdict(settings), "warmup_steps": WARMUP_STEPS},
        "drivers": run_rounds(artifact, settings, _tell),
    }
    report["machine"]["read_gigabytes_per_second"] = read_bandwidth(threads)
    if plot is not None:
        write_plot(report, plot)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report)


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


def print_report(report: dict[str, Any]) -> None:
    """The report as lines of text: medians, and the range in brackets."""
    asked, machine = report["settings"], report["machine"]
    print(f"{report['artifact']}, context {report['capacity']}")
    print(
        f"{machine['processor']}, {machine['cores']} cores, {asked['threads']} threads; "
        f"reads {machine['read_gigabytes_per_second']:.1f} GB/s; load {machine['load_average']:.1f}"
    )
    print(
        f"medians of {asked['repeats']} interleaved rounds, each in a new process with the file in "
        f"the page cache;\nwarm-up: one prompt, then {asked['warmup_steps']} steps before the "
        f"{asked['steps']} timed ones of a context"
    )
    for driver, found in report["drivers"].items():
        print(f"\ndriver {driver}: {found['driver']}")
        for label, figure, unit, scale in _rows(found):
            print(f"  {label:<42} {_figure(figure, scale)} {unit}")


def _rows(found: dict[str, Any]) -> list[tuple[str, Any, str, float]]:
    start, memory = found["start"], found["memory"]
    rows = [
        ("load (program, methods, tokenizer)", start["load"], "s", 1.0),
        ("process start to the first token's call", start["first_call"], "s", 1.0),
        ("process start to the first token", start["first_token"], "s", 1.0),
    ]
    for length, one in found["prefill"].items():
        rows.append((f"prefill, {length} tokens", one["tokens_per_second"], "tok/s", 1.0))
    for context, one in found["decode"].items():
        rows.append((f"decode at context {context}", one["tokens_per_second"], "tok/s", 1.0))
    for context, one in found["decode"].items():
        outside = f"outside execute, a step at context {context}"
        rows.append((outside, one["outside_microseconds"], "us", 1.0))
        rows.append(("  share of the step", one["outside_share"], "%", 100.0))
    size = memory["program"]["median"] + memory["caches"]["median"]
    rows += [
        ("program file", memory["program"], "MB", 1e-6),
        ("caches", memory["caches"], "MB", 1e-6),
        ("resident at the first token's call", memory["first_call"], "MB", 1e-6),
        ("peak resident", memory["peak"], "MB", 1e-6),
        ("  against file and caches", memory["peak"], "x", 1 / size),
    ]
    guessed = found.get("speculation")
    if guessed is not None:
        rows += [
            ("copy task, plain decoding", guessed["plain_tokens_per_second"], "tok/s", 1.0),
            ("copy task, prompt-lookup", guessed["tokens_per_second"], "tok/s", 1.0),
            ("  ratio", guessed["ratio"], "x", 1.0),
            ("  guesses accepted", guessed["accepted"], f"of {_plain(guessed['drafted'])}", 1.0),
            ("  identical tokens", guessed["identical"], "", 1.0),
        ]
    return rows


def _figure(figure: Any, scale: float) -> str:
    if not isinstance(figure, dict):
        return f"{figure!s:>10}"
    middle, low, high = (_digits(figure[part] * scale) for part in ("median", "low", "high"))
    return f"{middle:>10} ({low} to {high})"


def _plain(figure: dict[str, Any]) -> str:
    return _digits(figure["median"])


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
