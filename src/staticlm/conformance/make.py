"""Make a kit: export and lower toys, compute what they must give, break them one clause at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from staticlm.build import producers
from staticlm.conformance.cases import CASES, TOYS, Case
from staticlm.conformance.kit import as_bytes, step_out, write_description
from staticlm.conformance.malformed import BASE, FILES, VARIANTS
from staticlm.conformance.numbers import TOLERANCE
from staticlm.conformance.oracle import Rows, Text, replay, toy_oracle
from staticlm.conformance.rewrite import Template
from staticlm.conformance.toy import Toy, toy_contract, toy_programs, weights
from staticlm.contract import LABEL, VERSION, Contract
from staticlm.errors import Code, UsageError
from staticlm.lowering.pipeline import lower_to_file
from staticlm.runtime.plan import plan

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Made:
    """A program of the kit, and what its texts give."""

    about: str
    contract: Contract
    oracle: Callable[[Sequence[int]], Text]
    file: str

    @property
    def tolerance(self) -> float:
        """By the least precise dtype of caches and logits."""
        dtypes = {cache.spec.dtype for cache in self.contract.caches}
        dtypes |= {method.logits.spec.dtype for method in self.contract.methods}
        return max(TOLERANCE[dtype] for dtype in dtypes)


def make_kit(
    directory: str | Path,
    *,
    exported: bool = False,
    progress: Progress = lambda text: None,
) -> Path:
    """Write a kit.

    Args:
        directory: A path that is free; written beside itself and renamed into place.
        exported: Also export tiny transformers models with the package's own exporter, and hold
            their programs to the same clauses; needs the `export` extra and takes a minute.
        progress: Told the name of every program and stage.

    Returns:
        The directory.

    Raises:
        UsageError: The path is taken.
        StaticLMError: A program cannot be made.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(
            Code.OUTPUT_EXISTS,
            f"{directory} exists",
            expected="a path that is free",
            remedy="Choose another path, or remove it first.",
        )
    with _staged(directory) as root:
        for name in ("programs", "expected", "malformed"):
            (root / name).mkdir()
        made = {name: _make_toy(root, name, *TOYS[name], progress) for name in TOYS}
        cases = list(CASES)
        if exported:
            from staticlm.conformance.exported import EXPORTED_CASES, make_exported

            made |= make_exported(root, progress)
            cases += EXPORTED_CASES
        programs: dict[str, Any] = {
            name: {"file": one.file, "about": one.about} for name, one in made.items()
        }
        written = []
        for case in cases:
            progress(f"expected values of {case.name}")
            written.append(_write_case(root, case, made[case.program]))
        written += _write_malformed(root, root / made[BASE].file, programs, progress)
        write_description(
            root,
            {
                "contract": {"label": LABEL, "version": VERSION},
                "producers": producers(),
                "programs": programs,
                "cases": written,
            },
        )
    return directory


def _make_toy(root: Path, name: str, about: str, toy: Toy, progress: Progress) -> Made:
    progress(f"program {name}")
    contract = toy_contract(toy, producers())
    file = f"programs/{name}.pte"
    lower_to_file(toy_programs(toy, contract), contract, root / file, partitioners={})
    parts = weights(toy)
    return Made(about, contract, lambda tokens: toy_oracle(parts, toy.windows, tokens), file)


@dataclass
class _Progress:
    """What a session of a case has taken so far."""

    tokens: list[int] = field(default_factory=list)
    calls: list[tuple[str, int, int]] = field(default_factory=list)


def _write_case(root: Path, case: Case, made: Made) -> dict[str, Any]:
    """Expected values of every step, by the plan with the fewest calls and the least padding."""
    values: dict[str, npt.NDArray[Any]] = {}
    sessions: dict[int, _Progress] = {}
    for index, step in enumerate(case.steps):
        if step.do in ("open", "reset"):
            sessions[step.session] = _Progress()
        if step.do == "close" or (step.codes and not step.optional):
            continue
        state = sessions[step.session]
        if step.do == "take":
            planned = plan(made.contract, len(state.tokens), len(step.tokens))
            state.calls += [(call.method, call.start, call.valid) for call in planned.calls]
            state.tokens += step.tokens
        text = made.oracle(state.tokens or [0])
        rows = cache_rows(made.contract, text)
        if step.do == "take":
            wanted = len(step.tokens) if step.rows == "all" else 1
            values[f"{index}.logits"] = np.ascontiguousarray(text.logits[-wanted:])
        for number, data in enumerate(replay(made.contract, rows, state.calls)):
            values[f"{index}.cache.{number}"] = as_bytes(data)
            if step.do == "take":
                values[f"{index}.rows.{number}"] = np.ascontiguousarray(rows[number])
    file = f"expected/{case.name}.safetensors"
    save_file(values, root / file)
    return {
        "name": case.name,
        "clauses": list(case.clauses),
        "program": case.program,
        "expected": file,
        "tolerance": made.tolerance,
        "steps": [step_out(step) for step in case.steps],
    }


def cache_rows(contract: Contract, text: Text) -> list[Rows]:
    """`[tokens, heads, width]` of every cache, in the contract's order."""
    return [text.rows[cache.layer, cache.part] for cache in contract.caches]


def _write_malformed(
    root: Path, base: Path, programs: dict[str, Any], progress: Progress
) -> list[dict[str, Any]]:
    template = Template(base)
    cases: list[dict[str, Any]] = []

    def add(name: str, clause: str, code: Code) -> Path:
        progress(f"malformed {name}")
        file = f"malformed/{name}.pte"
        programs[name] = {"file": file, "about": f"breaks clause {clause}"}
        cases.append({"name": name, "clauses": [clause], "program": name, "code": code.value})
        return root / file

    for variant in VARIANTS:
        template.write(add(variant.name, variant.clause, variant.code), variant.edit)
    whole = base.read_bytes()
    for bad in FILES:
        path = add(bad.name, bad.clause, bad.code)
        if bad.keep is not None:
            path.write_bytes(whole[: bad.keep])
        elif bad.content is not None:
            path.write_bytes(bad.content)
    return cases


@contextmanager
def _staged(directory: Path) -> Iterator[Path]:
    """A directory beside the wanted one that becomes it when all went well."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = directory.parent / f".{directory.name}.partial-{os.getpid()}"
    staging.mkdir()
    try:
        yield staging
        os.replace(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
