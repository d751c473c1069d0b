"""Where XNNPACK's packed weights of a program are kept between processes.

XNNPACK lays weights out anew for the processor before the first call: for a large model that is most of
the start. Its delegate can keep the result in a file and map it the next time. The file belongs to one
program, one release of ExecuTorch and one kind of processor; within it every weight is found by the
hash of its content and by the kernel it was laid out for.

The delegate writes to the file whenever it can lock it, each time that a part of a program is loaded, and
saves what it has. So one process at a time is given the file, under a lock of our own that it holds as
long as anything of the program is loaded; others pack in memory. A file counts once it is marked as
whole, which happens when a first method was loaded; one without the mark was being written by a process
that died, and is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where the delegate keeps no file either
    fcntl = None  # type: ignore[assignment]

OPTION = ("XnnpackBackend", "packed_cache_path")
"""The delegate's option; it is taken when a method is loaded, and only from that call."""

ENVIRONMENT = "STATICLM_PACKED_WEIGHTS"
"""`off`, or the directory to keep the files in; by default `staticlm` in the user's cache directory."""

SMALLEST = 64 << 20
"""Programs of fewer bytes are packed in a moment."""

_SUFFIX, _LOCK, _WHOLE = ".xnnpack", ".lock", ".whole"
_LONGEST = 240
_UNUSED_SECONDS = 30 * 24 * 3600
_SPARE = 1 << 30


class _Lock:
    """A lock on a file, given back when the last one that holds this object lets go of it."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            raise

    def __del__(self) -> None:
        if "_descriptor" in self.__dict__:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)


_held: weakref.WeakValueDictionary[Path, _Lock] = weakref.WeakValueDictionary()
"""Locks of this process: programs opened twice share a file."""

_guard = threading.Lock()

_kept: ContextVar[bool] = ContextVar("kept", default=True)


@dataclass(frozen=True)
class PackedWeights:
    """The file for a program, or None and why there is none.

    `lock` must be held until every method of the program is gone.
    """

    file: Path | None
    reason: str = ""
    lock: object = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"in memory: {self.reason}" if self.file is None else f"in {self.file}"

    def mark(self) -> None:
        """Say that the file is whole: call it when a method was loaded."""
        if self.file is not None:
            with contextlib.suppress(OSError):
                if self.file.stat().st_size:
                    _beside(self.file, _WHOLE).touch(mode=0o600)


@contextlib.contextmanager
def not_kept() -> Iterator[None]:
    """Programs that are opened meanwhile are not worth a file."""
    token = _kept.set(False)
    try:
        yield
    finally:
        _kept.reset(token)


def packed_weights(program: Path, executorch: str) -> PackedWeights:
    """The file in which a program's packed weights are, or will be, locked for this process.

    Args:
        program: The program file.
        executorch: Release of ExecuTorch that packs.
    """
    setting = os.environ.get(ENVIRONMENT, "")
    if setting == "off":
        return PackedWeights(None, f"{ENVIRONMENT} is off")
    if fcntl is None:
        return PackedWeights(None, "this system keeps no such files")
    if not _kept.get():
        return PackedWeights(None, "the program is opened to be measured")
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
        with _guard:
            lock = _held.get(file)
            if lock is not None:
                return PackedWeights(file, lock=lock)
            try:
                lock = _Lock(_beside(file, _LOCK))
            except BlockingIOError:
                return PackedWeights(None, "another process uses the file")
            _held[file] = lock
        if file.is_file() and _beside(file, _WHOLE).exists():
            os.utime(file)
            return PackedWeights(file, lock=lock)
        _sweep(directory, place)
        # What does not fit is noticed only when its pages are written, and ends the process.
        if shutil.disk_usage(directory).free < 2 * status.st_size + _SPARE:
            return PackedWeights(None, f"too little space in {directory}")
    except (OSError, RuntimeError) as error:
        return PackedWeights(None, str(error))
    return PackedWeights(file, lock=lock)


def _cache_home() -> Path:
    named = os.environ.get("XDG_CACHE_HOME", "")
    return Path(named) if os.path.isabs(named) else Path.home() / ".cache"


def _beside(file: Path, suffix: str) -> Path:
    return file.with_name(file.name + suffix)


def _sweep(directory: Path, place: str) -> None:
    """Remove files of the program that are old or not whole, and all that nobody used for a month.

    A process that has one of them mapped keeps what it has.
    """
    for old in directory.glob(f"*{_SUFFIX}"):
        try:
            unused = time.time() - old.stat().st_mtime > _UNUSED_SECONDS
            if unused or old.name.startswith(f"{place}-"):
                _beside(old, _WHOLE).unlink(missing_ok=True)
                old.unlink()
                if old not in _held:
                    _beside(old, _LOCK).unlink(missing_ok=True)
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
