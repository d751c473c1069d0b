"""A GGUF file as a float32 Hugging Face folder: python unpack.py FILE.gguf FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Load, forget that it was quantised, save."""
    file, folder = Path(sys.argv[1]), Path(sys.argv[2])
    given = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)
    # save_pretrained refuses a configuration that names a quantisation.
    settings = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    plain = type(model)(type(model.config)(**settings))
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **given).save_pretrained(folder)


if __name__ == "__main__":
    main()
