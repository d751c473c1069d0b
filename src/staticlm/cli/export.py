"""`staticlm export`: a model to an artifact directory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from staticlm.errors import Code, UsageError

if TYPE_CHECKING:
    from staticlm.export.dryrun import DryRun


def run(
    model: Annotated[
        str, typer.Argument(help="A model directory, a hub id, or a GGUF file.", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The artifact directory to make.", show_default=False),
    ] = None,
    context_length: Annotated[
        int, typer.Option(help="Capacity of the KV caches in tokens.")
    ] = 1024,
    prefill_length: Annotated[
        list[int] | None,
        typer.Option(help="Tokens per prefill call; repeat for several methods.  [default: 128]"),
    ] = None,
    prefix: Annotated[
        list[int] | None,
        typer.Option(
            help="Add methods that read only so many leading cache slots; repeat for several. "
            "0 adds prefill for the beginning of a text; -1 alone adds none.  "
            "[default: 0 and 256, 1024, ... up to a quarter of a context length from 1024 on]"
        ),
    ] = None,
    verify_length: Annotated[
        int | None,
        typer.Option(help="Add a method with all rows of logits, for speculative decoding."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Computation dtype: float32, float16 or bfloat16.")
    ] = "float32",
    cache_dtype: Annotated[
        str | None, typer.Option(help="Dtype of the caches.  [default: the computation dtype]")
    ] = None,
    attention: Annotated[
        str, typer.Option(help="Attention mode: auto, split, concat or fused.")
    ] = "auto",
    logits: Annotated[
        str, typer.Option(help="Rows of logits that prefill returns: last or all.")
    ] = "last",
    quantize: Annotated[
        str | None,
        typer.Option(help="Weights of linear layers: 8da4w or int8, both with int8 activations."),
    ] = None,
    quantize_embedding: Annotated[
        int | None, typer.Option(help="Bits of the embedding table: 8 or 4.")
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            help="One backend, one per method: prefill=NAME,decode=NAME, or auto: measured."
        ),
    ] = "xnnpack",
    backend_option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for the backend; repeat for several.")
    ] = None,
    backend_options_file: Annotated[
        Path | None, typer.Option(help="A TOML file of backend options.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be made, without reading weights.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print what stays outside the delegates, and why.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing artifact.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print every pass that ran while lowering.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Export a Hugging Face causal language model to a fixed-shape ExecuTorch program."""
    from rich.console import Console

    from staticlm.contract import LogitsRows
    from staticlm.export.options import ExportOptions

    if logits not in ("last", "all"):
        raise UsageError(
            Code.EXPORT_OPTION_INVALID, "--logits", found=logits, expected="last or all"
        )
    options = ExportOptions(
        context_length=context_length,
        prefill_lengths=tuple(prefill_length or (min(128, context_length),)),
        dtype=dtype,
        cache_dtype=cache_dtype,
        attention=attention,
        logits=LogitsRows(logits),
        verify_length=verify_length,
        quantize=quantize,
        quantize_embedding=quantize_embedding,
        prefixes=None if prefix is None else () if prefix == [-1] else tuple(prefix),
    )
    from staticlm.cli.quiet import quiet_libraries

    # Some libraries talk while they are imported.
    with quiet_libraries():
        from staticlm.build import export_model
        from staticlm.lowering.explain import outside_delegates
        from staticlm.lowering.options import parse_assignments, read_option_file

    tables = read_option_file(backend_options_file) if backend_options_file else {}
    chosen: dict[str, object] = {
        f"{owner}.{name}": value for owner, table in tables.items() for name, value in table.items()
    }
    chosen.update(parse_assignments(backend_option or []))
    console = Console(stderr=True)
    if dry_run:
        with quiet_libraries():
            from staticlm.export.dryrun import plan_export

            planned = plan_export(model, options, backend=backend, backend_options=chosen)
        _print_plan(planned, as_json)
        return
    if output is None:
        raise UsageError(
            Code.USAGE,
            "there is no output directory",
            expected="-o DIRECTORY, or --dry-run",
        )
    with quiet_libraries(), console.status("start") as status:
        report = export_model(
            model,
            output,
            options,
            backend=backend,
            backend_options=chosen,
            overwrite=force,
            progress=lambda stage: _tell(console, status, stage),
        )
    if verbose:
        for record in report.records:
            console.print(f"pass  {record}", highlight=False)
    if report.choice is not None:
        for line in report.choice.lines():
            console.print(f"auto  {line}", highlight=False)
    outside = outside_delegates(report.facts) if explain else ()
    summary = {
        "path": str(report.path),
        "program_bytes": report.facts.nbytes,
        "cache_bytes": report.contract.cache_bytes,
        "methods": {m.name: m.step for m in report.contract.methods},
        "delegates": {name: len(m.delegates) for name, m in report.facts.methods.items()},
        "shared_bytes": report.shared_bytes,
        "seconds": {stage: round(spent, 2) for stage, spent in report.seconds.items()},
    }
    if report.choice is not None:
        summary["backend_choice"] = dataclasses.asdict(report.choice)
    if explain:
        summary["outside"] = [dataclasses.asdict(one) for one in outside]
    if as_json:
        typer.echo(json.dumps(summary))
        return
    for one in outside:
        console.print(
            f"outside  {one.method}: {one.count} x {one.operator}  ({one.reason})", highlight=False
        )
    spent = sum(report.seconds.values())
    console.print(
        f"wrote {report.path}: program {report.facts.nbytes / 1e6:.1f} MB, "
        f"caches {report.contract.cache_bytes / 1e6:.1f} MB, {spent:.0f} s",
        highlight=False,
    )


def _print_plan(planned: DryRun, as_json: bool) -> None:
    contract = planned.contract
    summary = {
        "architecture": planned.traits.architecture,
        "layers": planned.layer_lines(),
        "rope_types": list(planned.traits.rope_types),
        "methods": {
            m.name: {"step": m.step, "attention": m.attention, "backend": m.backend}
            for m in contract.methods
        },
        "parameters": planned.parameters,
        "cache_bytes": contract.cache_bytes,
        "program_bytes": planned.program_bytes,
        "export_memory_at_least": planned.export_bytes,
        "run_memory": planned.run_bytes,
        "kept_twice": list(planned.kept_twice),
    }
    if as_json:
        typer.echo(json.dumps(summary))
        return
    typer.echo(f"{planned.traits.architecture}: {planned.parameters:,} parameters")
    for line in planned.layer_lines():
        typer.echo(f"  {line}")
    if planned.traits.rope_types:
        typer.echo(f"RoPE: {', '.join(planned.traits.rope_types)}")
    for method in contract.methods:
        reads = "" if method.max_start is None else f", reads {method.max_start} slots"
        typer.echo(
            f"method {method.name}: {method.step} tokens per call{reads}, {method.attention} "
            f"attention, backend {method.backend}"
        )
    typer.echo(f"caches: {contract.cache_bytes:,} bytes")
    typer.echo(f"program: about {planned.program_bytes:,} bytes of weights")
    for name in planned.kept_twice:
        typer.echo(f"  {name} is stored in two forms")
    typer.echo(f"memory: at least {planned.export_bytes:,} bytes to export", nl=False)
    typer.echo(f", about {planned.run_bytes:,} to run")


def _tell(console: object, status: object, stage: str) -> None:
    update = getattr(status, "update", None)
    if getattr(console, "is_terminal", False) and update is not None:
        update(stage)
    else:
        getattr(console, "print", print)(stage)
