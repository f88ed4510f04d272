"""Where optional measured data lies: memory rows, traces, expert counts. None of it is part of the project."""

from __future__ import annotations

import os
from pathlib import Path


def data_path(relative: str) -> Path:
    """`relative` under $ZENRAY_DATA, by default ../shared/data beside the checkout. It need not exist."""
    return Path(os.environ.get("ZENRAY_DATA", "../shared/data")) / relative
