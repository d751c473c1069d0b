"""Keep the chatter of libraries off a user's terminal."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence warnings, progress bars and log lines below errors of torch and transformers."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            _quiet_transformers()
            yield
        finally:
            logging.disable(before)


def _quiet_transformers() -> None:
    # Progress bars that transformers takes from tqdm itself, not from its own switchable ones.
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        from transformers.utils import logging as hf_logging
    except ImportError:
        return
    hf_logging.disable_progress_bar()
