"""Chart of a sweep over lengths of a weight average: the score, and the accuracy of the reconstruction, by length."""

from pathlib import Path

from torchtitan.pictures.colours import SOFT


def draw_sweep(path: Path, settings: dict, scores: dict[float, dict[str, float]], best: float) -> Path:
    """Draw a sweep.

    Args:
        path: of the PNG.
        settings: of the sweep's record.
        scores: length, rising -> scores by name.
        best: length with the best score.

    Returns:
        the path. Raises OSError.
    """
    from torchtitan.pictures import style  # matplotlib: only a finished sweep waits for it

    metric, better = settings["metric"], settings["better"]
    title = f"{settings['run']}: weight averages by length, at step {settings['step']}"
    figure, panels = style.new_figure(title, 2, 1, (8, 5.6), sharex=True, height_ratios=(2.4, 1))
    upper, lower = panels[:, 0]
    stds = list(scores)
    values = [scores[std][metric] for std in stds]
    name = "held-out loss" if metric == "loss" else metric
    upper.plot(stds, values, color=style.colour(0), marker="o", ms=4, lw=1.4, label=name)
    upper.plot([best], [scores[best][metric]], "o", ms=10, mfc="none", color=style.colour(1), mew=1.6,
        label=f"best: {scores[best][metric]:.4g} at {best:g}")
    for number, (track, std) in enumerate(settings["tracks"].items()):
        for panel in (upper, lower):
            panel.axvline(std, color=SOFT, lw=0.9, ls=":", label="tracked in training" if not number else None)
        upper.annotate(track, (std, 1.0), xycoords=("data", "axes fraction"), xytext=(2, -9), textcoords="offset points",
            fontsize=7, color=SOFT)
    upper.set_ylabel(f"{name} ({better} is better)")
    upper.legend(fontsize=8, frameon=False)
    errors = [(std, scores[std]["profile_error"]) for std in stds if scores[std]["profile_error"] > 0]
    if errors:
        lower.plot(*zip(*errors, strict=True), "s", color=style.colour(2), ms=4)  # no line: it falls to 0 in between
        lower.set_yscale("log")
        style.label_log_axis(lower)
    lower.set_ylabel("profile error")
    lower.set_xlabel("length of the average: standard deviation relative to the time trained")
    images = f"{settings['images']} held-out images" if metric == "loss" else f"{settings['images']} samples"
    style.note(figure, f"{images}; {len(settings['snapshots'])} snapshots; a tracked length has no profile error")
    return style.save(figure, path)
