"""Which attention mode is faster, by backend, tokens per call and slots read.

    python benchmarks/attention.py [--backend xnnpack] [--rounds 5] [--threads 2]

The rows that it prints are the ones recorded in `staticlm.lowering.attention_choice`. Each is the time
of one layer's share of a call: a model of `LAYERS` layers with SmolLM2's heads and hardly anything but
attention, the modes in turn, medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers

import staticlm
from staticlm.export.options import ExportOptions
from staticlm.lowering.backends import get_backend
from staticlm.runtime.plan import Call

LAYERS = 4
SHAPES = ((1, 256), (1, 1024), (1, 4096), (128, 256), (128, 1024), (128, 4096))
CALLS = {1: 60, 128: 8}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend", default="xnnpack")
    arguments = parser.parse_args()
    modes = get_backend(arguments.backend).attention_modes
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=576,
        intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as work:
        for slots in sorted({slots for _, slots in SHAPES}):
            paths = {mode: Path(work) / f"{mode}-{slots}" for mode in modes}
            for mode, path in paths.items():
                options = ExportOptions(
                    context_length=slots,
                    prefill_lengths=(128,),
                    attention=mode,
                    prefixes=(),
                )
                staticlm.export_model(model, path, options, backend=arguments.backend)
            for step in sorted({step for step, s in SHAPES if s == slots}):
                times: dict[str, list[float]] = {mode: [] for mode in modes}
                for _ in range(arguments.rounds):
                    for mode, path in paths.items():
                        times[mode].append(_measure(path, step, slots, arguments.threads))
                found = ", ".join(f"{statistics.median(times[mode]):.3f}" for mode in modes)
                print(f"    Timing({step}, {slots}, {found}),", flush=True)


def _measure(path: Path, step: int, slots: int, threads: int) -> float:
    """Median milliseconds of a call at the end of the caches, by layer."""
    with staticlm.load(path, threads=threads) as runner:
        manager, methods = runner.session._manager, runner.contract.methods
        name = next(m.name for m in methods if m.step == step)
        call = Call(name, slots - step, step, step)
        spent = []
        for _ in range(CALLS[step] + 2):
            begun = time.perf_counter()
            manager.step(call, [1] * step)
            spent.append(time.perf_counter() - begun)
    return statistics.median(spent[2:]) * 1000 / LAYERS


if __name__ == "__main__":
    main()
