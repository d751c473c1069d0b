"""The backends and their registry."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from executorch.backends.vulkan.serialization.vulkan_graph_schema import VkStorageType
from executorch.backends.xnnpack.partition.config.xnnpack_config import ConfigPrecisionType

from staticlm.errors import Code, LoweringError
from staticlm.lowering.backends import (
    Backend,
    backend_names,
    get_backend,
    option_tables,
    register_backend,
    registry,
)
from staticlm.lowering.lower import lower
from staticlm.lowering.options import OptionTable


class Mine(Backend):
    name = "mine"
    summary = "a test"
    options = OptionTable("mine")


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    monkeypatch.setattr(registry, "_points", {})


def installed(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    points = (EntryPoint("mine", value, registry.GROUP), EntryPoint("xnnpack", value, "x"))
    monkeypatch.setattr(registry, "_points", None)
    monkeypatch.setattr(registry, "entry_points", lambda group: points)


@pytest.mark.parametrize("name", ["portable", "xnnpack", "qnn", "vulkan", "coreml"])
def test_built_in_backends(name: str) -> None:
    backend = get_backend(name)
    assert backend is get_backend(name)
    assert (backend.name, backend.options.backend) == (name, name)
    mode, why = backend.attention("decode", 1, 1024)
    assert mode in ("split", "concat")
    assert why
    assert set(backend.cache_dtypes) <= {"float32", "float16", "bfloat16"}
    assert all(option.doc.endswith(".") for option in backend.options.options)


def test_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(LoweringError) as caught:
        get_backend("xnnpak")
    assert caught.value.code is Code.BACKEND_UNKNOWN
    assert "portable, xnnpack, qnn" in str(caught.value.expected)


@pytest.mark.usefixtures("clean")
def test_register_and_refuse_duplicates() -> None:
    mine = Mine()
    register_backend(mine)
    assert get_backend("mine") is mine
    assert backend_names()[-1] == "mine"
    for again in (Mine(), get_backend("xnnpack")):
        with pytest.raises(LoweringError) as caught:
            register_backend(again)
        assert caught.value.code is Code.REGISTRATION_DUPLICATE


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Mine, "found a type"),
        (None, "found a NoneType"),
        (type("Nameless", (Mine,), {"name": ""})(), "no usable name"),
        (type("Tableless", (Mine,), {"options": {}})(), "no option table"),
    ],
)
def test_what_is_no_backend_is_refused(value: Any, message: str) -> None:
    with pytest.raises(LoweringError, match=message) as caught:
        register_backend(value)
    assert caught.value.code is Code.REGISTRATION_INVALID


@pytest.mark.usefixtures("clean")
def test_backends_of_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, f"{__name__}:Mine")
    assert "mine" in backend_names()
    assert isinstance(get_backend("mine"), Mine)
    assert type(get_backend("xnnpack")).__name__ == "Xnnpack"


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("value", ["absent_module:Backend", f"{__name__}:clean"])
def test_broken_packages_are_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, value)
    with pytest.raises(LoweringError, match="backend 'mine'") as caught:
        get_backend("mine")
    assert caught.value.code is Code.REGISTRATION_INVALID
    assert "mine" not in [table.backend for table in option_tables()]


def test_portable_gives_no_partitioner() -> None:
    assert get_backend("portable").partitioners("decode", {}) == []
    with pytest.raises(LoweringError, match=r"no option 'per_op_mode'.*an option of xnnpack"):
        get_backend("portable").partitioners("decode", {"per_op_mode": True})


def test_xnnpack_options() -> None:
    backend = get_backend("xnnpack")
    (partitioner,) = backend.partitioners("decode", backend.typed({"precision": "float"}))
    enabled = {tuple(c.enabled_precision_types) for c in _configs(partitioner)}
    assert enabled <= {(ConfigPrecisionType.FP32,), ()}
    (plain,) = backend.partitioners("decode", {})
    assert any(len(c.enabled_precision_types) > 1 for c in _configs(plain))
    (per_op,) = backend.partitioners("decode", {"per_op_mode": True, "enable_bf16": True})
    assert per_op.per_op_mode
    assert all(c.enable_bf16 for c in _configs(per_op))
    with pytest.raises(LoweringError, match="set when a program is loaded"):
        backend.partitioners("decode", {"weight_cache_enabled": True})


def _configs(partitioner: Any) -> list[Any]:
    return [c for group in partitioner.target_partitioner_configs.values() for c in _many(group)]


def _many(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple, set)) else [value]


def test_vulkan_options_and_partition() -> None:
    backend = get_backend("vulkan")
    options = backend.typed({"storage_type_override": "buffer", "force_fp16": "true"})
    (partitioner,) = backend.partitioners("decode", options)
    assert partitioner.options["storage_type_override"] is VkStorageType.BUFFER
    specs = {s.key: s.value for s in partitioner.delegation_spec.compile_specs}
    assert specs["storage_type_override"] == (0).to_bytes(4, "little")
    assert specs["force_fp16"] == b"\x01"
    assert specs["downcast_64_bit"] == b"\x01"
    with pytest.raises(LoweringError, match="use small_texture_limits"):
        backend.partitioners("decode", {"texture_limits": (1, 1, 1)})


@pytest.mark.parametrize(
    ("name", "module", "label"),
    [
        ("vulkan", "executorch.backends.vulkan", b"VulkanBackend"),
        ("coreml", "coremltools", b"CoreMLBackend"),
    ],
)
def test_lowering_to_a_backend_that_does_not_run_here(name: str, module: str, label: bytes) -> None:
    pytest.importorskip(module)
    model = torch.nn.Linear(8, 8).eval()
    program = torch.export.export(model, (torch.ones(1, 8),))
    (partitioner,) = get_backend(name).partitioners("decode", {})
    edge = lower({"decode": program}, partitioners=[partitioner]).edge
    buffer = edge.to_executorch().buffer
    assert label in buffer
    assert not get_backend(name).runs_on_host
