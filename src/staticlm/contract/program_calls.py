"""The instructions of an ExecuTorch execution plan: calls of kernels and delegates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from staticlm.contract.flatbuffer import Malformed, Table
from staticlm.contract.program_values import Null, Scalar, Tensor, Value

_VIEW = "executorch_prim::et_view"


def read_calls(
    method: str,
    plan: Table,
    operators: list[str],
    delegates: int,
    values: tuple[Value, ...],
    given: frozenset[int],
) -> tuple[Mapping[str, int], int, int]:
    """Kernel calls by operator, delegate calls, and instructions of all chains.

    Args:
        method: Name of the method.
        plan: Its execution plan.
        operators: Names of the plan's operators.
        delegates: How many delegates it has.
        values: Its values.
        given: Indexes of its inputs and outputs, which the caller may give memory.

    Raises:
        Malformed: A call of what is not there, or with arguments over which the runtime would end
            the process.
    """
    placed: set[int] = set(given)
    used: set[int] = set()
    kernels: Counter[str] = Counter()
    delegate_calls = 0
    total = 0
    for chain in plan.tables(5):
        count = chain.vector(2, 4)[1]
        total += count
        for entry in chain.tables(2):
            kind, call = entry.u8(0), entry.table(1)
            if call is None or not 1 <= kind <= 5:
                raise Malformed(f"method {method!r} has an instruction of unknown type {kind}")
            touched: tuple[int, ...]
            if kind in (1, 2):
                index = call.i32(0)
                if not 0 <= index < (len(operators) if kind == 1 else delegates):
                    what = "an operator" if kind == 1 else "a delegate"
                    raise Malformed(f"method {method!r} calls {what} that is not there")
                touched = call.numbers(1, "i")
                if kind == 1:
                    kernels[operators[index]] += 1
                else:
                    delegate_calls += 1
            elif kind == 3:
                touched = (call.i32(0), call.i32(1))
            else:
                touched = (call.i32(0),)
                if kind == 4 and not 0 <= call.i32(1) <= count:
                    raise Malformed(f"method {method!r} jumps out of its instructions")
            if touched and not 0 <= min(touched) <= max(touched) < len(values):
                raise Malformed(f"method {method!r} uses a value outside of {len(values)} values")
            if kind in (1, 2):
                called = operators[index] if kind == 1 else None
                _check_arguments(called, tuple(values[one] for one in touched))
                used.update(touched)
            if kind == 3 or (kind == 1 and operators[index].startswith(_VIEW)):
                # These get the memory of another value when they run.
                placed.update(touched[-2:])
        for frames in chain.tables(3):
            for frame in frames.tables(0):
                frame.string(0), frame.string(2), frame.string(3)
    for one in used - placed:
        value = values[one]
        if isinstance(value, Tensor) and not value.placed:
            raise Malformed(f"method {method!r} uses value {one}, a tensor without memory")
    return dict(kernels), delegate_calls, total


def _check_arguments(operator: str | None, arguments: tuple[Value, ...]) -> None:
    """Refuse arguments that no call can have: the runtime ends the process over them.

    Args:
        operator: Name with overload; None for a call of a delegate.
        arguments: The values passed; those of an out variant end in the output and the result.
    """
    if operator is None:
        if any(isinstance(one, Null) for one in arguments):
            raise Malformed("a delegate is passed nothing in the place of a value")
        return
    overload = operator.rpartition(".")[2]
    if (overload == "out" or overload.endswith("_out")) and (
        not arguments or any(isinstance(one, (Null, Scalar)) for one in arguments[-2:])
    ):
        raise Malformed(f"operator {operator} has no tensor to write to")
