"""The speed-up curve and the step's terms as a picture file (matplotlib, loaded here only)."""

from __future__ import annotations

from pathlib import Path

from trtspec.errors import SetupError
from trtspec.plan.result import Plan


def plot_plan(plan: Plan, path: Path) -> Path:
    """Write two panels to `path` (suffix png, svg or pdf): speed-up against D for each batch, and a step by term.

    Raises SetupError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SetupError("a plot file needs matplotlib", hint="pip install 'trtspec[cpu]'") from None
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    speed, time = figure.subplots(1, 2)
    for batch in plan.batches:
        lengths = [p.draft_length for p in batch.points]
        (line,) = speed.plot(lengths, [p.speedup for p in batch.points], label=f"batch {batch.batch}")
        speed.plot(batch.best.draft_length, batch.best.speedup, "o", color=line.get_color())
    known = plan.curve.measured_to if plan.curve else 0
    if plan.curve and known < len(plan.batches[0].points) - 1:
        speed.axvspan(
            known, len(plan.batches[0].points) - 1, alpha=0.08, color="gray", label="acceptance extrapolated"
        )
    speed.axhline(1.0, linewidth=0.8, color="gray")
    speed.set(
        xlabel="draft length D", ylabel="speed-up over plain decoding", title=f"{plan.method}, best D marked"
    )
    speed.legend()
    points = plan.batches[0].points
    names = list(dict.fromkeys(name for p in points for name in p.step.terms()))
    stacks = [[getattr(p.step, name) * 1e3 for p in points] for name in names]
    time.stackplot([p.draft_length for p in points], stacks, labels=names, alpha=0.85)
    time.axvline(plan.draft_length, linewidth=0.8, color="black", linestyle="--")
    time.set(
        xlabel="draft length D", ylabel="step, ms", title=f"a step by term, batch {plan.batches[0].batch}"
    )
    time.legend(loc="upper left")
    figure.savefig(path, dpi=150)
    return path
