"""Speed against context and memory against context as one picture."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from staticlm.errors import Code, UsageError


def check_plotting(path: Path) -> None:
    """Refuse a picture that could not be written, before anything is measured.

    Raises:
        UsageError: matplotlib is not installed, or the folder of `path` does not exist.
    """
    if find_spec("matplotlib") is None:
        raise UsageError(
            Code.DEPENDENCY_MISSING,
            "matplotlib, which draws plots, is not installed",
            remedy='Install it with `pip install "staticlm[bench]"`, or leave --plot out.',
        )
    if not path.resolve().parent.is_dir() or path.is_dir():
        raise UsageError(
            Code.USAGE, "--plot", found=str(path), expected="a file in a folder that exists"
        )


def write_plot(report: dict[str, Any], path: Path) -> None:
    """Draw decode and prefill speed, and memory, over the tokens in the context."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    speed, memory = figure.subplots(1, 2)
    rate = speed.twinx()
    for index, (driver, found) in enumerate(report["drivers"].items()):
        colour = f"C{index}"
        decode, prefill = found["decode"], found["prefill"]
        _band(speed, decode, "tokens_per_second", f"decode, {driver}", colour, "o-")
        _band(rate, prefill, "tokens_per_second", f"prefill, {driver}", colour, "s--")
        _band(memory, decode, "resident", f"resident, {driver}", colour, "o-", 1e-6)
        limit = found["memory"]["program"]["median"] + found["memory"]["caches"]["median"]
    memory.axhline(limit * 1e-6, color="grey", linestyle=":", label="program and caches")
    speed.set(xlabel="tokens in the context", ylabel="decode, tokens/s", ylim=(0, None))
    rate.set(ylabel="prefill, tokens/s", ylim=(0, None))
    memory.set(xlabel="tokens in the context", ylabel="MB", ylim=(0, None))
    handles = [*speed.get_legend_handles_labels()[0], *rate.get_legend_handles_labels()[0]]
    speed.legend(handles=handles, fontsize=8)
    memory.legend(fontsize=8)
    figure.suptitle(f"{Path(report['artifact']).name}, {report['settings']['threads']} threads")
    figure.savefig(path, dpi=120)


def _band(
    axes: Any,
    points: dict[str, Any],
    key: str,
    label: str,
    colour: str,
    style: str,
    scale: float = 1,
) -> None:
    """Medians as a line, the range as a band."""
    points = {n: one for n, one in points.items() if one[key] is not None}
    at = [int(n) for n in points]
    middle, low, high = (
        [one[key][part] * scale for one in points.values()] for part in ("median", "low", "high")
    )
    axes.plot(at, middle, style, color=colour, label=label)
    axes.fill_between(at, low, high, color=colour, alpha=0.15)
