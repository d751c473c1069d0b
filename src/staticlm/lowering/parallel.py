"""One process per method: lowering is single-threaded Python, and methods do not depend on each other."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from staticlm.errors import Code, LoweringError

_T = TypeVar("_T")


def can_fork() -> bool:
    """Whether processes that share this one's memory can be made here."""
    return "fork" in multiprocessing.get_all_start_methods() and os.name == "posix"


def available_bytes() -> int | None:
    """Memory that can be had without swapping, where the system tells."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def run_forked(tasks: Mapping[str, Callable[[], _T]], jobs: int) -> dict[str, _T]:
    """Run every task in a forked process, `jobs` at a time, and give their results by name.

    The processes share this one's memory until they write to it, so that weights are not copied.

    Raises:
        LoweringError: A process ended without a result.
        Exception: What the first task that failed raised; tasks not begun by then are left.
    """
    context = multiprocessing.get_context("fork")
    waiting = list(tasks.items())
    running: dict[Connection, tuple[str, BaseProcess]] = {}
    results: dict[str, _T] = {}
    failure: BaseException | None = None
    while running or (waiting and failure is None):
        while waiting and failure is None and len(running) < jobs:
            name, task = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(task, sender), daemon=True)
            process.start()
            sender.close()
            running[receiver] = (name, process)
        ready = wait(list(running))
        for receiver in [one for one in running if one in ready]:
            name, child = running.pop(receiver)
            done, value = _result(name, child, receiver)
            if done:
                results[name] = value
            else:
                failure = failure or value
    if failure is not None:
        raise failure
    return results


def _result(name: str, process: BaseProcess, receiver: Connection) -> tuple[bool, Any]:
    try:
        done, value = receiver.recv()
    except EOFError:
        process.join()
        done = False
        value = LoweringError(
            Code.LOWERING_FAILED,
            f"the process that lowers method {name!r}",
            found=f"exit code {process.exitcode}",
            expected="a lowered program",
            remedy="It was ended, perhaps for want of memory; lower with jobs=1.",
        )
    process.join()
    return done, value


def _child(task: Callable[[], object], sender: Connection) -> None:
    # OpenMP's threads do not survive a fork; one thread needs none.
    torch.set_num_threads(1)
    try:
        message = (True, task())
    except BaseException as error:
        message = (False, error)
    try:
        sender.send(message)
    except Exception as error:  # a result that cannot be pickled
        sender.send((False, RuntimeError(f"{type(error).__name__}: {error}: {message[1]!r}")))
    finally:
        sender.close()
