"""The registry of buffer allocators."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from staticlm.errors import Code, RunnerError
from staticlm.runtime.buffers import BufferAllocator
from staticlm.runtime.chain import ChainAllocator
from staticlm.runtime.host import HostAllocator
from staticlm.runtime.rpcmem import RpcmemAllocator
from staticlm.runtime.shared_memory import SharedMemoryAllocator

GROUP = "staticlm.allocators"
"""Entry-point group through which an installed package adds allocators."""

AllocatorFactory = Callable[[], BufferAllocator]

_factories: dict[str, AllocatorFactory] = {}
_discovered = False


def register_allocator(name: str, factory: AllocatorFactory) -> None:
    """Add an allocator under a name.

    Raises:
        RunnerError: `REGISTRATION_INVALID` for an empty name or a factory that cannot be called,
            `REGISTRATION_DUPLICATE` for a name that is taken.
    """
    if not name or not isinstance(name, str):
        raise RunnerError(
            Code.REGISTRATION_INVALID,
            "an allocator needs a name",
            found=repr(name),
            expected="a non-empty string",
        )
    if not callable(factory):
        raise RunnerError(
            Code.REGISTRATION_INVALID,
            f"the factory of allocator {name!r} cannot be called",
            found=type(factory).__name__,
            expected="a function without arguments",
        )
    if name in _factories:
        raise RunnerError(
            Code.REGISTRATION_DUPLICATE,
            f"allocator {name!r} is already registered",
            remedy="Choose another name; registrations are never replaced.",
        )
    _factories[name] = factory


def get_allocator(name: str) -> BufferAllocator:
    """A new allocator.

    Raises:
        RunnerError: `REGISTRATION_INVALID` for an unknown name (the message lists the known ones)
            or a factory that returned something else.
    """
    _discover()
    factory = _factories.get(name)
    if factory is None:
        raise RunnerError(
            Code.REGISTRATION_INVALID,
            "no such allocator",
            found=repr(name),
            expected=f"one of {', '.join(sorted(_factories))}",
        )
    made = factory()
    if not isinstance(made, BufferAllocator):
        raise RunnerError(
            Code.REGISTRATION_INVALID,
            f"the factory of allocator {name!r} did not return an allocator",
            found=type(made).__name__,
            expected="an object with name, allocate, bind and free",
        )
    return made


def get_chain(*names: str) -> ChainAllocator:
    """A chain of named allocators; the heap is appended if it is not the last."""
    return ChainAllocator([get_allocator(name) for name in names])


def allocator_names() -> tuple[str, ...]:
    """What is registered, sorted."""
    _discover()
    return tuple(sorted(_factories))


def _discover() -> None:
    """Fill the registry from entry points, once; what is built in is never replaced."""
    global _discovered
    if _discovered:
        return
    _discovered = True
    for point in entry_points(group=GROUP):
        register_allocator(point.name, point.load())


register_allocator("host", HostAllocator)
register_allocator("shm", SharedMemoryAllocator)
register_allocator("rpcmem", RpcmemAllocator)
