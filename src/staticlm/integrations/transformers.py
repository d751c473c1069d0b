"""The format `hf_static` for `transformers.exporters`: importing this module registers it.

`AutoHfExporter.from_config(HfStaticConfig(...))` exports, `ExportedModel.from_pretrained(directory)`
loads what either side saved, and the loaded model is called like its source.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from staticlm.contract import LABEL, VERSION, LogitsRows, MethodRole
from staticlm.errors import Code, ExportError, RunnerError, UsageError
from staticlm.export.options import ExportOptions
from staticlm.runtime.runner import Runner, load

TESTED = {"transformers": "5.24.0", "torch": "2.13.0", "executorch": "1.5.1"}
"""Versions that this integration was tested with. Others are used, with a warning."""

_COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "chat_template.jinja",
)
"""Files of an artifact that transformers' `save_pretrained` does not know of."""

try:
    from transformers.exporters import HfExporter, ModelRunner, register_backend
    from transformers.exporters.base import ExportedComponent, ExportedModel
    from transformers.exporters.configs import ExportConfigMixin
    from transformers.exporters.metadata import ExportMetadata
except ImportError as error:
    raise UsageError(
        Code.DEPENDENCY_MISSING,
        "transformers has no exporters that take further formats",
        found=str(error),
        expected=f"transformers.exporters with register_backend, as in {TESTED['transformers']}",
        remedy=f"Install transformers=={TESTED['transformers']}.",
    ) from error


def untested_versions() -> dict[str, str]:
    """Installed versions that differ from the tested ones, by package."""
    found = {}
    for package, tested in TESTED.items():
        try:
            installed = version(package).split("+", 1)[0]
        except PackageNotFoundError:
            installed = "none"
        if installed != tested:
            found[package] = installed
    return found


def warn_untested() -> None:
    """Warn once per call site when an installed version is not a tested one."""
    for package, installed in untested_versions().items():
        warnings.warn(
            f"staticlm's transformers integration was tested with {package} {TESTED[package]}, not "
            f"with {installed}; run `staticlm validate` on what it makes.",
            stacklevel=3,
        )


@dataclass
class HfStaticConfig(ExportConfigMixin):  # type: ignore[misc]
    """What to export; see `staticlm.export.options.ExportOptions` for the fields.

    `logits` is `all` here, because a model that is called returns every row; `last` makes a faster
    prefill, and the runner then obtains the other rows token by token. `dtype` None takes the model's
    own.
    """

    export_format: str = LABEL
    context_length: int = 1024
    prefill_lengths: list[int] = field(default_factory=lambda: [128])
    dtype: str | None = None
    cache_dtype: str | None = None
    attention: str = "auto"
    logits: str = "all"
    verify_length: int | None = None
    prefixes: list[int] | None = None
    quantize: str | None = None
    quantize_embedding: int | None = None
    backend: str = "xnnpack"
    backend_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.export_format != LABEL:
            raise ExportError(
                Code.EXPORT_OPTION_INVALID,
                "export_format",
                found=self.export_format,
                expected=LABEL,
            )
        self.options("float32")

    def options(self, dtype: str) -> ExportOptions:
        """As export options, with `dtype` where none is set.

        Raises:
            ExportError: A field has no usable value.
        """
        if self.logits not in ("last", "all"):
            raise ExportError(
                Code.EXPORT_OPTION_INVALID, "logits", found=self.logits, expected="last or all"
            )
        return ExportOptions(
            context_length=self.context_length,
            prefill_lengths=tuple(self.prefill_lengths),
            dtype=self.dtype or dtype,
            cache_dtype=self.cache_dtype,
            attention=self.attention,
            logits=LogitsRows(self.logits),
            verify_length=self.verify_length,
            prefixes=None if self.prefixes is None else tuple(self.prefixes),
            quantize=self.quantize,
            quantize_embedding=self.quantize_embedding,
        )


class HfStaticProgram:
    """A program file, and the temporary directory that it lives in before it is saved."""

    def __init__(self, path: Path, owner: tempfile.TemporaryDirectory[str] | None = None) -> None:
        self.path = path
        self._owner = owner

    def save(self, path: Path) -> None:
        """Copy it, and the tokenizer files beside it, to `path` and beside `path`."""
        shutil.copyfile(self.path, path)
        for name in _COMPANIONS:
            if (self.path.parent / name).is_file():
                shutil.copyfile(self.path.parent / name, path.parent / name)


