"""What a program promises: the facts of an I/O contract, where they stand, and their checks.

Imports nothing of ours but `errors`, and neither torch nor transformers.
"""

from staticlm.contract.facts import (
    DTYPE_BYTES,
    FLOAT_DTYPES,
    LABEL,
    VERSION,
    Cache,
    CacheKind,
    Contract,
    LogitsRows,
    Method,
    MethodRole,
    Part,
    Role,
    Slot,
    TensorSpec,
)

__all__ = [
    "DTYPE_BYTES",
    "FLOAT_DTYPES",
    "LABEL",
    "VERSION",
    "Cache",
    "CacheKind",
    "Contract",
    "LogitsRows",
    "Method",
    "MethodRole",
    "Part",
    "Role",
    "Slot",
    "TensorSpec",
]
