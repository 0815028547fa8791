"""The picture of a search: held-out error over θ and α, and over the rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from tensor_dropout.errors import TensorDropoutError


def draw_search(search: Any, path: str | Path | None) -> Any:
    """Draw one panel for θ × α at the best rank of each format, and one for the ranks where several were tried.

    Args:
        search: a fitted search.
        path: where to write the picture; None writes none.

    Returns:
        The matplotlib figure.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise TensorDropoutError("plot: needs matplotlib; pip install matplotlib") from error
    check_is_fitted(search, "cv_results_")
    results = search.cv_results_
    rows = [(params, 1 - score) for params, score in zip(results["params"], results["mean_test_score"], strict=True)]
    tensors = [(params, loss) for params, loss in rows if params["theta"] is not None]
    ridges = {
        kind: min(loss for params, loss in rows if params["method"] == kind)
        for kind in dict.fromkeys(params["method"] for params, _ in rows)
        if "ridge" in kind
    }
    ranks = dict.fromkeys(str(params["rank"]) for params, _ in tensors)
    figure = Figure(figsize=(9.6 if len(ranks) > 1 else 5.2, 3.6), layout="constrained")
    panels = figure.subplots(1, 2 if len(ranks) > 1 else 1, squeeze=False)[0]
    _draw_theta_alpha(panels[0], tensors)
    if len(ranks) > 1:
        _draw_ranks(panels[1], tensors, list(ranks))
    for panel in panels:
        for style, (kind, loss) in zip(("--", ":"), ridges.items(), strict=False):
            panel.axhline(loss, color="0.4", linestyle=style, linewidth=1, label=kind)
        panel.set_ylabel("held-out error (1 − score)")
        panel.legend(fontsize="small", frameon=False)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _draw_theta_alpha(panel: Any, tensors: list[tuple[dict[str, Any], float]]) -> None:
    lines = dict.fromkeys((params["method"], params["theta"]) for params, _ in tensors)
    several = len({method for method, _ in lines}) > 1
    for method, theta in sorted(lines, key=str):
        own = [
            (params["alpha"], error)
            for params, error in tensors
            if (params["method"], params["theta"]) == (method, theta)
        ]
        alphas = sorted({alpha for alpha, _ in own})
        best = [min(error for other, error in own if other == alpha) for alpha in alphas]
        panel.plot(alphas, best, "o-", markersize=4, label=f"{method} θ = {theta:g}" if several else f"θ = {theta:g}")
    panel.set_xlabel("α")
    tried = sorted({params["alpha"] for params, _ in tensors})
    if tried and tried[0] > 0:
        panel.set_xscale("log")
        panel.set_xticks(tried, [f"{alpha:g}" for alpha in tried])
        panel.minorticks_off()


def _draw_ranks(panel: Any, tensors: list[tuple[dict[str, Any], float]], ranks: list[str]) -> None:
    for method in dict.fromkeys(params["method"] for params, _ in tensors):
        best = []
        for rank in ranks:
            errors = [e for params, e in tensors if params["method"] == method and str(params["rank"]) == rank]
            best.append(min(errors, default=np.nan))
        panel.plot(range(len(ranks)), best, "o-", markersize=4, label=method)
    panel.set_xticks(range(len(ranks)), ranks)
    panel.set_xlabel("rank")
