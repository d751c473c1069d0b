"""Artifact directories around toy programs, with tokenizers made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.toy_programs import Toy, write_toy
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
BYTE_TOY = Toy(capacity=64, steps=(16,), vocab=264, eos=257)
"""A toy wide enough for `byte_tokenizer`."""


def byte_tokenizer() -> Tokenizer:
    """One token per byte (ids 0 to 255), `<s>` 256 and `</s>` 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return tokenizer


def write_texts(directory: Path, tokenizer: Tokenizer | None = None, **config: Any) -> None:
    """Write tokenizer, chat template and configurations; `config` goes to `config.json`."""
    (tokenizer or byte_tokenizer()).save(str(directory / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}},
        "config.json": {"vocab_size": BYTE_TOY.vocab, **config},
        "generation_config.json": {"eos_token_id": [257]},
    }
    for name, body in files.items():
        (directory / name).write_text(json.dumps(body))
    (directory / "chat_template.jinja").write_text(TEMPLATE)


def write_artifact(directory: Path, toy: Toy = BYTE_TOY) -> Path:
    """A whole artifact directory."""
    directory.mkdir(parents=True, exist_ok=True)
    write_toy(directory / "model.pte", toy)
    write_texts(directory)
    return directory
