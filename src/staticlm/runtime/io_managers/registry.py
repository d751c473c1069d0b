"""The registry of I/O managers, and which of them drives a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

from staticlm.contract.facts import LABEL
from staticlm.contract.metadata import KEY_LABEL, LABEL_MAX, read_label
from staticlm.contract.program import ProgramFacts
from staticlm.errors import Code, ContractError, RunnerError
from staticlm.runtime.buffers import BufferAllocator
from staticlm.runtime.io_managers.base import IOManager, IOManagerFactory
from staticlm.runtime.shared_program import SharedProgram

GROUP = "staticlm.io_managers"
"""Entry-point group through which an installed package adds I/O managers: label = factory."""

Recognizer = Callable[[ProgramFacts], bool]


@dataclass(frozen=True)
class _Entry:
    factory: IOManagerFactory
    recognizes: Recognizer | None


_entries: dict[str, _Entry] = {}
_discovered = False


def register_io_manager(
    label: str, factory: IOManagerFactory, recognizes: Recognizer | None = None
) -> None:
    """Add an I/O manager.

    Args:
        label: The contract label that programs carry: 1 to 64 printable ASCII characters.
        factory: Makes the manager, see `IOManagerFactory`.
        recognizes: For contracts made elsewhere that carry no label: says whether a program without
            a label states this contract in another way. It must look at recorded facts, not guess.

    Raises:
        RunnerError: `REGISTRATION_INVALID` or `REGISTRATION_DUPLICATE`.
    """
    if (
        not isinstance(label, str)
        or not 0 < len(label) <= LABEL_MAX
        or not (label.isascii() and label.isprintable())
    ):
        raise RunnerError(
            Code.REGISTRATION_INVALID,
            "the label of an I/O manager",
            found=repr(label)[:80],
            expected=f"1 to {LABEL_MAX} printable ASCII characters",
        )
    if not callable(factory):
        raise RunnerError(
            Code.REGISTRATION_INVALID,
            f"the factory of I/O manager {label!r} cannot be called",
            found=type(factory).__name__,
            expected="a function of (facts, program, allocator)",
        )
    if label in _entries:
        raise RunnerError(
            Code.REGISTRATION_DUPLICATE,
            f"I/O manager {label!r} is already registered",
            remedy="Choose another label; registrations are never replaced.",
        )
    _entries[label] = _Entry(factory, recognizes)


def io_manager_labels() -> tuple[str, ...]:
    """What is registered, sorted."""
    _discover()
    return tuple(sorted(_entries))


def select_label(facts: ProgramFacts, wanted: str | None = None) -> str:
    """The label of the I/O contract that a program states.

    Args:
        facts: The program.
        wanted: A contract that the caller names; it is checked against the program all the same.

    Raises:
        ContractError: No label and nothing recognised, several recognised, a malformed or unknown
            label, or another one than the caller named.
    """
    labels = io_manager_labels()
    if wanted is not None and wanted not in labels:
        raise _unknown(wanted)
    if KEY_LABEL in facts.constants:
        label, _ = read_label(facts.constants)
        if label not in labels:
            raise _unknown(label)
        found = [label]
    else:
        found = [
            name
            for name in labels
            if (recognizes := _entries[name].recognizes) is not None and recognizes(facts)
        ]
    if not found:
        read_label(facts.constants)  # raises LABEL_MISSING
    if wanted is not None:
        if wanted not in found:
            raise ContractError(
                Code.CONTRACT_MISMATCH,
                "the program does not state the contract that was asked for",
                found=", ".join(found),
                expected=wanted,
                remedy="Leave the contract out to use the program's own.",
            )
        return wanted
    if len(found) > 1:
        raise ContractError(
            Code.LABEL_MISSING,
            f"the program has no {KEY_LABEL} and fits several I/O contracts",
            found=", ".join(found),
            expected="one",
            remedy="Name the contract explicitly.",
        )
    return found[0]


def make_io_manager(
    label: str, facts: ProgramFacts, program: SharedProgram, allocator: BufferAllocator
) -> IOManager:
    """Call the factory of a label and check what it returns.

    Raises:
        RunnerError: `IO_MANAGER_INVALID` when the factory returned nothing or something else.
        StaticLMError: Whatever the factory refuses.
    """
    _discover()
    entry = _entries.get(label)
    if entry is None:
        raise _unknown(label)
    made: object = entry.factory(facts, program, allocator)
    if made is None:
        raise RunnerError(
            Code.IO_MANAGER_INVALID,
            f"the factory of I/O manager {label!r} returned nothing",
            expected="an object that keeps the IOManager protocol",
            remedy="A factory that cannot serve a program must raise an error that says why.",
        )
    if not isinstance(made, IOManager):
        raise RunnerError(
            Code.IO_MANAGER_INVALID,
            f"the factory of I/O manager {label!r} returned another type",
            found=type(made).__name__,
            expected="an object that keeps the IOManager protocol",
        )
    return made


def _unknown(label: str) -> ContractError:
    return ContractError(
        Code.LABEL_UNKNOWN,
        "no I/O manager is registered for this contract label",
        found=repr(label),
        expected=f"one of {', '.join(sorted(_entries))}",
        remedy=f"Install a package that provides it through the entry-point group {GROUP}.",
    )


def _discover() -> None:
    """Fill the registry with what is built in, then from entry points, once."""
    global _discovered
    if _discovered:
        return
    _discovered = True
    from staticlm.runtime.io_managers import exporter_record, returned, text_llm

    register_io_manager(LABEL, returned.create_static, exporter_record.recognizes)
    register_io_manager(returned.KVCACHE_IO, returned.create_kvcache_io)
    register_io_manager(text_llm.LABEL, text_llm.create, text_llm.recognizes)
    for point in entry_points(group=GROUP):
        register_io_manager(point.name, point.load())
