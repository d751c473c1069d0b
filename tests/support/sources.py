"""What a program is made by, as one hash."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("contract", "export", "lowering", "build.py", "demo.py")


@functools.cache
def source_stamp() -> str:
    """Changes with every source of the export."""
    digest = hashlib.sha256()
    package = ROOT / "src" / "staticlm"
    for name in SOURCES:
        path = package / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            digest.update(str(file.relative_to(ROOT)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
