"""What a program needs of the runtime that loads it, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from staticlm.contract.program import MethodFacts, ProgramFacts
from staticlm.errors import Code, ProgramError


def needed_operators(facts: ProgramFacts) -> frozenset[str]:
    """Kernels that the program calls outside delegates, as `namespace::name.overload`."""
    return frozenset(name for method in facts.methods.values() for name in method.operators)


def needed_backends(facts: ProgramFacts) -> frozenset[str]:
    """Delegates that the program's methods are lowered to."""
    return frozenset(one.backend for method in facts.methods.values() for one in method.delegates)


def check_requirements(
    facts: ProgramFacts, operators: Collection[str], available: Callable[[str], bool]
) -> None:
    """Refuse a program with operators or backends that are not registered, naming them.

    Args:
        facts: The program.
        operators: Names of all registered kernels.
        available: Tells whether a backend is registered and can be used here.

    Raises:
        ProgramError: `PROGRAM_UNSUPPORTED`.
    """
    known = frozenset(plain_name(name) for name in operators)
    missing = sorted(one for one in needed_operators(facts) if plain_name(one) not in known)
    absent = sorted(name for name in needed_backends(facts) if not available(name))
    if not missing and not absent:
        return
    parts = []
    if absent:
        parts.append(f"backends {', '.join(absent)}")
    if missing:
        parts.append(f"operators {', '.join(missing)}")
    raise ProgramError(
        Code.PROGRAM_UNSUPPORTED,
        f"{facts.path} needs what this runtime does not have",
        found=" and ".join(parts),
        expected="only backends and operators that are registered here",
        remedy="Export for a backend of this machine, or install the package that provides them.",
    )


def check_method(facts: ProgramFacts, name: str) -> MethodFacts:
    """The facts of a method that a driver can run.

    Raises:
        ProgramError: `PROGRAM_UNSUPPORTED` when there is no such method, or it takes an input that
            is not a tensor.
    """
    method = facts.methods.get(name)
    if method is None:
        raise ProgramError(
            Code.PROGRAM_UNSUPPORTED,
            f"{facts.path} has no such method",
            found=repr(name),
            expected=f"one of {', '.join(sorted(facts.methods))}",
        )
    scalars = [index for index, one in enumerate(method.inputs) if one is None]
    if scalars:
        raise ProgramError(
            Code.PROGRAM_UNSUPPORTED,
            f"method {name!r} of {facts.path} takes inputs that are not tensors",
            found=f"inputs {scalars}",
            expected="tensors only",
            remedy="Export it with tensors in the place of Python numbers.",
        )
    return method


def plain_name(operator: str) -> str:
    """An operator name without the full stop of an empty overload."""
    return operator.removesuffix(".").removesuffix(".default")


def malformed(path: Path, reason: object) -> ProgramError:
    """The error for a file that our reader accepts and ExecuTorch does not."""
    return ProgramError(
        Code.PROGRAM_MALFORMED,
        f"ExecuTorch cannot load {path}",
        found=str(reason),
        expected="a program of an ExecuTorch that this runtime can read",
        remedy="Export the model again with the installed version.",
    )


def unloadable(path: Path, name: str, reason: object) -> ProgramError:
    """The error for a method that ExecuTorch cannot initialise."""
    return ProgramError(
        Code.PROGRAM_UNSUPPORTED,
        f"ExecuTorch cannot load method {name!r} of {path}",
        found=str(reason),
        remedy="The file was made for another backend version, or memory ran out.",
    )


def missing_operators(facts: ProgramFacts, registered: Iterable[str]) -> frozenset[str]:
    """Operators of the program that are not among the registered ones."""
    known = frozenset(plain_name(name) for name in registered)
    return frozenset(one for one in needed_operators(facts) if plain_name(one) not in known)
