"""Qualcomm's QNN delegate: options, passes, output order. See `docs/guides/qualcomm.md`."""

from staticlm.lowering.qnn.build import QnnTarget, from_options

__all__ = ["QnnTarget", "from_options"]
