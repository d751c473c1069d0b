"""A Hugging Face folder as programs by transformers' own ExecuTorch exporter, one for each length.

python transformers_exporter.py FOLDER OUT CONTEXT LENGTH [LENGTH ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from engines import static_cache
from transformers import AutoModelForCausalLM
from transformers.exporters.exporter_executorch import ExecutorchConfig, ExecutorchExporter


def main() -> None:
    """Write `OUT/LENGTH` for every length."""
    folder, to, context, *lengths = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for length in map(int, lengths):
        inputs = {
            "input_ids": torch.ones(1, length, dtype=torch.int64),
            "cache": static_cache(model.config, int(context)),
        }
        exported = ExecutorchExporter().export(model, inputs, ExecutorchConfig(backend="xnnpack"))
        exported.save_pretrained(Path(to) / str(length))


if __name__ == "__main__":
    main()
