"""All peers on the same weights: interleaved processes, medians, ratios, limits of the machine.

    python benchmarks/peers/run.py [-o artifacts/peers] [--rounds 3] [--threads 2] [--write]

Forms come from prepare.py; what is not there is left out and named. `--write` puts the table into
docs/performance.md between its markers, otherwise it is printed. Every figure is a median over
rounds; in a round every engine has one process, the engines in turn, so that what the machine does
meanwhile meets all of them. Ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PEERS = Path(os.environ.get("VENV_PEERS", ROOT / ".venv-peers")) / "bin" / "python"
DOCUMENT = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
TIMEOUT = 240
PROMPTS, CONTEXT = (128, 512), 128


@dataclass(frozen=True)
class Entry:
    """One engine with one form of the model."""

    name: str
    kind: str
    engine: str
    form: str
    own: bool = False
    """Whether it runs in the environment of the peers."""
    options: dict[str, Any] = field(default_factory=dict, hash=False)


ENTRIES = (
    Entry("StaticLM float32", "float32", "staticlm", "staticlm-float32"),
    Entry("transformers eager float32", "float32", "transformers", "source"),
    Entry(
        *("transformers' ExecuTorch exporter float32", "float32"),
        *("transformers_executorch", "transformers-executorch"),
    ),
    Entry("ExecuTorch export_llm float32", "float32", "executorch", "executorch-fp32.pte"),
    Entry("llama.cpp f32", "float32", "llamacpp", "llamacpp-f32.gguf", True),
    Entry("CTranslate2 float32", "float32", "ctranslate2", "ctranslate2-float32", True),
    Entry(
        *("OpenVINO GenAI float32", "float32", "openvino", "openvino-fp32", True),
        options={"precision": "f32"},
    ),
    Entry("StaticLM int8", "8 bit", "staticlm", "staticlm-int8"),
    Entry("ExecuTorch export_llm 8da8w", "8 bit", "executorch", "executorch-8da8w.pte"),
    Entry("llama.cpp q8_0", "8 bit", "llamacpp", "llamacpp-q8_0.gguf", True),
    Entry("CTranslate2 int8", "8 bit", "ctranslate2", "ctranslate2-int8", True),
    Entry("OpenVINO GenAI int8 weights", "8 bit", "openvino", "openvino-int8", True),
    Entry("StaticLM 8da4w", "4 bit", "staticlm", "staticlm-8da4w"),
    Entry("ExecuTorch export_llm 8da4w", "4 bit", "executorch", "executorch-8da4w.pte"),
    Entry("llama.cpp q4_0", "4 bit", "llamacpp", "llamacpp-q4_0.gguf", True),
    Entry("OpenVINO GenAI int4 weights", "4 bit", "openvino", "openvino-int4", True),
)
COLUMNS = {
    "prefill 128": lambda one: one["prefill"]["128"],
    "prefill 512": lambda one: one["prefill"]["512"],
    "decode": lambda one: one["decode"],
    "load, s": lambda one: one["load"],
    "first token, s": lambda one: one["first_token"],
    "peak MB": lambda one: one["peak_megabytes"],
}
SPEEDS = tuple(COLUMNS)[:3]


def main() -> int:
    """Measure and report; 1 when an engine failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--forms", type=Path, default=ROOT / "artifacts" / "peers")
    parser.add_argument("--source", type=Path, help="the float32 folder; default: FORMS/source")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--only", nargs="+", help="parts of names")
    parser.add_argument("--json", type=Path, help="keep every figure")
    parser.add_argument("--write", action="store_true", help=f"into {DOCUMENT.name}")
    arguments = parser.parse_args()
    source = arguments.source or arguments.forms / "source"
    vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
    paths = {one: source if one.form == "source" else arguments.forms / one.form for one in ENTRIES}
    wanted = [
        one
        for one in ENTRIES
        if not arguments.only or any(part.lower() in one.name.lower() for part in arguments.only)
    ]
    missing = [one.name for one in wanted if not paths[one].exists()]
    entries = [one for one in wanted if paths[one].exists()]
    taken: dict[str, list[dict[str, Any]]] = {one.name: [] for one in entries}
    limits: list[dict[str, float]] = []
    failed: dict[str, str] = {}
    begun = time.monotonic()
    for number in range(arguments.rounds):
        limits.append(_limits(arguments.threads))
        for entry in entries:
            if entry.name in failed:
                continue
            found = _measure(entry, paths[entry], vocabulary, arguments)
            if isinstance(found, str):
                failed[entry.name] = found
                print(f"{entry.name}: failed: {found}", file=sys.stderr)
            else:
                taken[entry.name].append(found)
                print(f"round {number + 1}: {entry.name}", file=sys.stderr)
    done = [one for one in entries if one.name not in failed]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"limits": limits, "engines": taken}, indent=2))
    text = _report(done, taken, limits, [*missing, *failed], arguments, time.monotonic() - begun)
    if arguments.write:
        _write(text)
    else:
        print(text)
    return int(bool(failed))


