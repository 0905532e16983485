"""Drawing, where matplotlib is there to draw."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inertiakv.models.extras import install

MISSING = f"no plots: matplotlib is not installed ({install('plot')})"


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(
    file: Path, panels: int, size: tuple[float, float], paint: Callable[[Any, Any], None], columns: int = 1
) -> None:
    """A figure of `panels` panels, each `size` inches, line by line in `columns` columns. `paint` is given
    the figure and the panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = -(-panels // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in axes[panels:]:
        unused.set_axis_off()
    paint(figure, axes[:panels])
    figure.savefig(file, dpi=120)
