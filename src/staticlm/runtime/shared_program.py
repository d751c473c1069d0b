"""One open program and its loaded methods, used by several sessions in turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from staticlm.contract.program import ProgramFacts
from staticlm.errors import Code, RunnerError
from staticlm.runtime.buffers import BufferAllocator
from staticlm.runtime.driver import BoundMethod, Driver, LoadedProgram


class MethodUser(Protocol):
    """Somebody whose buffers can be bound to a shared method."""

    def bind(self, name: str, method: BoundMethod) -> None:
        """Bind own buffers to every slot that was ever bound to another user's."""
        ...


class SharedProgram:
    """A program opened when first needed, with at most one shared copy of each method.

    A loaded method holds packed weights, so sessions share it and rebind their buffers when they
    take turns; `lock` must be held from `method` until the outputs were read. A program whose state
    lives inside its methods takes one of its own instead (`own_method`).
    """

    def __init__(
        self,
        driver: Driver,
        path: Path,
        facts: ProgramFacts,
        sources: Mapping[str, tuple[Path, str]] | None = None,
    ) -> None:
        """Nothing is opened yet.

        Args:
            driver: Opens the files.
            path: The program file.
            facts: What it holds.
            sources: For methods that come from files of their own: file and method name by name.
        """
        self.driver = driver
        self.path = path
        self.facts = facts
        self.lock = threading.RLock()
        self.load_seconds = 0.0
        self._sources = dict(sources or {})
        self._programs: dict[Path, LoadedProgram] = {}
        self._methods: dict[str, BoundMethod] = {}
        self._bound: dict[str, MethodUser] = {}
        self._users: list[MethodUser] = []
        self._own: list[tuple[LoadedProgram, str]] = []
        self._closed = False

    @property
    def loaded(self) -> tuple[str, ...]:
        """Names of the methods that are in memory now, an own copy of a session counted as one."""
        return tuple(sorted([*self._methods, *(name for _, name in self._own)]))

    @property
    def packed_weights(self) -> str:
        """Where the packed weights are; empty where the driver does not say, or before a load."""
        return str(getattr(self._programs.get(self.path), "packed_weights", ""))

    @property
    def closed(self) -> bool:
        """Whether the last user has left."""
        return self._closed

    def join(self, user: MethodUser) -> None:
        """Count a user; the program stays open until the last one leaves."""
        with self.lock:
            self._check_open()
            self._users.append(user)

    def method(self, name: str, user: MethodUser, allocator: BufferAllocator) -> BoundMethod:
        """The shared method with the user's buffers bound, loaded on first use."""
        with self.lock:
            self._check_open()
            method = self._methods.get(name)
            if method is None:
                method = self._methods[name] = self._load(name, allocator)
            if self._bound.get(name) is not user:
                # Forgotten first: a bind that fails half-way must not pass for a finished one.
                self._bound.pop(name, None)
                user.bind(name, method)
                self._bound[name] = user
            return method

    def own_method(
        self, name: str, allocator: BufferAllocator
    ) -> tuple[LoadedProgram, BoundMethod]:
        """A method of the caller's own, for programs that keep state inside their methods.

        The program is opened once more for it: methods of one open program may share arenas. Close
        the program with `close_own`.
        """
        with self.lock:
            self._check_open()
            begun = time.perf_counter()
            program = self.driver.load(self.path, self.facts)
            try:
                method = program.load_method(name, allocator)
            except BaseException:
                program.close()
                raise
            self.load_seconds += time.perf_counter() - begun
            self._own.append((program, name))
            return program, method

    def close_own(self, program: LoadedProgram) -> None:
        """Close a program from `own_method` and its method."""
        with self.lock:
            self._own = [one for one in self._own if one[0] is not program]
            program.close()

    def leave(self, user: MethodUser) -> None:
        """Unbind the user's buffers; the last user closes methods and program. Idempotent."""
        with self.lock:
            if not any(one is user for one in self._users):
                return
            self._users = [one for one in self._users if one is not user]
            if not self._users:
                self._close()
                return
            for name in [n for n, bound in self._bound.items() if bound is user]:
                # Another session's buffers take the place: a method is never left pointing at
                # memory that is about to be freed.
                del self._bound[name]
                self._users[0].bind(name, self._methods[name])
                self._bound[name] = self._users[0]

    def _load(self, name: str, allocator: BufferAllocator) -> BoundMethod:
        begun = time.perf_counter()
        path, inner = self._sources.get(name, (self.path, name))
        if path not in self._programs:
            # Facts of several files together are not what one of them holds.
            known = self.facts if path == self.path and not self._sources else None
            self._programs[path] = self.driver.load(path, known)
        method = self._programs[path].load_method(inner, allocator)
        self.load_seconds += time.perf_counter() - begun
        return method

    def _close(self) -> None:
        self._closed = True
        methods, own = list(self._methods.values()), self._own
        self._methods, self._own, self._bound = {}, [], {}
        for method in methods:
            method.close()
        for program, _ in own:
            program.close()
        programs, self._programs = self._programs, {}
        for program in programs.values():
            program.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RunnerError(
                Code.CLOSED,
                f"the program {self.path.name} is closed",
                remedy="Load it again.",
            )
