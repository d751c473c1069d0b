"""What a backend is to the lowering."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from staticlm.errors import Code, LoweringError
from staticlm.lowering.attention_choice import choose_attention
from staticlm.lowering.options import OptionTable, Routed, route, typed

if TYPE_CHECKING:
    from executorch.exir import EdgeCompileConfig
    from executorch.exir.backend.partitioner import Partitioner
    from torch.export import ExportedProgram


class Backend:
    """A backend that methods can be lowered to. Subclass it, and register an instance.

    Class attributes say what it supports; methods do the work. Nothing of an optional package may
    be imported before `available` passed.
    """

    name: ClassVar[str]
    """What the user calls it."""

    summary: ClassVar[str]
    """One line for listings."""

    options: ClassVar[OptionTable]
    """Its options."""

    attention_modes: ClassVar[tuple[str, ...]] = ("split", "concat")
    """Attention modes that lower well, the preferred one first."""

    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    """Computation dtypes that it takes."""

    cache_dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    """Cache dtypes that it takes; the caches are the caller's, so always float ones."""

    shares_weights: ClassVar[bool] = False
    """Whether a further method over the same weights makes a program hardly larger."""

    runs_on_host: ClassVar[bool] = False
    """Whether the stock runtime of this machine can execute what it makes."""

    def available(self) -> None:
        """Return if lowering can work here.

        Raises:
            LoweringError: `BACKEND_UNAVAILABLE`, with what to install or set.
        """

    def attention(
        self, method: str, step: int, slots: int, without: tuple[str, ...] = ()
    ) -> tuple[str, str]:
        """The attention mode that `auto` stands for, and why.

        Args:
            method: Name of the method.
            step: Tokens per call.
            slots: Slots that it reads of a full cache.
            without: Modes that the model or another method rules out.
        """
        preferred = next(mode for mode in self.attention_modes if mode not in without)
        return choose_attention(self.name, step, slots, preferred, without)

    def precision(self, dtype: str, options: Mapping[str, Any]) -> str:
        """The dtype that it computes in on this machine when it is asked for `dtype`.

        Args:
            dtype: `float32`, `float16` or `bfloat16`.
            options: Its options, as for `partitioners`.
        """
        return dtype

    def route(self, options: Mapping[str, Any]) -> Routed:
        """Check typed options and sort them by destination.

        Raises:
            LoweringError: `BACKEND_OPTION_UNKNOWN` or `BACKEND_OPTION_INVALID`.
        """
        from staticlm.lowering.backends.registry import option_tables

        return route(self.options, options, option_tables(without=self.name))

    def typed(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Options from text, as the command line gives them.

        Raises:
            LoweringError: `BACKEND_OPTION_UNKNOWN` or `BACKEND_OPTION_INVALID`.
        """
        from staticlm.lowering.backends.registry import option_tables

        return typed(self.options, texts, option_tables(without=self.name))

    def prepare(
        self, method: str, program: ExportedProgram, options: Mapping[str, Any]
    ) -> ExportedProgram:
        """The program to lower for a method; by default the one given, never changed in place."""
        return program

    def partitioners(self, method: str, options: Mapping[str, Any]) -> list[Partitioner]:
        """New partitioners for a method, in order.

        Args:
            method: The method's name.
            options: Typed options; they are checked.

        Raises:
            LoweringError: An option cannot be used, or the backend is not available.
        """
        raise NotImplementedError

    def compile_config(self) -> EdgeCompileConfig | None:
        """ExecuTorch's edge options that its programs need, or None for the default."""
        return None


def need_module(backend: str, module: str, remedy: str) -> None:
    """Refuse when a module cannot be found, without importing it.

    Raises:
        LoweringError: `BACKEND_UNAVAILABLE`.
    """
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise LoweringError(
            Code.BACKEND_UNAVAILABLE,
            f"backend {backend!r} cannot be used here",
            found=f"no module {module!r}",
            remedy=remedy,
        )
