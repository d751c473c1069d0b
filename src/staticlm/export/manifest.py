"""`export.json`: what `transformers.exporters.ExportedModel` reads of an artifact directory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from staticlm.contract import LABEL, Contract
from staticlm.export.options import ExportOptions

SCHEMA = 1
"""Schema of `export.json` that transformers 5.24 writes and reads."""

COMPONENT = "model"
"""Name of the one component; its program holds all methods."""

PROGRAM = "model.pte"


def build_metadata(
    model: PreTrainedModel, contract: Contract, options: ExportOptions, backend: str
) -> dict[str, Any]:
    """The fields of transformers' `ExportMetadata` for our one component.

    Args:
        model: The source model; its class and the class that its forward returns are recorded.
        contract: The contract of the program.
        options: What the user chose.
        backend: The backend specification.
    """
    tokens = {"rank": 2, "shape": [1, contract.max_seq_len], "dtype": "int64"}
    example = torch.zeros((1, 1), dtype=torch.int64)
    _, in_spec = pytree.tree_flatten(((), {"input_ids": example}))
    return {
        "architecture": type(model).__name__,
        "packages": dict(contract.producers),
        "export_config": {
            "export_format": LABEL,
            "context_length": options.context_length,
            "prefill_lengths": list(options.prefill_lengths),
            "dtype": options.dtype,
            "cache_dtype": options.cache_dtype or options.dtype,
            "attention": options.attention,
            "logits": options.logits.value,
            "verify_length": options.verify_length,
            "prefixes": list(options.prefixes or ()),
            "quantize": options.quantize,
            "quantize_embedding": options.quantize_embedding,
            "backend": backend,
        },
        "export_dtype": options.dtype,
        "export_device": "cpu",
        # What the runner takes; transformers drops every other argument with a warning.
        "kwargs": {
            "input_ids": tokens,
            "attention_mask": tokens,
            "logits_to_keep": {"container": "int"},
        },
        "in_spec": pytree.treespec_dumps(in_spec),
        "out_spec": pytree.treespec_dumps(_output_spec(model)),
        "in_constants": {},
        "out_constants": [],
    }


def _output_spec(model: PreTrainedModel) -> Any:
    """Structure of what the source's forward returns, with the logits alone."""
    with torch.no_grad():
        out = model(
            input_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device), use_cache=False
        )
    return pytree.tree_flatten(type(out)(logits=out.logits))[1]


def write_manifest(
    directory: Path, metadata: dict[str, Any], tokenizer_size: int | None = None
) -> None:
    """Write `export.json` beside the program.

    Args:
        directory: The artifact directory.
        metadata: See `build_metadata`.
        tokenizer_size: Largest token id of the tokenizer plus one, by which a runner knows a wrong
            tokenizer; None without a tokenizer. A `tokenizer.json` that is there already is recorded
            by its hash.
    """
    manifest: dict[str, Any] = {
        "schema_version": SCHEMA,
        "export_format": LABEL,
        "components": {COMPONENT: {"file": PROGRAM, "metadata": metadata}},
    }
    if tokenizer_size is not None:
        manifest["tokenizer_size"] = tokenizer_size
    tokenizer = directory / "tokenizer.json"
    if tokenizer.is_file():
        manifest["tokenizer_sha256"] = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    text = json.dumps(manifest, indent=2) + "\n"
    (directory / "export.json").write_text(text, encoding="utf-8")
