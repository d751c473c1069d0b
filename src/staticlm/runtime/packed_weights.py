"""Where XNNPACK's packed weights of a program are kept between processes.

XNNPACK lays weights out anew for the processor before the first call: for a large model that is most of
the start. Its delegate can keep the result in a file and map it the next time. The file belongs to one
program, one release of ExecuTorch and one kind of processor; within it every weight is found by the
hash of its content and by the kernel it was laid out for. One process uses a file at a time: others pack
in memory, as they do when the file cannot be made.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

OPTION = ("XnnpackBackend", "packed_cache_path")
"""The delegate's option; it is taken when a method is loaded, and only from that call."""

ENVIRONMENT = "STATICLM_PACKED_WEIGHTS"
"""`off`, or the directory to keep the files in; by default `staticlm` in the user's cache directory."""

SMALLEST = 64 << 20
"""Programs of fewer bytes are packed in a moment."""

_SUFFIX = ".xnnpack"
_LONGEST = 255
_UNUSED_SECONDS = 30 * 24 * 3600
_SPARE = 1 << 30


@dataclass(frozen=True)
class PackedWeights:
    """The file for a program, or None and why there is none."""

    file: Path | None
    reason: str = ""

    def __str__(self) -> str:
        return f"in memory: {self.reason}" if self.file is None else f"in {self.file}"


def packed_weights(program: Path, executorch: str) -> PackedWeights:
    """The file in which a program's packed weights are, or will be.

    Args:
        program: The program file.
        executorch: Release of ExecuTorch that packs.
    """
    setting = os.environ.get(ENVIRONMENT, "")
    if setting == "off":
        return PackedWeights(None, f"{ENVIRONMENT} is off")
    status = program.stat()
    if status.st_size < SMALLEST:
        return PackedWeights(None, "the program is small")
    try:
        directory = Path(setting) if setting else _cache_home() / "staticlm"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = _hash(program.resolve(), executorch, _processor())
        stamp = _hash(status.st_size, status.st_mtime_ns, status.st_ino)
        file = directory.resolve() / f"{place}-{stamp}{_SUFFIX}"
        if len(os.fsencode(file)) > _LONGEST:
            return PackedWeights(None, f"the path of {directory} is too long")
        if file.is_file():
            os.utime(file)
            return PackedWeights(file)
        _sweep(directory, place)
        # What does not fit is noticed only when its pages are written, and ends the process.
        if shutil.disk_usage(directory).free < 2 * status.st_size + _SPARE:
            return PackedWeights(None, f"too little space in {directory}")
        if not os.access(directory, os.W_OK):
            return PackedWeights(None, f"{directory} cannot be written to")
    except (OSError, RuntimeError) as error:
        return PackedWeights(None, str(error))
    return PackedWeights(file)


def _cache_home() -> Path:
    named = os.environ.get("XDG_CACHE_HOME", "")
    return Path(named) if os.path.isabs(named) else Path.home() / ".cache"


def _sweep(directory: Path, place: str) -> None:
    """Remove files of earlier forms of the same program, and those that nobody used for a month.

    A process that has one of them mapped keeps what it has.
    """
    for old in directory.glob(f"*{_SUFFIX}"):
        try:
            unused = time.time() - old.stat().st_mtime > _UNUSED_SECONDS
            if unused or old.name.startswith(f"{place}-"):
                old.unlink()
        except OSError:
            continue


def _hash(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:24]


def _processor() -> str:
    """What distinguishes processors with other kernels."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part", "model\t")
    found = {line for line in lines if line.startswith(wanted)}
    return "\n".join([platform.machine(), *sorted(found)])
