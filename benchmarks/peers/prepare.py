"""Every form of the model that the peers need, made once from one float32 folder.

    python benchmarks/peers/prepare.py MODEL [-o artifacts/peers] [--only NAME ...]

MODEL is a Hugging Face folder, or a GGUF file that transformers reads. What is there is kept; each
form is made by its own tool in a process of its own. Forms that fail are named, and the rest are made.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PEERS = Path(os.environ.get("VENV_PEERS", ROOT / ".venv-peers")) / "bin"
CONTEXT, CHUNKS, VERIFY = 1024, (128, 512), 8

Make = Callable[[Path, Path], list[list[str]]]


def ours(*options: str) -> Make:
    """`staticlm export` with options."""
    lengths = ["--context-length", str(CONTEXT)]
    lengths += [word for chunk in CHUNKS for word in ("--prefill-length", str(chunk))]
    return lambda source, to: [
        [sys.executable, "-m", "staticlm", "export", str(source), "-o", str(to), *lengths, *options]
    ]


def gguf(kind: str) -> Make:
    """A GGUF file, without a tokenizer."""
    return lambda source, to: [
        [sys.executable, str(HERE / "write_gguf.py"), str(source), str(to), kind]
    ]


def ctranslate2(quantization: str) -> Make:
    """CTranslate2's converter."""
    return lambda source, to: [
        [
            *(str(PEERS / "ct2-transformers-converter"), "--model", str(source)),
            *("--output_dir", str(to), "--quantization", quantization, "--force"),
        ]
    ]


def openvino(weights: str, *options: str) -> Make:
    """optimum-intel's exporter."""
    return lambda source, to: [
        [
            *(str(PEERS / "optimum-cli"), "export", "openvino", "--model", str(source)),
            *("--task", "text-generation-with-past", "--weight-format", weights, *options, str(to)),
        ]
    ]


def executorch(*options: str) -> Make:
    """ExecuTorch's own `export_llm`, with its custom attention."""

    def make(source: Path, to: Path) -> list[list[str]]:
        checkpoint, params = to.with_name("executorch.pth"), to.with_name("executorch.json")
        script = str(HERE / "executorch_checkpoint.py")
        export = [
            *(sys.executable, "-m", "executorch.extension.llm.export.export_llm"),
            *("base.model_class=smollm2", f"base.checkpoint={checkpoint}"),
            *(f"base.params={params}", "model.use_kv_cache=True"),
            *("model.use_sdpa_with_kv_cache=True", "backend.xnnpack.enabled=True"),
            *("backend.xnnpack.extended_ops=True", f"export.max_context_length={CONTEXT}"),
            *(f"export.max_seq_length={CONTEXT}", "model.dtype_override=fp32"),
            *(f"export.output_name={to}", *options),
        ]
        return [[sys.executable, script, str(source), str(checkpoint), str(params)], export]

    return make


def transformers_executorch(source: Path, to: Path) -> list[list[str]]:
    """transformers' own exporter, a program for a chunk and one for a token."""
    script = str(HERE / "transformers_exporter.py")
    return [[sys.executable, script, str(source), str(to), str(CONTEXT), str(CHUNKS[0]), "1"]]


FORMS: dict[str, Make] = {
    "staticlm-float32": ours("--verify-length", str(VERIFY)),
    "staticlm-int8": ours("--quantize", "int8", "--quantize-embedding", "8"),
    "staticlm-8da4w": ours("--quantize", "8da4w", "--quantize-embedding", "8"),
    "transformers-executorch": transformers_executorch,
    "llamacpp-f32.gguf": gguf("F32"),
    "llamacpp-q8_0.gguf": gguf("Q8_0"),
    "llamacpp-q4_0.gguf": gguf("Q4_0"),
    "ctranslate2-float32": ctranslate2("float32"),
    "ctranslate2-int8": ctranslate2("int8"),
    "openvino-fp32": openvino("fp32"),
    "openvino-int8": openvino("int8"),
    "openvino-int4": openvino("int4", "--group-size", "32"),
    "executorch-fp32.pte": executorch(),
    "executorch-8da8w.pte": executorch("quantization.pt2e_quantize=xnnpack_dynamic"),
    "executorch-8da4w.pte": executorch(
        "quantization.qmode=8da4w",
        "quantization.group_size=32",
        "quantization.embedding_quantize='8,0'",
    ),
}


def main() -> int:
    """Make what is missing; 1 when something could not be made."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "artifacts" / "peers")
    parser.add_argument("--only", nargs="+", choices=FORMS, default=list(FORMS))
    arguments = parser.parse_args()
    output: Path = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    source = _folder(arguments.model.resolve(), output)
    failed = []
    for name in arguments.only:
        target = output / name
        if target.exists():
            continue
        partial = output / f"making-{name}"
        _remove(partial)
        for command in FORMS[name](source, partial):
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
            )
            if done.returncode:
                print(f"{name}: failed\n{done.stderr[-1500:]}", file=sys.stderr)
                failed.append(name)
                break
        else:
            partial.rename(target)
            print(f"{name}: made", file=sys.stderr)
    return int(bool(failed))


def _folder(model: Path, output: Path) -> Path:
    """A float32 folder without a quantisation note in its configuration."""
    if model.is_dir():
        return model
    folder = output / "source"
    if not (folder / "config.json").exists():
        subprocess.run(
            [sys.executable, str(HERE / "unpack.py"), str(model), str(folder)], check=True
        )
    return folder


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()


if __name__ == "__main__":
    sys.exit(main())
