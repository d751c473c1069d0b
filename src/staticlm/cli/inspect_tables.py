"""The tables that `staticlm inspect` prints for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table

_FEW = 8


def print_tables(found: dict[str, Any], console: Console | None = None) -> None:
    """Print a description made by `staticlm.cli.inspect.describe`."""
    console = console or Console(soft_wrap=False)
    console.print(f"{escape(found['path'])}  {size(found['bytes'])}", highlight=False)
    tables = [_summary(found), _methods(found["methods"])]
    if any(method["attention_why"] for method in found["methods"]):
        tables.append(_attention(found["methods"]))
    tables += [_slot_table(method) for method in found["methods"]]
    if found["caches"]:
        tables.append(_caches(found["caches"]))
    tables.append(_outside(found["methods"]))
    if "loaded" in found:
        tables.append(_loaded(found["loaded"]))
    for table in tables:
        console.print(table)
        console.print()
    for warning in found["warnings"]:
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}", highlight=False)
    if found["contract_problem"]:
        message = escape(found["contract_problem"]["message"])
        console.print(f"[red]contract:[/red] {message}", highlight=False)


def size(nbytes: int) -> str:
    """Bytes for people, in decimal units."""
    if nbytes < 1000:
        return f"{nbytes} B"
    amount = float(nbytes)
    for unit in ("kB", "MB", "GB"):
        amount /= 1000
        if amount < 999.95 or unit == "GB":
            break
    return f"{amount:.1f} {unit}"


def _table(title: str, *columns: str, right: Iterable[int] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        side: JustifyMethod = "right" if index in set(right) else "left"
        table.add_column(column, justify=side, overflow="fold")
    return table


def _summary(found: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("dialect", found["dialect"])
    contract = found["contract"]
    if contract:
        table.add_row("contract", f"{escape(contract['label'])} version {contract['version']}")
        table.add_row("context", f"{contract['max_context_len']} tokens")
        table.add_row("vocabulary", str(contract["vocab_size"]))
        ends = ", ".join(map(str, contract["eos_ids"])) or "none"
        table.add_row("begin, end ids", f"{contract['bos_id']}; {ends}")
    else:
        for key, value in found["metadata"].items():
            table.add_row(escape(key), escape(_short(value)))
    weights = found["weights"]
    table.add_row(
        "weights",
        f"{size(weights['constant_bytes'])} constants, {size(weights['named_bytes'])} in "
        f"{weights['named_blobs']} named blobs; {size(weights['stored_bytes'])} in "
        f"{weights['segments']} segments",
    )
    shared = weights["segment_bytes"] - weights["stored_bytes"]
    if shared:
        table.add_row("stored once", f"{size(shared)} that two segments share")
    if weights["repeated_bytes"]:
        table.add_row("stored twice", size(weights["repeated_bytes"]))
    if weights["external"]:
        table.add_row("in other files", f"{len(weights['external'])} tensors")
    if found["caches"]:
        count = len(found["caches"]["entries"])
        table.add_row("caches", f"{size(found['caches']['bytes'])} in {count} tensors")
    if found["producers"]:
        table.add_row(
            "made with",
            escape(", ".join(f"{name} {version}" for name, version in found["producers"].items())),
        )
    return table


def _methods(methods: list[dict[str, Any]]) -> Table:
    table = _table(
        "Methods",
        *(
            "name",
            "role",
            "step",
            "reads",
            "logits",
            "attention",
            "delegates",
            "calls",
            "outside",
            "arenas",
        ),
        right=(2, 3, 7, 8, 9),
    )
    for method in methods:
        delegates = ", ".join(
            f"{one['count']} {escape(one['backend'])} ({size(one['bytes'])})"
            for one in method["delegates"]
        )
        table.add_row(
            escape(method["name"]),
            method["role"] or "-",
            str(method["step"] or "-"),
            "all" if method["max_start"] is None else str(method["max_start"]),
            method["logits_rows"] or "-",
            escape(method["attention"] or "-"),
            delegates or "none",
            str(method["delegate_calls"]),
            str(sum(method["operators"].values())),
            size(sum(method["arena_bytes"])),
        )
    return table


def _attention(methods: list[dict[str, Any]]) -> Table:
    """Why each attention mode was chosen; methods of one reason share a line."""
    table = _table("Attention", "methods", "mode", "chosen because")
    reasons: dict[tuple[str, str], list[str]] = {}
    for method in methods:
        if method["attention_why"]:
            key = (method["attention"] or "-", method["attention_why"])
            reasons.setdefault(key, []).append(method["name"])
    for (mode, why), names in reasons.items():
        table.add_row(escape(", ".join(names)), escape(mode), escape(why))
    return table


def _slot_table(method: dict[str, Any]) -> Table:
    """Slots of a method; runs of slots of one role and shape share a line."""
    table = _table(
        f"Slots of {escape(method['name'])}", "", "index", "role", "dtype", "shape", "memory"
    )
    for side, name in (("inputs", "in"), ("outputs", "out")):
        groups: dict[tuple[str, ...], list[int]] = {}
        for slot in method[side]:
            memory = "-"
            if slot["dtype"] is not None:
                memory = "arena" if slot["planned"] else "caller"
            shape = "-" if slot["shape"] is None else str(slot["shape"])
            if slot["dynamic"]:
                shape = f"up to {shape}"
            key = (slot["role"] or "-", slot["dtype"] or "not a tensor", shape, memory)
            groups.setdefault(key, []).append(slot["index"])
        for (role, dtype, shape, memory), indexes in groups.items():
            table.add_row(name, _ranges(indexes), role, dtype, escape(shape), memory)
    return table


def _caches(caches: dict[str, Any]) -> Table:
    table = _table(
        "Caches", "layers", "parts", "kind", "window", "dtype", "shape", "bytes", right=(6,)
    )
    groups: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for cache in caches["entries"]:
        key = (cache["kind"], cache["window"], cache["dtype"], str(cache["shape"]))
        groups.setdefault(key, []).append(cache)
    for (kind, window, kept_as, shape), members in groups.items():
        table.add_row(
            _ranges(sorted({member["layer"] for member in members})),
            ", ".join(dict.fromkeys(member["part"] for member in members)),
            str(kind),
            str(window or "-"),
            str(kept_as),
            escape(str(shape)),
            size(sum(member["bytes"] for member in members)),
        )
    return table


def _outside(methods: list[dict[str, Any]]) -> Table:
    table = _table(
        "Kernel calls outside of delegates",
        "operator",
        *(escape(method["name"]) for method in methods),
        right=range(1, len(methods) + 1),
    )
    total: Counter[str] = Counter()
    for method in methods:
        total.update(method["operators"])
    for operator, _ in total.most_common():
        counts = (str(method["operators"].get(operator, "-")) for method in methods)
        table.add_row(escape(operator), *counts)
    return table


def _loaded(loaded: dict[str, Any]) -> Table:
    table = _table(
        f"Loaded in {loaded['load_seconds']:.2f} s by {escape(loaded['driver'])}",
        *("buffers", "bytes", "allocator"),
        right=(0, 1),
    )
    groups: dict[str, list[int]] = {}
    for buffer in loaded["buffers"]:
        groups.setdefault(buffer["allocator"], []).append(buffer["bytes"])
    for allocator, sizes in groups.items():
        table.add_row(str(len(sizes)), size(sum(sizes)), escape(allocator))
    return table


def _ranges(indexes: list[int]) -> str:
    """`0-2, 5` for 0, 1, 2, 5; cut where there are many."""
    runs: list[list[int]] = []
    for index in indexes:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    if len(parts) > _FEW:
        return f"{', '.join(parts[:_FEW])}, ... ({len(indexes)})"
    return ", ".join(parts)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