class HfStaticExporter(HfExporter):  # type: ignore[misc]
    """Exports a causal language model to one program with prefill and decode methods."""

    export_format = LABEL
    config_class = HfStaticConfig
    program_suffix = ".pte"
    required_packages = list(TESTED)  # noqa: RUF012
    min_versions = {"transformers": "5.24.0"}  # noqa: RUF012
    tested_versions = TESTED

    def export_program(
        self, model: Any, sample_inputs: MutableMapping[str, Any], config: HfStaticConfig
    ) -> tuple[HfStaticProgram, ExportMetadata]:
        """Export `model`. The shapes come from `config`; sample inputs only say what it is called with.

        Args:
            model: A causal language model.
            sample_inputs: `input_ids`, and `attention_mask` at most.
            config: Lengths, dtypes, backend.

        Raises:
            StaticLMError: The inputs, the options or the model cannot be used.
        """
        # Imported here: loading and running an export needs none of it.
        from staticlm.build import export_model

        unknown = sorted(set(sample_inputs) - {"input_ids", "attention_mask"})
        if unknown or "input_ids" not in sample_inputs:
            raise ExportError(
                Code.EXPORT_OPTION_INVALID,
                "sample inputs",
                found=", ".join(sorted(sample_inputs)) or "none",
                expected="input_ids, and attention_mask at most",
                remedy="Caches and positions belong to the exported program; leave them out.",
            )
        holder = tempfile.TemporaryDirectory(prefix="staticlm-")
        training = model.training
        try:
            made = export_model(
                model,
                Path(holder.name) / "artifact",
                config.options(str(model.dtype).removeprefix("torch.")),
                backend=config.backend,
                backend_options=config.backend_options,
            )
        except BaseException:
            holder.cleanup()
            raise
        finally:
            model.train(training)
        metadata = ExportMetadata.from_dict(made.metadata)
        return HfStaticProgram(made.path / "model.pte", holder), metadata

    def export(self, model: Any, sample_inputs: Any, config: Any) -> ExportedModel:
        """Export as a single component `model`, with the model's generation configuration."""
        component: ExportedComponent = self._export_component(model, sample_inputs, config)
        return ExportedModel(
            {"model": component},
            self.export_format,
            config=model.config,
            generation_config=getattr(model, "generation_config", None),
        )

    def export_for_generation(
        self,
        model: Any,
        sample_inputs: Any,
        config: Any,
        *,
        generation_config: Any = None,
        multi_token_decode: bool = False,
    ) -> ExportedModel:
        """The same as `export`: one program has the methods of every generation stage."""
        exported = self.export(model, sample_inputs, config)
        if generation_config is not None:
            exported.generation_config = generation_config
        return exported

    @classmethod
    def save_program(cls, program: HfStaticProgram, path: str | Path) -> None:
        """Copy a program file."""
        program.save(Path(path))

    @classmethod
    def load_program(cls, path: str | Path) -> HfStaticProgram:
        """A handle on a program file; it is read when a runner is made."""
        return HfStaticProgram(Path(path))


