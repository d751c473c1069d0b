"""Small program files made by ExecuTorch itself."""

from __future__ import annotations

from typing import Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from torch import nn

CONSTANT_METHODS: dict[str, Any] = {
    "get_io_contract": "hf_static",
    "get_number": -3,
    "get_large": 1 << 40,
    "get_ratio": 1.5,
    "get_flag": True,
    "get_unset_flag": False,
    "get_empty": "",
    "get_ids": [1, 2, 3],
    "get_matrix": torch.arange(6.0).reshape(2, 3),
    "get_half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "get_zero_dim": torch.tensor(7, dtype=torch.int64),
    "get_bools": torch.tensor([True, False, True]),
}


class TiedHead(nn.Module):
    """Embedding, a mutated input, and a head that shares the embedding's weight."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(7, 3))
        self.embedding = nn.Embedding(vocab, width)
        self.middle = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Logits `[tokens, vocab]`; the embeddings are written to the first rows of `state`."""
        hidden = self.embedding(tokens)
        rows = torch.arange(hidden.shape[0])
        state.index_put_((rows,), hidden)
        hidden = hidden + torch.cumsum(self.shift, 0).sum()
        return self.head(self.middle(hidden)) + state.sum()


def tied_model(vocab: int = 61, width: int = 24, seed: int = 0) -> TiedHead:
    """A seeded model with random weights."""
    torch.manual_seed(seed)
    return TiedHead(vocab, width).eval().requires_grad_(False)


def tied_inputs(model: TiedHead, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Example inputs for a method of `tokens` tokens."""
    width = model.embedding.weight.shape[1]
    return torch.arange(tokens) * 3, torch.linspace(-1, 1, 8 * width).reshape(8, width)


def lower_tied(
    model: TiedHead, steps: dict[str, int], constants: dict[str, Any] | None = None
) -> bytes:
    """A program with one method per step, lowered to XNNPACK."""
    programs = {
        name: torch.export.export(model, tied_inputs(model, tokens))
        for name, tokens in steps.items()
    }
    edge = to_edge_transform_and_lower(
        programs, partitioner=[XnnpackPartitioner()], constant_methods=constants
    )
    return bytes(edge.to_executorch().buffer)


def lower_add(constants: dict[str, Any] | None = None) -> bytes:
    """`x + x` with portable kernels; without constants it has no data and no extended header."""

    class Add(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x

    exported = torch.export.export(Add(), (torch.zeros(1, 3),))
    edge = to_edge_transform_and_lower({"forward": exported}, constant_methods=constants)
    return bytes(edge.to_executorch().buffer)
