"""A program with one fact changed, written again without exporting anything."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from executorch.exir._serialize._program import (
    PTEFile,
    deserialize_pte_binary,
    serialize_pte_binary,
)
from executorch.exir.schema import AllocationDetails, Bool, EValue, Int, String

from staticlm.contract.metadata import KEY_LAYOUT

Constant = int | bool | str


class Editor:
    """Changes constant methods and tensor metadata of a program.

    Args:
        file: A program as `deserialize_pte_binary` reads it; changed in place.
    """

    def __init__(self, file: PTEFile) -> None:
        self._file = file
        self._plans = file.program.execution_plan

    def drop(self, name: str) -> None:
        """Remove a method or constant method."""
        self._plans.remove(self._plan(name))

    def put(self, name: str, *values: Constant) -> None:
        """Replace what a constant method returns."""
        plan = self._plan(name)
        plan.values = [EValue(_value(value)) for value in values]
        plan.outputs = list(range(len(values)))

    def layout(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the layout's JSON object."""
        plan = self._plan(KEY_LAYOUT)
        body = json.loads(plan.values[plan.outputs[0]].val.string_val)
        change(body)
        self.put(KEY_LAYOUT, json.dumps(body, separators=(",", ":")))

    def plan_input(self, method: str, index: int) -> None:
        """Give an input a place in the method's arena, as a careless export does."""
        tensor = self._tensor(method, index)
        tensor.allocation_info = AllocationDetails(1, 0, 0)

    def retype_input(self, method: str, index: int, sizes: list[int]) -> None:
        """Change the shape of an input, its bytes staying what they were."""
        self._tensor(method, index).sizes = sizes

    def repeat_input(self, method: str, index: int) -> None:
        """Append an input to a method's signature that is one of the others once more."""
        inputs = self._plan(method).inputs
        inputs.append(inputs[index])

    def _plan(self, name: str) -> Any:
        return next(plan for plan in self._plans if plan.name == name)

    def _tensor(self, method: str, index: int) -> Any:
        plan = self._plan(method)
        return plan.values[plan.inputs[index]].val


def _value(value: Constant) -> Any:
    if isinstance(value, bool):
        return Bool(value)
    return Int(value) if isinstance(value, int) else String(value)


class Template:
    """A program that variants are made of; read once."""

    def __init__(self, path: Path) -> None:
        self._file = deserialize_pte_binary(path.read_bytes())

    def write(self, path: Path, edit: Callable[[Editor], None]) -> None:
        """Write the program with an edit."""
        file = copy.deepcopy(self._file)
        edit(Editor(file))
        path.write_bytes(bytes(serialize_pte_binary(file)))
