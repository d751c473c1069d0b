"""What `validate` refuses before it loads anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from staticlm.errors import Code, UsageError
from staticlm.validation import validate


@pytest.mark.parametrize(
    "options",
    [
        {"greedy_tokens": -1},
        {"greedy_tokens": 0},
        {"greedy_tokens": True},
        {"max_stepwise": -1},
        {"seed": -1},
        {"tolerance": float("nan")},
        {"tolerance": float("inf")},
        {"tolerance": -1e-3},
    ],
)
def test_numbers_with_which_nothing_would_be_shown(tmp_path: Path, options: Any) -> None:
    with pytest.raises(UsageError, match=next(iter(options))) as caught:
        validate(tmp_path / "absent", tmp_path / "absent", **options)
    assert caught.value.code is Code.USAGE
