"""Pictures of runs.

Shape letters: T steps, P positions.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from inertiakv.evals.reporting.figures import draw

from .runs import Run


def retention(file: Path, runs: dict[str, Run]) -> None:
    """Of runs that evict: steps down, tokens from left to right by mean utility; orange where a token is
    kept, grey where it has been evicted, white where there is none yet."""
    from matplotlib.colors import ListedColormap

    def paint(figure: Any, axes: Any) -> None:
        for axis, (title, run) in zip(axes, runs.items(), strict=True):
            utility_TP = run.trace.utility_TP
            state_TP = run.trace.present_TP.int().cummax(0).values + run.cached_TP
            order_P = utility_TP.nanmean(0).nan_to_num(-math.inf).argsort(descending=True, stable=True)
            axis.imshow(
                state_TP[:, order_P].cpu().numpy(),
                aspect="auto",
                interpolation="nearest",
                cmap=ListedColormap(["white", "0.8", "tab:orange"]),
                vmin=0,
                vmax=2,
                extent=(0, len(order_P), len(state_TP) + 0.5, 0.5),
            )
            axis.set(title=title, xlabel="tokens by mean utility", ylabel="step")

    draw(file, len(runs), (9, 3), paint)


def churn(file: Path, series: dict[str, dict[str, dict[str, list[float]]]]) -> None:
    """Share of the top B that is new at each step: by raw scores a thin line, by utility a thick one."""

    def paint(figure: Any, axes: Any) -> None:
        top = max(share for lines in series.values() for line in lines.values() for share in line["churn"])
        for axis, (title, lines) in zip(axes, series.items(), strict=True):
            for name, width in (("raw", 0.8), ("ema", 1.8)):
                percent = [100 * share for share in lines[name]["churn"]]
                axis.plot(lines[name]["step"], percent, linewidth=width, label=name)
            axis.set(title=title, ylabel="% new", ylim=(0, max(105 * top, 1)))
        axes[0].legend(frameon=False, ncols=2)
        axes[-1].set_xlabel("step")

    draw(file, len(series), (9, 1.8), paint)


def matrix(file: Path, jaccard: dict[str, dict[str, float]]) -> None:
    """Mean Jaccard of every two scorers."""
    names = list(jaccard)
    values = [[jaccard[a][b] for b in names] for a in names]

    def paint(figure: Any, axes: Any) -> None:
        image = axes[0].imshow(values, vmin=0, vmax=1, cmap="viridis")
        axes[0].set_xticks(range(len(names)), names, rotation=45, ha="right")
        axes[0].set_yticks(range(len(names)), names)
        for row, line in enumerate(values):
            for column, value in enumerate(line):
                colour = "white" if value < 0.6 else "black"
                axes[0].text(column, row, f"{value:.2f}", ha="center", va="center", color=colour)
        axes[0].set_title("Jaccard of the top B, mean over steps and layers")
        figure.colorbar(image, ax=axes[0], shrink=0.8)

    side = 2.5 + 0.7 * len(names)
    draw(file, 1, (side, side), paint)
