"""One adapter for each peer: load, then time a prompt and a continuation.

Every adapter is a generator function `(path, threads, options)`. It yields once when it is loaded,
then answers each `(ids, count)` that is sent to it with `(prefill seconds, decode seconds)`: the
time to the first token after `ids`, and the time for `count` more, each chosen greedily and fed back.
Everything is forgotten between two answers. Only this file knows the peers' own interfaces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

Times = tuple[float, float]
Engine = Generator["Times | None", "tuple[list[int], int]", None]
now = time.perf_counter


def staticlm(path: str, threads: int, options: dict[str, Any]) -> Engine:
    """Ours: the runner's session, native driver where it is built."""
    import numpy as np

    import staticlm

    runner = staticlm.load(path, threads=threads, driver=options.get("driver", "auto"))
    session = runner.session
    times: Times | None = None
    while True:
        ids, count = yield times
        session.reset()
        session.prepare(len(ids))
        begun = now()
        token = int(np.argmax(session.prefill(ids)))
        first = now()
        for _ in range(count):
            token = int(np.argmax(session.step(token)))
        times = first - begun, now() - first


def transformers(path: str, threads: int, options: dict[str, Any]) -> Engine:
    """transformers, eager: a forward loop over a dynamic cache, logits of the last row only."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(threads)
    dtype = getattr(torch, options.get("dtype", "float32"))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    times: Times | None = None
    with torch.inference_mode():
        while True:
            ids, count = yield times
            cache = DynamicCache(config=model.config)

            def step(tokens: list[int], cache: Any = cache) -> int:
                out = model(torch.tensor([tokens]), cache=cache, use_cache=True, logits_to_keep=1)
                return int(out.logits[0, -1].argmax())

            begun = now()
            token = step(ids)
            first = now()
            for _ in range(count):
                token = step([token])
            times = first - begun, now() - first


def executorch(path: str, threads: int, options: dict[str, Any]) -> Engine:
    """A program of ExecuTorch's own `export_llm`: tokens and the start position in, logits out."""
    import executorch.kernels.quantized  # noqa: F401
    import torch
    from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401
    from executorch.extension.pybindings import portable_lib as lib

    lib._unsafe_reset_threadpool(threads)
    module = lib._load_for_executorch(path)
    chunk = int(module.run_method("get_max_seq_len", [])[0])
    times: Times | None = None
    while True:
        ids, count = yield times

        def step(tokens: list[int], position: int) -> int:
            inputs = (torch.tensor([tokens]), torch.tensor([position]))
            return int(module.run_method("forward", inputs, False)[0].flatten(0, -2)[-1].argmax())

        begun = now()
        token = 0
        for start in range(0, len(ids), chunk):
            token = step(ids[start : start + chunk], start)
        first = now()
        for index in range(count):
            token = step([token], len(ids) + index)
        times = first - begun, now() - first


def static_cache(config: Any, context: int) -> Any:
    """A `StaticCache` of transformers with tensors in it."""
    import torch
    from transformers import StaticCache

    cache = StaticCache(config=config, max_cache_len=context)
    cache.early_initialization(
        batch_size=1,
        num_heads=config.num_key_value_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        dtype=torch.float32,
        device="cpu",
    )
    return cache


def transformers_executorch(path: str, threads: int, options: dict[str, Any]) -> Engine:
    """transformers' own ExecuTorch exporter and runner: one program for each length."""
    import torch
    from executorch.extension.pybindings import portable_lib as lib
    from transformers import AutoConfig
    from transformers.exporters.base import ExportedModel

    lib._unsafe_reset_threadpool(threads)
    torch.set_num_threads(threads)
    parts = {int(one.name): one for one in Path(path).iterdir() if one.name.isdecimal()}
    models = {length: ExportedModel.from_pretrained(one) for length, one in parts.items()}
    config = AutoConfig.from_pretrained(parts[1])
    times: Times | None = None
    while True:
        ids, count = yield times
        cache = static_cache(config, options.get("context", 1024))

        def step(tokens: list[int]) -> int:
            nonlocal cache
            with torch.inference_mode():
                out = models[len(tokens)](input_ids=torch.tensor([tokens]), cache=cache)
            cache = out.cache
            return int(out.logits[0, -1].argmax())

        begun = now()
        token, longest, rest = 0, max(models), list(ids)
        while rest:
            size = longest if len(rest) >= longest else 1
            token = step(rest[:size])
            rest = rest[size:]
        first = now()
        for _ in range(count):
            token = step([token])
        times = first - begun, now() - first


