"""Export tiny models of every family, validate them on the runtime, and write docs/models.md.

Run it from the root of the repository: `python -m benchmarks.model_table [--check] [FAMILY ...]`. Rows of
families that are not named keep what an earlier run found; `--check` writes nothing and fails where a row
is not what it finds.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support import families, models
from transformers import PreTrainedModel

from staticlm.build import export_model
from staticlm.errors import StaticLMError
from staticlm.export.options import ExportOptions
from staticlm.validation import validate

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
OPTIONS = ExportOptions(context_length=48, prefill_lengths=(8,))
EXPORTED = {**models.FAMILIES, **families.EXTRA}
PENDING = "compared in eager mode only"

HEAD = """# Models

Families of transformers 5.24, as tiny seeded models (two to four layers, capacity 48, prefill 8) in
float32, lowered to XNNPACK. `python -m benchmarks.model_table` makes this page, `--check` compares
it; the test suite does so for a sample that changes with the sources.

- *lengths*: prompt lengths at which the program's logits, chunked and token by token, were compared with
  the source's own forward pass on the ExecuTorch runtime. Full, short and padded chunks, window edges and
  the end of the capacity are among them. Every family is also compared in eager mode, on every row.
- *delegates, operators outside*: in the decode method. `staticlm export --explain` names them.

| family | class | result | lengths | delegates | operators outside |
|---|---|---|---|---|---|
"""

REFUSED = """
## Refused

| family | why |
|---|---|
"""

NOTES = """
## RoPE

`default`, `linear`, `llama3`, `yarn` and `proportional` are exact at every length. `longrope` and
`dynamic` change their frequencies with the length of the text, so that keys in a cache would go stale:
they are exported where the context length is at most the original length, and refused beyond.

## What is particular

- Layers that share keys and values (Gemma 3n, Gemma 4) have one cache per owning layer.
- Attention chunks (Llama 4) are masks over a cache of the whole capacity.
- Experts are computed as batched matrix products of the chosen experts (`batched_mm`).
- Sliding layers keep `window - 1 + chunk` slots, at most the capacity. transformers' own static sliding
  cache stops its counter at the window; positions here stay absolute, so counters cannot be copied.
"""


@dataclass(frozen=True)
class Row:
    """What is known of one family."""

    family: str
    architecture: str
    result: str = PENDING
    lengths: str = "-"
    delegates: str = "-"
    outside: str = "-"

    def __str__(self) -> str:
        return (
            f"| {self.family} | {self.architecture} | {self.result} | {self.lengths} "
            f"| {self.delegates} | {self.outside} |"
        )


def measure(family: str, model: PreTrainedModel, directory: Path) -> Row:
    """Export a model, validate the program, and describe it."""
    made = export_model(model, directory, OPTIONS)
    return describe(family, model, directory, made.facts.methods["decode"])


def describe(family: str, model: PreTrainedModel, directory: Path, decode: object) -> Row:
    """Validate an artifact and describe it; `decode` is the facts of its decode method."""
    found = validate(directory, model)
    if not found.passed:
        raise SystemExit(f"{family}: the program differs from its source by {found.worst:.1e}")
    return Row(
        family,
        type(model).__name__,
        "exports, validated",
        " ".join(str(case.length) for case in found.cases),
        str(len(decode.delegates)),  # type: ignore[attr-defined]
        str(sum(decode.operators.values())),  # type: ignore[attr-defined]
    )


def refusal(family: str) -> str:
    """What the export says of a family that it refuses."""
    from staticlm.export.traits import inspect_model

    build, _ = families.REFUSED[family]
    try:
        inspect_model(build(), OPTIONS.context_length)
    except StaticLMError as error:
        return f"{error.what}: {error.found}"
    raise SystemExit(f"{family} is not refused")


def read_rows(page: str) -> dict[str, Row]:
    """The rows of the first table of a page."""
    rows = {}
    for line in page.partition("## Refused")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[0] in EXPORTED:
            rows[cells[0]] = Row(*cells)
    return rows


def write_page(rows: dict[str, Row]) -> str:
    """The whole page."""
    refused = "\n".join(f"| {name} | {refusal(name)} |" for name in families.REFUSED)
    body = "\n".join(str(rows[name]) for name in EXPORTED)
    return f"{HEAD}{body}\n{REFUSED}{refused}\n{NOTES}"


def main() -> None:
    """Measure the named families, or all, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    wanted = arguments.families or list(EXPORTED)
    unknown = [name for name in wanted if name not in EXPORTED]
    if unknown:
        parser.error(f"no such family: {', '.join(unknown)}; known: {', '.join(EXPORTED)}")
    known = read_rows(PAGE.read_text(encoding="utf-8")) if PAGE.is_file() else {}
    rows = {
        name: known.get(name) or Row(name, type(build()).__name__)
        for name, build in EXPORTED.items()
    }
    for name in wanted:
        with tempfile.TemporaryDirectory() as directory:
            found = measure(name, EXPORTED[name](), Path(directory) / "artifact")
        print(found, flush=True)
        if arguments.check:
            if found != rows[name]:
                raise SystemExit(f"{PAGE} says: {rows[name]}")
            continue
        rows[name] = found
        PAGE.write_text(write_page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
