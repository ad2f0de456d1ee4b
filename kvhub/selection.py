"""Which source layers each target layer reads (paper, section on layer selection, and App. B).

One list of `top_k` source layers per target layer, shared by all heads and by keys and values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvhub.errors import UsageError
from kvhub.moments import KINDS, Block
from kvhub.ridge import regress
from kvhub.spec import ModelSpec
from kvhub.stats import Statistics

__all__ = ["Selection", "probe_scores", "require_top_k", "select_layers"]

GREEDY_LAMBDA = 1e-3  # relative ridge penalty of the regressions that greedy selection compares


@dataclass(frozen=True)
class Selection:
    """The source layers of each target layer, best first.

    Attributes
    ----------
    layers
        `[target_layers][top_k]` source layer indices.
    scores
        `[target_layers][source_layers]` R2 of the single-layer probe, head-averaged, mean of keys
        and values; on the tokens named by `scored_on`.
    method
        `probe` takes the best single layers, `greedy` adds the layer that helps most each time.
    scored_on
        `held_out` or `fitted`.
    """

    layers: list[list[int]]
    scores: list[list[float]]
    method: Literal["probe", "greedy"]
    scored_on: Literal["held_out", "fitted"]

    @property
    def top_k(self) -> int:
        return len(self.layers[0])

    def check(self, source_layers: int, target_layers: int) -> None:
        """Raise UsageError unless this is a selection for models of so many layers."""
        found = {len(chosen) for chosen in self.layers}
        bad = [
            layer for chosen in self.layers for layer in chosen if not 0 <= layer < source_layers
        ]
        repeated = any(len(set(chosen)) != len(chosen) for chosen in self.layers)
        if len(self.layers) != target_layers or len(found) != 1 or 0 in found or bad or repeated:
            raise UsageError(
                f"The selection does not fit: expected {target_layers} lists of equal length, "
                f"distinct source layers below {source_layers}; found {self.layers}.",
                "Select the layers from the statistics that you fit.",
            )


def head_averaged_r2(block: Block, weights: Tensor, bias: Tensor, target: ModelSpec) -> Tensor:
    """R2 of each head, its dims pooled, averaged over heads; a head that never varies gets 0.

    One number per target layer of the block.
    """

    def per_head(square: Tensor) -> Tensor:
        """`[groups, layers * heads * dim]` to `[layers, heads]`."""
        groups = len(square)
        dims = square.view(groups, -1, target.kv_heads // groups, target.head_dim)
        return dims.sum(-1).transpose(0, 1).flatten(1)

    residual, total = per_head(block.residual_square(weights, bias)), per_head(block.target_square)
    return torch.where(total > 0, 1 - residual / total, 0).mean(1)


def _score(
    statistics: Statistics,
    part: str,
    layers: list[int],
    target_layer: int | None,
    relative_lambda: float,
) -> Tensor:
    """Mean over keys and values of the head-averaged R2, of one target layer or of each."""
    scores = []
    for kind in KINDS:
        block = statistics.block("fitted", kind, layers, target_layer)
        weights, bias = regress(block, relative_lambda, "relative")
        scored = statistics.block(part, kind, layers, target_layer)
        scores.append(head_averaged_r2(scored, weights, bias, statistics.target))
    return torch.stack(scores).mean(0)


def probe_scores(
    statistics: Statistics,
    *,
    scored_on: Literal["held_out", "fitted"] = "held_out",
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """R2 of every target layer on every single source layer, `[target_layers, source_layers]`.

    The paper's probe: ordinary least squares with a bias, each head on its namesake; where the
    models differ in KV heads, each head on all heads of the source layer. The paper scores it on
    the tokens it was fitted on, here the default is held-out tokens.
    """
    statistics = _probe_statistics(statistics)
    candidates = statistics.source.num_layers
    scores = []
    for candidate in range(candidates):
        # One factorisation serves all target layers.
        scores.append(_score(statistics, scored_on, [candidate], None, 0.0))
        if progress is not None:
            progress(candidate + 1, candidates)
    return torch.stack(scores, dim=1)


def _probe_statistics(statistics: Statistics) -> Statistics:
    if statistics.source.kv_heads == statistics.target.kv_heads:
        return statistics.matched()
    return statistics


def require_top_k(top_k: int, source_layers: int) -> None:
    """Raise UsageError unless so many source layers can be chosen."""
    if not 1 <= top_k <= source_layers:
        raise UsageError(
            f"top_k must be between 1 and the source's {source_layers} layers; found {top_k}.",
            "Choose another --top-k.",
        )


def select_layers(
    statistics: Statistics,
    top_k: int,
    *,
    method: Literal["probe", "greedy"] = "probe",
    scored_on: Literal["held_out", "fitted"] = "held_out",
    progress: Callable[[int, int], None] | None = None,
) -> Selection:
    """Choose `top_k` source layers for each target layer.

    Parameters
    ----------
    statistics
        From `calibrate`.
    top_k
        How many, at least 1 and at most the source's layers.
    method
        `probe`: the layers with the best single-layer R2 (the paper's choice). `greedy`: forward
        selection, each time the layer that raises the joint R2 most (the paper's appendix B).
    scored_on
        The tokens on which R2 is taken.
    progress
        Called with (steps done, steps in all): source layers of the probe, or target layers of
        greedy selection.

    Raises
    ------
    UsageError
        `top_k` is out of range, or no tokens were held out.
    """
    source, target = statistics.source, statistics.target
    require_top_k(top_k, source.num_layers)
    if getattr(statistics, scored_on)["keys"].tokens == 0:
        raise UsageError(
            f"No {scored_on} tokens in these statistics.", "Calibrate on at least 10 sequences."
        )
    if method not in ("probe", "greedy"):
        raise UsageError(f"Unknown selection method {method!r}.", "Use probe or greedy.")
    probing = method == "probe"
    scores = probe_scores(statistics, scored_on=scored_on, progress=progress if probing else None)
    if probing:
        # A stable sort, so that equal scores go to the lower layer on every machine.
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        chosen = order[:, :top_k].tolist()
    else:
        chosen = []
        single = _probe_statistics(statistics)
        for layer in range(target.num_layers):
            chosen.append(_forward_selection(single, top_k, layer, scores[layer], scored_on))
            if progress is not None:
                progress(layer + 1, target.num_layers)
    return Selection(chosen, scores.tolist(), method, scored_on)


def _forward_selection(
    statistics: Statistics, top_k: int, layer: int, single: Tensor, scored_on: str
) -> list[int]:
    chosen = [int(single.argmax())]
    while len(chosen) < top_k:
        gains = {
            candidate: float(
                _score(statistics, scored_on, [*chosen, candidate], layer, GREEDY_LAMBDA)
            )
            for candidate in range(statistics.source.num_layers)
            if candidate not in chosen
        }
        chosen.append(max(gains, key=lambda candidate: gains[candidate]))
    return chosen
