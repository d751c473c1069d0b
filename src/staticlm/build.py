"""From a model to an artifact directory: load, export, lower, write, rename."""

from __future__ import annotations

import glob
import importlib.metadata
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staticlm import __version__
from staticlm.backend_choice import AUTO, BackendChoice, check_auto_options, choose_backend
from staticlm.contract import Contract
from staticlm.contract.program import ProgramFacts
from staticlm.errors import Code, ExportError, LoweringError, StaticLMError
from staticlm.export.ids import model_ids
from staticlm.export.options import ExportOptions, default_prefixes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from staticlm.export.source import Source
    from staticlm.lowering.passes import PassRecord
    from staticlm.lowering.targets import Target

_ABANDONED_SECONDS = 6 * 3600

PRODUCERS = ("transformers", "torch", "executorch")


@dataclass(frozen=True)
class ExportReport:
    """What an export made.

    Args:
        path: The artifact directory.
        contract: The contract of its program.
        facts: What the program holds.
        shared_bytes: Bytes saved by storing equal segments once.
        seconds: Duration of every stage.
        records: Every pass that changed a graph while lowering.
        metadata: What `export.json` records of the program.
        choice: What backend `auto` measured and chose; None where a backend was named.
    """

    path: Path
    contract: Contract
    facts: ProgramFacts
    shared_bytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    records: tuple[PassRecord, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    choice: BackendChoice | None = None


def export_model(
    model: str | Path | PreTrainedModel,
    output: str | Path,
    options: ExportOptions | None = None,
    *,
    backend: str = "xnnpack",
    backend_options: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda stage: None,
) -> ExportReport:
    """Export a Hugging Face causal language model to an artifact directory.

    Args:
        model: A model directory, a GGUF file, a hub id, or a loaded transformers model.
        output: The directory to make. It is written beside itself and renamed into place.
        options: Lengths, dtypes, attention mode, logits rows.
        backend: A backend for all methods (`xnnpack`), one per method
            (`prefill=openvino,decode=xnnpack`), or `auto`: the fastest of this machine, measured.
        backend_options: Options of the backend, by name.
        tokenizer: transformers tokenizer to save along, for a model that is already loaded.
        overwrite: Replace `output` if it is an artifact directory.
        progress: Told the name of every stage.

    Raises:
        ExportError: The options, the model or the output path cannot be used. Nothing is written.
        LoweringError: The backend cannot be used, or lowering failed. Nothing is written.
    """
    from staticlm.export.manifest import build_metadata
    from staticlm.export.programs import export_programs
    from staticlm.export.quantize import check_scheme, quantize_model
    from staticlm.export.source import load_source
    from staticlm.lowering.pipeline import lower_to_file

    options = options or ExportOptions()
    output = Path(output)
    _check_output(output, overwrite)
    clock = _Clock(progress)
    source, choice = None, None
    own_options = dict(backend_options or {})
    if backend == AUTO:
        check_auto_options(own_options)
        clock("load")
        source = load_source(model, options.dtype)
        clock("choose the backend")
        choice = choose_backend(source.model, options, own_options, progress)
        backend, own_options = choice.backend, choice.own_options(own_options)
    options, targets = settle(options, backend, own_options)
    check_scheme(options, [target.label for target in targets.values()])
    if source is None:
        clock("load")
        source = load_source(model, options.dtype)
    source = replace(source, model=quantize_model(source.model, options))
    source_tokenizer = tokenizer if tokenizer is not None else source.tokenizer
    bos_id, eos_ids = model_ids(source.model, source_tokenizer)
    exported = export_programs(
        source.model,
        options,
        attention=lambda method: targets[method].attention,
        attention_why=lambda method: targets[method].attention_why,
        unfused=lambda method: targets[method].unfused,
        bos_id=bos_id,
        eos_ids=eos_ids,
        producers=producers(),
        backends={name: target.label for name, target in targets.items()},
        progress=clock,
    )
    tokenizer_size = _tokenizer_size(source_tokenizer, exported.contract.vocab_size)
    programs = {
        name: targets[name].backend.prepare(name, program, targets[name].options)
        for name, program in exported.programs.items()
    }
    with _staged(output, overwrite) as staging:
        lowered = lower_to_file(
            programs,
            exported.contract,
            staging / "model.pte",
            partitioners={name: target.partitioners for name, target in targets.items()},
            compile_configs={name: t.backend.compile_config() for name, t in targets.items()},
            progress=clock,
        )
        clock("write the artifact")
        metadata = build_metadata(source.model, exported.contract, options, backend)
        _write_companions(staging, source, source_tokenizer, metadata, tokenizer_size)
    return ExportReport(
        path=output,
        contract=exported.contract,
        facts=lowered.facts,
        shared_bytes=lowered.shared_bytes,
        seconds=clock.finish(),
        records=lowered.records,
        metadata=metadata,
        choice=choice,
    )


def settle(
    options: ExportOptions, backend: str, backend_options: Mapping[str, Any]
) -> tuple[ExportOptions, dict[str, Target]]:
    """The backend of every method, and the options with what they leave open filled in.

    Raises:
        LoweringError: The backend specification, a backend or its options cannot be used; `auto` among
            them, which needs the model.
    """
    from staticlm.export.programs import plan_methods
    from staticlm.lowering.backends import get_backend
    from staticlm.lowering.targets import assign_backends, resolve_targets

    if backend == AUTO:
        raise LoweringError(
            Code.USAGE,
            "the backend",
            found=AUTO,
            expected="a backend by name: only an export measures",
            remedy="Name one, or leave out --dry-run.",
        )
    if options.prefixes is None:
        wide = plan_methods(replace(options, prefixes=()), lambda method: "split")
        names = set(assign_backends(backend, [plan.name for plan in wide]).values())
        shared = all(get_backend(name).shares_weights for name in names)
        prefixes = default_prefixes(options.context_length) if shared else ()
        options = replace(options, prefixes=prefixes)
    capacity = options.context_length
    targets = resolve_targets(
        backend,
        backend_options,
        {
            plan.name: (plan.step, capacity if plan.max_start is None else plan.max_start)
            for plan in plan_methods(options, lambda method: "split")
        },
        attention=options.attention,
        dtype=options.dtype,
        cache_dtype=options.cache_dtype or options.dtype,
    )
    return options, targets


def producers() -> dict[str, str]:
    """Versions of the packages that make a program."""
    return {"staticlm": __version__} | {
        name: importlib.metadata.version(name) for name in PRODUCERS
    }


class _Clock:
    """Passes stage names on and keeps how long each took."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._seconds: dict[str, float] = {}
        self._stage: str | None = None
        self._since = 0.0

    def __call__(self, stage: str) -> None:
        self._stop()
        self._stage, self._since = stage, time.perf_counter()
        self._progress(stage)

    def finish(self) -> dict[str, float]:
        self._stop()
        return self._seconds

    def _stop(self) -> None:
        if self._stage is not None:
            spent = time.perf_counter() - self._since
            self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + spent
            self._stage = None


def _check_output(output: Path, overwrite: bool) -> None:
    if not os.path.lexists(output):
        above = next(one for one in output.absolute().parents if os.path.exists(one))
        try:
            # Only trying tells: of permissions, read-only file systems and long names alike.
            os.rmdir(tempfile.mkdtemp(prefix=_partial(output), dir=above))
        except OSError as error:
            raise ExportError(
                Code.EXPORT_FAILED,
                f"{output} cannot be made",
                found=f"{error.strerror} in {above}",
                expected="a name that is free in a directory that can be written to",
                remedy="Choose another output path.",
            ) from None
        return
    ours = output.is_dir() and ((output / "export.json").is_file() or not any(output.iterdir()))
    if not ours:
        raise ExportError(
            Code.OUTPUT_EXISTS,
            f"{output} exists and is not an artifact directory",
            expected="a path that is free",
            remedy="Choose another output path.",
        )
    if not overwrite and any(output.iterdir()):
        raise ExportError(
            Code.OUTPUT_EXISTS,
            f"{output} holds an artifact already",
            expected="a path that is free",
            remedy="Choose another path, or replace it with --force.",
        )


def _partial(output: Path) -> str:
    return f".{output.name}.partial-"


def _sweep(output: Path) -> None:
    """Remove what killed exports to the same place left behind.

    Both must hold: the process is gone, and nothing was written for a long time. Other hosts may work
    in the same directory, and their processes are not known here.
    """
    for left in output.parent.glob(glob.escape(_partial(output)) + "*"):
        number = left.name.removeprefix(_partial(output)).partition("-")[0]
        try:
            latest = max(one.stat().st_mtime for one in (left, *left.rglob("*")))
            if time.time() - latest < _ABANDONED_SECONDS or not number.isdecimal():
                continue
            os.kill(int(number), 0)
        except ProcessLookupError:
            shutil.rmtree(left, ignore_errors=True)
        except (OSError, OverflowError):
            continue


@contextmanager
def _staged(output: Path, overwrite: bool) -> Iterator[Path]:
    """A directory beside `output` that becomes it when all went well, and vanishes otherwise."""
    # A link to an artifact stays a link: what it points to is replaced.
    output = output.resolve()
    work: Path | None = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _sweep(output)
        # A name of its own: process numbers come again, and a killed export leaves its directory.
        prefix = f"{_partial(output)}{os.getpid()}-"
        work = Path(tempfile.mkdtemp(prefix=prefix, dir=output.parent))
        staging, aside = work / "new", work / "old"
        staging.mkdir()
        yield staging
        _check_output(output, overwrite)
        if output.exists():
            os.replace(output, aside)
        try:
            os.replace(staging, output)
        except BaseException:
            if aside.exists() and not output.exists():
                os.replace(aside, output)
            raise
    except StaticLMError:
        raise
    except OSError as error:
        raise ExportError(
            Code.EXPORT_FAILED,
            f"writing {output}",
            found=str(error),
            remedy="Free disk space or choose another path.",
        ) from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)


def _tokenizer_size(tokenizer: Any, vocab_size: int) -> int | None:
    """One more than the largest id of a tokenizer, None without one.

    Raises:
        ExportError: `MODEL_INVALID`: the model has no such tokens, and the artifact would not be run.
    """
    if tokenizer is None:
        return None
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    if size > vocab_size:
        raise ExportError(
            Code.MODEL_INVALID,
            "the tokenizer of the model",
            found=f"token ids up to {size - 1}",
            expected=f"at most {vocab_size - 1}, the last row of the logits",
            remedy="Resize the model's embeddings, or take the tokenizer that it was trained with.",
        )
    return size or None


def _write_companions(
    directory: Path,
    source: Source,
    tokenizer: Any,
    metadata: dict[str, Any],
    tokenizer_size: int | None,
) -> None:
    """Everything beside the program: configurations, tokenizer, manifest."""
    from staticlm.export.manifest import write_manifest

    source.model.config.save_pretrained(directory)
    generation = getattr(source.model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    write_manifest(directory, metadata, tokenizer_size)
