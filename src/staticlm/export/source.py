"""Where a model comes from: a local directory, a hub id, or a GGUF file."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from staticlm.errors import Code, ExportError
from staticlm.export.decoder import TORCH_DTYPES


@dataclass(frozen=True)
class Source:
    """A loaded model with what belongs to it.

    Args:
        name: What the user called it.
        model: In evaluation mode, in the wanted dtype, with eager attention.
        tokenizer: transformers tokenizer, or None when the source has none.
    """

    name: str
    model: PreTrainedModel
    tokenizer: Any | None


def load_source(model: str | Path | PreTrainedModel, dtype: str) -> Source:
    """Load a causal language model and its tokenizer.

    Args:
        model: Directory, GGUF file, hub id, or a model that is already loaded; it is used as it is, or a
            copy of it in `dtype`.
        dtype: `float32`, `float16` or `bfloat16`.

    Raises:
        ExportError: `MODEL_NOT_FOUND` or `MODEL_INVALID`, with what the loader said.
    """
    if isinstance(model, PreTrainedModel):
        wanted = TORCH_DTYPES[dtype]
        loaded = model if model.dtype is wanted else copy.deepcopy(model).to(wanted)
        return Source(type(model).__name__, loaded.eval(), None)
    name = str(model)
    arguments = _locate(name)
    config = _load_config(name, arguments)
    _check_config(name, config)
    try:
        loaded, info = AutoModelForCausalLM.from_pretrained(
            **arguments,
            dtype=TORCH_DTYPES[dtype],
            attn_implementation="eager",
            output_loading_info=True,
        )
    except Exception as error:
        raise _invalid(f"loading {name!r} as a causal language model", error) from error
    missing = sorted(info.get("missing_keys") or ())
    if missing:
        raise ExportError(
            Code.MODEL_INVALID,
            f"weights of {name!r}",
            found=f"{len(missing)} missing, first {missing[0]}",
            expected="every weight of the architecture",
            remedy="The directory is incomplete or belongs to another architecture.",
        )
    if hasattr(loaded.config, "quantization_config"):
        # GGUF weights are dequantised by now; the entry would make the configuration unwritable.
        del loaded.config.quantization_config
    return Source(name, loaded.eval(), _load_tokenizer(arguments))


def meta_source(model: str | Path) -> Source:
    """The model on the meta device: its shapes without its weights, in seconds."""
    name = str(model)
    config = _load_config(name, _locate(name))
    _check_config(name, config)
    with torch.device("meta"):
        try:
            empty = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        except Exception as error:
            raise _invalid(f"building {name!r} from its configuration", error) from error
    return Source(name, empty.eval(), None)


def clean_generation_config(model: PreTrainedModel) -> GenerationConfig:
    """The generation configuration, without settings that are not valid together."""
    found = copy.deepcopy(getattr(model, "generation_config", None))
    return found if found is not None else GenerationConfig.from_model_config(model.config)


def _locate(name: str) -> dict[str, Any]:
    """Arguments of `from_pretrained` that name the source."""
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ExportError(
                Code.MODEL_INVALID,
                f"{name!r} is a file",
                found=path.suffix or "no suffix",
                expected="a .gguf file, a model directory, or a hub id",
            )
        if path.open("rb").read(4) != b"GGUF":
            raise ExportError(
                Code.MODEL_INVALID, f"{name!r}", found="no GGUF header", expected="a GGUF file"
            )
        return {
            "pretrained_model_name_or_path": str(path.parent),
            "gguf_file": path.name,
            "local_files_only": True,
        }
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ExportError(
                Code.MODEL_INVALID,
                f"{name!r} is not a model directory",
                found="no config.json",
                expected="a directory written by save_pretrained",
            )
        return {"pretrained_model_name_or_path": str(path), "local_files_only": True}
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1 or name.endswith(".gguf")
    if looks_local:
        raise ExportError(
            Code.MODEL_NOT_FOUND,
            f"the model {name!r}",
            found="no such file or directory",
            expected="a model directory, a .gguf file, or a hub id such as organisation/model",
        )
    return {"pretrained_model_name_or_path": name}


def _load_config(name: str, arguments: dict[str, Any]) -> Any:
    try:
        return AutoConfig.from_pretrained(**arguments)
    except Exception as error:
        if "local_files_only" not in arguments:
            raise ExportError(
                Code.MODEL_NOT_FOUND,
                f"the model {name!r}",
                found=_first_line(error),
                expected="a hub id that can be reached, or a local directory",
                remedy="Check the name and the network, or download the model first.",
            ) from error
        raise _invalid(f"the configuration of {name!r}", error) from error


def _check_config(name: str, config: Any) -> None:
    if getattr(config, "auto_map", None) and type(config).__module__.startswith(
        "transformers_modules"
    ):
        raise ExportError(
            Code.MODEL_UNSUPPORTED,
            f"{name!r} brings its own modelling code",
            expected="an architecture that transformers itself has",
        )
    quantised = getattr(config, "quantization_config", None)
    method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
    if quantised is not None and "gguf" not in str(method).lower():
        raise ExportError(
            Code.MODEL_UNSUPPORTED,
            f"weights of {name!r}",
            found=f"quantised by {method}",
            expected="floating point weights, or a GGUF file",
            remedy="Start from the model's unquantised weights.",
        )


def _load_tokenizer(arguments: dict[str, Any]) -> Any | None:
    try:
        return AutoTokenizer.from_pretrained(**arguments)
    except Exception:
        # A model without a tokenizer is exported; `generate` then says what it needs.
        return None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _invalid(what: str, error: BaseException) -> ExportError:
    return ExportError(
        Code.MODEL_INVALID,
        what,
        found=_first_line(error),
        expected="a model that transformers can load",
    )
