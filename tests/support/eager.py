"""The fixed-shape methods of a model, driven in eager mode and compared with the model itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from staticlm.contract import Contract, LogitsRows
from staticlm.export.decoder import StaticDecoder
from staticlm.export.options import ExportOptions
from staticlm.export.programs import plan_contract, plan_methods
from staticlm.export.selfcheck import drive_methods
from staticlm.export.static_form import use_static_form
from staticlm.export.traits import ModelTraits, inspect_model


@dataclass(frozen=True)
class Static:
    """A model and its methods; prefill returns all rows."""

    model: PreTrainedModel
    traits: ModelTraits
    contract: Contract
    decoders: dict[str, StaticDecoder]

    def tokens(self, seed: int = 0) -> torch.Tensor:
        """Random tokens, as many as fit."""
        generator = torch.Generator().manual_seed(seed)
        size = (1, self.contract.max_context_len)
        return torch.randint(0, self.contract.vocab_size, size, generator=generator)

    def rows(self, tokens: torch.Tensor, counts: Sequence[int], pad: int = 0) -> torch.Tensor:
        """float32 logits of every row: calls of `counts` tokens, then single tokens to the end.

        Each call takes the method that reads least.
        """
        prefill, decode = self.contract.prefills[0], self.contract.decode
        rest = tokens.shape[1] - sum(counts)
        chunks, position = [], 0
        for like, count in [*((prefill, n) for n in counts), *((decode, 1) for _ in range(rest))]:
            chunks.append((self.contract.at(like, position).name, count))
            position += count
        with torch.no_grad(), use_static_form(self.model):
            logits, rows = drive_methods(self.decoders, self.contract, tokens, chunks, pad)
        assert rows == list(range(tokens.shape[1]))
        return logits

    def source(self, tokens: torch.Tensor) -> torch.Tensor:
        """float32 logits of every row from the model's own forward."""
        with torch.no_grad():
            logits: torch.Tensor = self.model(input_ids=tokens, use_cache=False).logits[0].float()
        return logits


def static(
    model: PreTrainedModel, capacity: int, chunk: int, mode: str = "split", **options: Any
) -> Static:
    """The methods of a model for a capacity and a prefill length."""
    chosen = ExportOptions(
        context_length=capacity, prefill_lengths=(chunk,), logits=LogitsRows.ALL, **options
    )
    traits = inspect_model(model, capacity)
    plans = plan_methods(chosen, lambda method: mode)
    contract = plan_contract(traits, chosen, plans, bos_id=None, eos_ids=(), producers={})
    decoders = {
        plan.name: StaticDecoder(model, traits, contract.caches, capacity, plan).eval()
        for plan in plans
    }
    return Static(model, traits, contract, decoders)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, relative to the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def chunk_counts(capacity: int, chunk: int, seed: int = 0) -> list[int]:
    """Full and short calls, in a mixed order, that leave some tokens for decode."""
    generator = torch.Generator().manual_seed(seed)
    counts: list[int] = []
    position = 0
    while position + chunk <= capacity - 2:
        full = int(torch.randint(0, 2, (1,), generator=generator))
        short = int(torch.randint(1, chunk + 1, (1,), generator=generator))
        counts.append(chunk if full else short)
        position += counts[-1]
    return counts
