"""What a lowered program computes outside its delegates, and what keeps it there."""

from __future__ import annotations

from dataclasses import dataclass

from staticlm.contract.program import ProgramFacts

_TABLE = "a table lookup: no delegate takes it"
_WRITE = "a cache write in place: the memory is the caller's"
_INTEGERS = "integers or booleans: positions, masks, routing"
_ROUTING = "routing by value"

_REASONS = {
    "embedding": _TABLE,
    "embedding_byte": _TABLE,
    "embedding_4bit": _TABLE,
    "index": "rows chosen by a tensor",
    "index_select": "rows chosen by a tensor",
    "index_put_": _WRITE,
    "index_put": _WRITE,
    "lt": _INTEGERS,
    "gt": _INTEGERS,
    "ge": _INTEGERS,
    "eq": _INTEGERS,
    "ne": _INTEGERS,
    "logical_and": _INTEGERS,
    "remainder": _INTEGERS,
    "_to_dim_order_copy": "a cast: between integers and floats, or of a cache",
    "topk": _ROUTING,
    "scatter": _ROUTING,
    "where": _ROUTING,
    "unsqueeze_copy": "a dimension added elsewhere than at the end",
    "select_copy": "a dimension dropped",
    "split_with_sizes_copy": "several outputs",
}


@dataclass(frozen=True)
class Outside:
    """An operator that the portable kernels compute.

    Args:
        method: The method.
        operator: `namespace::name.overload`.
        count: Calls per run of the method.
        reason: What keeps it outside.
    """

    method: str
    operator: str
    count: int
    reason: str


def outside_delegates(facts: ProgramFacts) -> tuple[Outside, ...]:
    """Operators outside delegates of every method, the most frequent first."""
    found = []
    for name, method in facts.methods.items():
        ranked = sorted(method.operators.items(), key=lambda item: (-item[1], item[0]))
        found += [Outside(name, op, count, _reason(op)) for op, count in ranked]
    return tuple(found)


def _reason(operator: str) -> str:
    short = operator.rpartition("::")[2].partition(".")[0]
    return _REASONS.get(short, "the backend's partitioner did not take it")
