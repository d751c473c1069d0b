"""`staticlm generate`: text to standard output as it comes, figures to standard error."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from staticlm.cli import INTERRUPTED
from staticlm.errors import Code, UsageError
from staticlm.runtime.generation import Generation, Stream
from staticlm.runtime.runner import Prompt, Runner, load
from staticlm.runtime.stats import RunnerStats


def run(
    artifact: Annotated[Path, typer.Argument(help="Artifact directory, or a .pte file.")],
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A UTF-8 file with the prompt; - is standard input.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt through the model's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="A system message; implies --chat.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="New tokens at most; default: up to the context length.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k largest logits; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep this much probability; 1 keeps all.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens below this fraction of the best; 0 drops none.")
    ] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is without effect.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the text before this; may be repeated.")
    ] = None,
    ignore_end: Annotated[
        bool, typer.Option("--ignore-end", help="Go on after the model's end tokens.")
    ] = False,
    speculate: Annotated[
        str | None,
        typer.Option(
            help="prompt-lookup: check guesses from the text so far; draft-model: from a smaller "
            "model; the same text, sooner."
        ),
    ] = None,
    draft_model: Annotated[
        Path | None, typer.Option(help="Artifact of the smaller model that guesses.")
    ] = None,
    draft_tokens: Annotated[
        int | None, typer.Option(help="Guesses per call; default: as many as the program checks.")
    ] = None,
    driver: Annotated[str, typer.Option(help="auto, native or stock.")] = "auto",
    allocator: Annotated[str, typer.Option(help="Where buffers come from.")] = "host",
    threads: Annotated[int | None, typer.Option(help="ExecuTorch's threads.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json instead of the artifact's own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, no stream.")] = False,
) -> None:
    """Generate text with an artifact."""
    text = _read_prompt(prompt, prompt_file)
    with ExitStack() as stack:
        runner = stack.enter_context(
            load(artifact, driver=driver, allocator=allocator, threads=threads, tokenizer=tokenizer)
        )
        small = None
        if draft_model is not None:
            small = stack.enter_context(load(draft_model, driver=driver, allocator=allocator))
        asked: Prompt = text
        if chat or system is not None:
            asked = [{"role": "user", "content": text}]
            if system is not None:
                asked.insert(0, {"role": "system", "content": system})
        stream = runner.stream(
            asked,
            max_new_tokens,
            stop=stop or (),
            ignore_end=ignore_end,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            speculate=speculate,
            draft_tokens=draft_tokens,
            draft_model=small,
        )
        if as_json:
            for _ in stream:
                pass
            print(json.dumps(_as_json(stream.generation, runner), ensure_ascii=False, indent=2))
        else:
            _print_stream(stream, runner)


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise UsageError(
            Code.USAGE,
            "the prompt",
            found="--prompt and --prompt-file" if prompt is not None else "neither",
            expected="either --prompt or --prompt-file",
        )
    if prompt is not None:
        return prompt
    try:
        if str(file) == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        assert file is not None
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            Code.USAGE, f"the prompt file {file} cannot be read", found=str(error)
        ) from None


def _print_stream(stream: Stream, runner: Runner) -> None:
    try:
        for piece in stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
        interrupted = False
    except KeyboardInterrupt:
        stream.close()
        interrupted = True
    print(flush=True)
    print(_line(stream.generation, runner.stats()), file=sys.stderr)
    if interrupted:
        # The text is not whole: a script must not take it for one.
        raise typer.Exit(INTERRUPTED)


def _line(done: Generation, stats: RunnerStats) -> str:
    steps = max(0, len(done.tokens) - 1)
    parts = [
        f"{done.prompt_tokens} prompt tokens at {_rate(done.prompt_tokens, done.prefill_seconds)}",
        f"{len(done.tokens)} new at {_rate(steps, done.decode_seconds)}",
        f"ended by {done.finish_reason.value}",
        f"loaded in {stats.load_seconds:.2f} s",
        f"driver {stats.driver}",
    ]
    if done.speculation is not None:
        parts.append(f"{done.speculation.accepted} of {done.speculation.drafted} guesses right")
    if stats.resident_bytes is not None:
        parts.append(f"resident {stats.resident_bytes / 1e6:.0f} MB")
    return "[" + "; ".join(parts) + "]"


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:.1f} tok/s" if seconds else "- tok/s"


def _as_json(done: Generation, runner: Runner) -> dict[str, Any]:
    stats = runner.stats()
    return {
        "text": done.text,
        "tokens": list(done.tokens),
        "prompt_tokens": done.prompt_tokens,
        "finish_reason": done.finish_reason.value,
        "prefill_seconds": done.prefill_seconds,
        "decode_seconds": done.decode_seconds,
        "load_seconds": stats.load_seconds,
        "execute_seconds": stats.execute_seconds,
        "outside_seconds": stats.outside_seconds,
        "driver": stats.driver,
        "contract": {"label": stats.label, "version": stats.version},
        "methods_loaded": list(stats.methods_loaded),
        "calls": stats.calls,
        "speculation": None if done.speculation is None else asdict(done.speculation),
        "states": stats.states,
        "cache_bytes": stats.cache_bytes,
        "resident_bytes": stats.resident_bytes,
        "packed_weights": stats.packed_weights,
        "buffers": [
            {"name": one.name, "bytes": one.nbytes, "allocator": one.allocator}
            for one in stats.buffers
        ],
    }