def _measure(
    entry: Entry, path: Path, vocabulary: int, arguments: argparse.Namespace
) -> dict[str, Any] | str:
    """One process; figures, or why there are none."""
    asked = {
        "engine": entry.engine,
        "path": str(path),
        "threads": arguments.threads,
        "options": entry.options,
        "prompts": PROMPTS,
        "context": CONTEXT,
        "steps": arguments.steps,
        "vocabulary": vocabulary,
    }
    command = [str(PEERS) if entry.own else sys.executable, str(HERE / "child.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    asked["spawned"] = time.monotonic()
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            env=environment,
            check=False,
        )
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return f"no answer within {TIMEOUT} s"
    except (OSError, ValueError, IndexError):
        lines = done.stderr.strip().splitlines() if "done" in locals() else ["cannot be started"]
        return lines[-1] if lines else f"exit status {done.returncode}"
    return found


def _limits(threads: int) -> dict[str, float]:
    command = [sys.executable, str(HERE / "limits.py"), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _report(
    entries: Sequence[Entry],
    taken: dict[str, list[dict[str, Any]]],
    limits: list[dict[str, float]],
    absent: Sequence[str],
    arguments: argparse.Namespace,
    seconds: float,
) -> str:
    machine = {key: median(one[key] for one in limits) for key in limits[0]}
    lines = [
        f"{datetime.date.today()}, {_processor()}, {arguments.threads} threads, "
        f"{arguments.rounds} interleaved rounds in {seconds / 60:.0f} minutes, medians; prefill and "
        f"decode in tokens per second, decode over {arguments.steps} tokens from context {CONTEXT}.",
        "",
        f"Limits of the machine in the same rounds: reads {machine['read_gigabytes']:.1f} GB/s; "
        f"multiplies {machine['float32_gigaflops']:.0f} GFLOP/s in float32 and "
        f"{machine['bfloat16_gigaflops']:.0f} in bfloat16.",
    ]
    for kind in dict.fromkeys(one.kind for one in entries):
        group = [one for one in entries if one.kind == kind]
        ours = next((one.name for one in group if one.engine == "staticlm"), None)
        ratios = [f"ours / it, {column}" for column in SPEEDS] if ours else []
        lines += ["", f"| {kind} | {' | '.join([*COLUMNS, *ratios])} |"]
        lines.append("|---|" + "---:|" * (len(COLUMNS) + len(ratios)))
        for one in group:
            cells = [_digits(median(map(read, taken[one.name]))) for read in COLUMNS.values()]
            if ours:
                cells += [_ratio(taken[ours], taken[one.name], column) for column in SPEEDS]
            lines.append(f"| {one.name} | {' | '.join(cells)} |")
        if ours:
            lines += ["", _best(group, taken, ours)]
    if absent:
        lines += ["", f"Not measured: {', '.join(absent)}."]
    lines += ["", "Ranges over the rounds:", "", "| | prefill 128 | prefill 512 | decode |"]
    lines.append("|---|---:|---:|---:|")
    for one in entries:
        cells = []
        for column in SPEEDS:
            values = [COLUMNS[column](each) for each in taken[one.name]]
            cells.append(f"{_digits(min(values))} to {_digits(max(values))}")
        lines.append(f"| {one.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(ours: list[dict[str, Any]], other: list[dict[str, Any]], column: str) -> str:
    read = COLUMNS[column]
    return f"{median(read(a) / read(b) for a, b in zip(ours, other, strict=False)):.2f}"


def _best(group: Sequence[Entry], taken: dict[str, list[dict[str, Any]]], ours: str) -> str:
    """The best peer of a kind by each speed, and how far from it we are."""
    parts = []
    for column in SPEEDS:
        read = COLUMNS[column]
        others = [one.name for one in group if one.name != ours]
        if others:
            best = max(others, key=lambda name: median(map(read, taken[name])))
            parts.append(f"{column} {_ratio(taken[ours], taken[best], column)} x {best}")
    return f"Against the best peer: {'; '.join(parts)}." if parts else "No peer was measured."


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _write(text: str) -> None:
    whole = DOCUMENT.read_text(encoding="utf-8")
    before, found, rest = whole.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise SystemExit(f"{DOCUMENT} lacks the markers {BEGIN} and {END}")
    DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