def llamacpp(path: str, threads: int, options: dict[str, Any]) -> Engine:
    """llama.cpp through its C interface, flash attention on."""
    import ctypes

    import llama_cpp as c
    import numpy as np

    @c.llama_log_callback
    def quiet(*_: Any) -> None:
        pass

    c.llama_log_set(quiet, ctypes.c_void_p(0))
    c.llama_backend_init()
    model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {path}")
    params = c.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = options.get("context", 1024), 512, 512
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = 1
    context = c.llama_init_from_model(model, params)
    width = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    logits = (ctypes.c_float * width).from_address

    def step(tokens: list[int]) -> int:
        ids = (c.llama_token * len(tokens))(*tokens)  # the batch only points at it
        status = c.llama_decode(context, c.llama_batch_get_one(ids, len(tokens)))
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        address = ctypes.addressof(c.llama_get_logits_ith(context, -1).contents)
        return int(np.argmax(np.frombuffer(logits(address), dtype=np.float32)))

    times: Times | None = None
    while True:
        ids, count = yield times
        c.llama_memory_clear(c.llama_get_memory(context), True)
        begun = now()
        token = 0
        for start in range(0, len(ids), 512):
            token = step(ids[start : start + 512])
        first = now()
        for _ in range(count):
            token = step([token])
        times = first - begun, now() - first


def ctranslate2(path: str, threads: int, options: dict[str, Any]) -> Engine:
    """CTranslate2: decode is the time of a whole generation less that of one token."""
    import json

    import ctranslate2

    words = json.loads((Path(path) / "vocabulary.json").read_text())
    generator = ctranslate2.Generator(
        path,
        device="cpu",
        intra_threads=threads,
        inter_threads=1,
        compute_type=options.get("compute", "default"),
    )

    def generate(ids: list[int], count: int) -> float:
        begun = now()
        generator.generate_batch(
            [[words[one] for one in ids]],
            max_length=count,
            min_length=count,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return now() - begun

    times: Times | None = None
    while True:
        ids, count = yield times
        prefill = generate(ids, 1)
        times = prefill, (generate(ids, count + 1) - prefill if count else 0.0)


def openvino(path: str, threads: int, options: dict[str, Any]) -> Engine:
    """OpenVINO GenAI's pipeline, by its own figures: time to first token, time per later one."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
    if "precision" in options:
        settings["INFERENCE_PRECISION_HINT"] = options["precision"]
    pipeline = genai.LLMPipeline(path, "CPU", **settings)
    times: Times | None = None
    while True:
        ids, count = yield times
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = count + 1
        config.ignore_eos = True
        config.do_sample = False
        tokens = ov.Tensor(np.array([ids], dtype=np.int64))
        inputs = genai.TokenizedInputs(tokens, ov.Tensor(np.ones((1, len(ids)), dtype=np.int64)))
        metrics = pipeline.generate(inputs, config).perf_metrics
        decode = metrics.get_tpot().mean * count / 1000 if count else 0.0
        times = metrics.get_ttft().mean / 1000, decode


ENGINES: dict[str, Callable[[str, int, dict[str, Any]], Engine]] = {
    one.__name__: one
    for one in (
        *(staticlm, transformers, transformers_executorch, executorch),
        *(llamacpp, ctranslate2, openvino),
    )
}
