"""Programs by `transformers.exporters.ExecutorchExporter` from a `StaticCache`."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.engines import static_cache
from transformers import PreTrainedModel

CAPACITY = 32


def export_component(model: PreTrainedModel, step: int, planned: bool = False) -> Any:
    """One component that takes `step` tokens; `planned` keeps its inputs in the program's arena."""
    from transformers.exporters.exporter_executorch import ExecutorchConfig, ExecutorchExporter

    inputs: dict[str, Any] = {
        "input_ids": torch.ones(1, step, dtype=torch.int64),
        "cache": static_cache(model.config, CAPACITY),
    }
    if step == 1:
        # Its positions as an argument, those of the chunk from the counters: both must be right.
        inputs["position_ids"] = torch.zeros(1, 1, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = ExecutorchConfig(backend="xnnpack", alloc_graph_input=planned)
        return ExecutorchExporter().export(model, inputs, settings)


def save_components(directory: Path, components: dict[str, Any]) -> Path:
    """Write components as one artifact directory, as `ExportedModel.save_pretrained` does."""
    manifest: dict[str, Any] = {}
    for name, exported in components.items():
        exported.save_pretrained(directory / name)
        own = json.loads((directory / name / "export.json").read_text())
        (directory / name / "model.pte").rename(directory / f"{name}.pte")
        entry = own["components"]["model"] | {"file": f"{name}.pte"}
        manifest = manifest or own | {"components": {}}
        manifest["components"][name] = entry
    (directory / "export.json").write_text(json.dumps(manifest))
    return directory