class HfStaticRunner(ModelRunner):  # type: ignore[misc]
    """Calls a program like its source model: `input_ids` in, logits of every row out.

    Every call starts from empty caches. For text generation use `staticlm.load` or `runner`.
    """

    version = VERSION
    """Contract version that it drives; a program of another one is refused when it is loaded."""

    def __init__(self, runner: Runner, metadata: ExportMetadata) -> None:
        super().__init__(metadata)
        self.runner = runner

    @classmethod
    def from_program(
        cls,
        program: HfStaticProgram,
        metadata: ExportMetadata,
        device: Any = None,
        driver: str = "auto",
        threads: int | None = None,
    ) -> HfStaticRunner:
        """A runner for a program.

        Args:
            program: What `export_program` or `load_program` returned.
            metadata: Its metadata.
            device: `cpu` or None; the program's delegates decide where it runs.
            driver: Driver name, see `staticlm.load`.
            threads: Size of ExecuTorch's thread pool, see `staticlm.load`.

        Raises:
            StaticLMError: The program, its contract version or the device cannot be used.
        """
        if device is not None and torch.device(device).type != "cpu":
            raise UsageError(
                Code.USAGE,
                "the device of an hf_static program",
                found=str(device),
                expected="cpu, or none",
                remedy="Where a program runs was decided when it was lowered to a backend.",
            )
        warn_untested()
        runner = load(program.path, driver=driver, threads=threads, contract=LABEL)
        made = cls(runner, metadata)
        # The program must outlive its runner: a fresh export lives in a temporary directory.
        made._program = program
        return made

    @property
    def device(self) -> torch.device:
        """Inputs and outputs are host tensors."""
        return torch.device("cpu")

    def __call__(
        self,
        share_inputs: bool = True,
        share_outputs: bool = False,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> Any:
        """Run a batch, one text after the other.

        Args:
            share_inputs: Ignored: tokens are copied.
            share_outputs: Ignored: logits are copied.
            input_ids: Integers `[batch, length]`.
            attention_mask: `[batch, length]`, ones, then zeros for padding on the right.
            logits_to_keep: Rows from the end to return; 0 returns all.

        Returns:
            What the source model returns, with `logits` `[batch, rows, vocabulary]` in the export's
            dtype. Rows of padding hold zeros.

        Raises:
            StaticLMError: Another shape or mask, tokens that are none, or more than the capacity.
        """
        ids = _token_rows(input_ids)
        lengths = _lengths(ids, attention_mask)
        keep = _rows_to_keep(logits_to_keep, ids.shape[1])
        width = self.runner.contract.vocab_size
        logits = torch.zeros((ids.shape[0], keep, width), dtype=self.dtype)
        first = ids.shape[1] - keep
        for index, length in enumerate(lengths):
            if length > first:
                rows = self._rows(ids[index, :length].tolist(), first)
                logits[index, : length - first] = torch.from_numpy(rows).to(self.dtype)
        return self.unflatten([logits])

    def _rows(self, tokens: list[int], first: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Logits of the rows from `first` on."""
        session = self.runner.session
        session.reset()
        if first == len(tokens) - 1:
            return session.prefill(tokens)[None]
        session.plan(len(tokens))  # refuses what does not fit before anything runs
        prefills = [m for m in session.contract.methods if m.role is MethodRole.PREFILL]
        if all(m.logits_rows is LogitsRows.ALL for m in prefills):
            return session.prefill_all(tokens)[first:]
        if first:
            session.prefill(tokens[:first])
        return np.stack([session.step(token) for token in tokens[first:]])


def _token_rows(input_ids: Any) -> torch.Tensor:
    ok = isinstance(input_ids, torch.Tensor) and input_ids.dim() == 2 and input_ids.numel() > 0
    if not ok or input_ids.dtype not in (torch.int64, torch.int32):
        found = "none"
        if isinstance(input_ids, torch.Tensor):
            found = f"{str(input_ids.dtype).removeprefix('torch.')}{list(input_ids.shape)}"
        raise RunnerError(
            Code.TOKEN_INVALID,
            "input_ids",
            found=found,
            expected="int64 [batch, length], not empty",
        )
    rows: torch.Tensor = input_ids
    return rows


def _lengths(ids: torch.Tensor, mask: torch.Tensor | None) -> list[int]:
    """Real tokens of every row."""
    if mask is None:
        return [ids.shape[1]] * ids.shape[0]
    if mask.shape == ids.shape:
        real = mask != 0
        lengths = real.sum(dim=1)
        prefix = torch.arange(ids.shape[1]).reshape(1, -1) < lengths.reshape(-1, 1)
        if torch.equal(real, prefix) and bool((lengths > 0).all()):
            return [int(n) for n in lengths]
    raise RunnerError(
        Code.TOKEN_INVALID,
        "attention_mask",
        found=f"shape {list(mask.shape)}, another pattern than padding on the right",
        expected=f"shape {list(ids.shape)}: ones, then zeros",
        remedy="Pad on the right, or pass one text at a time without padding.",
    )


def _rows_to_keep(value: Any, length: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= length:
        raise UsageError(
            Code.USAGE, "logits_to_keep", found=value, expected=f"an integer from 0 to {length}"
        )
    return value or length


warn_untested()
register_backend(HfStaticExporter, HfStaticRunner)
