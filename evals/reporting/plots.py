"""Pictures of scores: each is drawn only where there is something to see."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .ablations import swept
from .figures import draw
from .suites import Arm, Suite
from .tables import tokens_per_second


@dataclass(frozen=True)
class Picture:
    title: str
    file: Path

    def markdown(self, level: int) -> str:
        return f"{'#' * level} {self.title}\n\n![{self.title}]({self.file.parent.name}/{self.file.name})"


def pictures(suites: Sequence[Suite], folder: Path) -> list[Picture]:
    """All pictures of one setting, drawn into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Picture | None] = []
    for kind, plot in (("budget", by_budget), ("speed", by_speed), ("alpha", by_alpha)):
        for suite in suites:
            name = f"{kind} {suite.setting.name} {suite.benchmark} {suite.length or ''}"
            found.append(plot(suite, folder / f"{slug(name)}.png"))
    return [picture for picture in found if picture]


def by_budget(suite: Suite, file: Path) -> Picture | None:
    """Policies that ran at several budgets, and the full cache as a line."""
    scored = [arm for arm in suite.arms if (arm, None) in suite.estimates]
    lines: dict[str, list[Arm]] = {policy: [] for policy in suite.setting.policies}
    for arm in scored:
        if arm.size > (0, 0):
            lines[arm.policy].append(arm)
    lines = {policy: arms for policy, arms in lines.items() if len(arms) > 1}
    if not lines:
        return None

    def paint(axis: Any) -> None:
        for number, (policy, arms) in enumerate(lines.items()):
            kept = [_percent_kept(suite, arm) for arm in arms]
            _line(axis, suite, arms, kept, policy, (number, number))
        for arm in scored:
            if arm.size == (0, 0):
                height = 100 * suite.estimates[arm, None].mean
                axis.axhline(height, color="0.4", linestyle="--", linewidth=1, label=str(arm))
        axis.set(xlabel="budget, % of the prompt", ylabel="score, %", xscale="log")
        ticks = sorted({round(_percent_kept(suite, arm), 1) for arms in lines.values() for arm in arms})
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()

    return _draw(f"Score by budget: {suite.title}", file, paint)


def by_speed(suite: Suite, file: Path) -> Picture | None:
    """Every arm that answered, by token/s."""
    speeds = {arm: tokens_per_second(suite.of(arm)) for arm in suite.arms if (arm, None) in suite.estimates}
    points = [(arm, speed) for arm, speed in speeds.items() if speed]
    if len(points) < 2:
        return None

    def paint(axis: Any) -> None:
        policies, sizes = list(suite.setting.policies), sorted({arm.size for arm, _ in points})
        for arm, speed in points:
            look = policies.index(arm.policy), sizes.index(arm.size)
            _line(axis, suite, [arm], [speed], str(arm), look)
        axis.set(xlabel="token/s, measured while other things may have run", ylabel="score, %")

    return _draw(f"Score by speed: {suite.title}", file, paint)


def by_alpha(suite: Suite, file: Path) -> Picture | None:
    """How much depends on alpha, a line for each budget."""
    alphas = swept(suite).get("alpha", {})
    values = {arm: alpha for arm, alpha in alphas.items() if (arm, None) in suite.estimates}
    if len(set(values.values())) < 2:
        return None

    def paint(axis: Any) -> None:
        for number, size in enumerate(sorted({arm.size for arm in values})):
            arms = sorted((arm for arm in values if arm.size == size), key=lambda arm: values[arm])
            label = f"{arms[0].evicted} evicted"
            _line(axis, suite, arms, [values[arm] for arm in arms], label, (2 * number, number))
        axis.set(xlabel="alpha", ylabel="score, %")

    return _draw(f"Score by alpha: {suite.title}", file, paint)


def slug(text: str) -> str:
    """A file's name on any system. Its end tells texts apart whose readable part is the same."""
    readable = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
    return f"{readable[:100]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _line(
    axis: Any, suite: Suite, arms: Sequence[Arm], places: Sequence[float], label: str, look: tuple[int, int]
) -> None:
    """Means with their intervals. `look`: numbers of a colour and of a marker."""
    from matplotlib import colormaps

    found = [suite.estimates[arm, None] for arm in arms]
    means = [100 * e.mean for e in found]
    bars = [[100 * max(0.0, e.mean - e.low) for e in found], [100 * max(0.0, e.high - e.mean) for e in found]]
    colour, marker = colormaps["tab20"](look[0] % 20), "osD^vPX*"[look[1] % 8]
    axis.errorbar(places, means, bars, color=colour, marker=marker, capsize=2, linewidth=1.2, label=label)


def _draw(title: str, file: Path, paint: Callable[[Any], None]) -> Picture:
    """One panel, with a legend beside it."""

    def whole(figure: Any, axes: Any) -> None:
        paint(axes[0])
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)

    draw(file, 1, (9.0, 5.0), whole)
    return Picture(title, file)


def _percent_kept(suite: Suite, arm: Arm) -> float:
    records = suite.of(arm)
    return 100 * sum(r.budget or 0 for r in records) / sum(r.prompt_tokens for r in records)
