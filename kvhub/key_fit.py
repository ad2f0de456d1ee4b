"""The keys' fit: what all errors in the keys do to the attention output together.

An error d_t in the content key of token t changes the logit of a query q by e_qt = s q^T R_t d_t,
with s the scaling and R_t the rotation, and the attention output to first order by

    (J d)_q = sum_t a_qt (v_t - o_q) e_qt

with a the target's attention, v its values and o_q = sum_t a_qt v_t. It knows what a weight per
token cannot: that logits which are all off by as much are not off at all, and that errors of tokens
with like values cancel or add up. Over the map's weights, d_t = W^T x_t + b - k_t, the least
|J d|^2 is a convex problem (the Gauss-Newton form of the attention output's error), of a KV head by
itself. Its matrix is too large to keep, so preconditioned conjugate gradients solve it (Shewchuk
1994, B3), with a pass over the text for each product with it. Few steps are the regularisation: of
each head's iterates the one that is best on held-out text is taken.
"""

import torch
from torch import Tensor

from kvhub.alignment_rows import Layer
from kvhub.attention import attention_weights
from kvhub.calibration import sum_over_ranks
from kvhub.compatibility import Heads
from kvhub.moments import Moments, group_features
from kvhub.rope import Rope, apply_rope, strip_rope

__all__ = ["STEPS", "Descent", "feel_errors"]

STEPS = 3  # of the descent, each a pass over the text; `kvhub.alignment` takes one of these
PRECONDITIONER_LAMBDA = 1e-3  # relative to the mean of its diagonal


def feel_errors(
    layer: Layer, errors: Tensor, rope: Rope, exact_prefix: int
) -> tuple[Tensor, Tensor, Tensor]:
    """J^T J d, of errors in content keys.

    Where the first tokens are exact, nothing may rely on their errors, and where they are not,
    these count: so their part of the sum is a row of its own.

    Parameters
    ----------
    layer
        Of the target, over the batch.
    errors
        `[batch, kv_heads, tokens, head_dim]`, content space.
    rope
        The target's.
    exact_prefix
        Tokens at the start that are exact in a hand-off.

    Returns
    -------
    gradient
        J^T J d, of the shape of `errors`; 0 on padding.
    change
        `[batch, kv_heads]`: |J d|^2, the squared change of the attention output.
    outputs
        `[batch, kv_heads]`: |o|^2, of the same queries.
    """
    batch, kv_heads, tokens, head_dim = errors.shape
    positions = torch.arange(tokens, device=errors.device)
    rotated = apply_rope(errors, positions, rope)[:, :, None]
    dtype = rotated.dtype
    values = layer.values.to(dtype)[:, :, None]
    queries = (layer.queries.to(dtype) * layer.scaling).view(batch, kv_heads, -1, tokens, head_dim)
    gradient = torch.zeros_like(rotated[:, :, 0])
    change = torch.zeros(batch, kv_heads, dtype=dtype, device=errors.device)
    norms = torch.zeros_like(change)
    parts = (slice(exact_prefix, tokens), slice(0, min(exact_prefix, tokens)))
    for span, weights in attention_weights(layer.queries, layer.keys, layer.scaling, layer.mask):
        asked = queries[:, :, :, span]
        outputs = weights @ values
        norms += outputs.square().sum((2, 3, 4))
        for part in parts:
            seen, paid = values[..., part, :], weights[..., part]
            logits = paid * (asked @ rotated[..., part, :].mT)
            moved = logits @ seen - logits.sum(-1, keepdim=True) * outputs
            change += moved.square().sum((2, 3, 4))
            back = paid * (moved @ seen.mT - (moved * outputs).sum(-1, keepdim=True))
            gradient[:, :, part] += (back.mT @ asked).sum(2)
    # The transposed rotation is the one by the negative angle.
    return apply_rope(gradient, -positions, rope), change, norms


class Descent:
    """Conjugate gradients of one layer's keys, a system of its own for each target head.

    Call `add` for each batch of a pass and then `step`. The first pass gives the gradient where the
    map is, each one after that the product with the direction. Features are centred, with a last
    one that is 1: weights and bias are one matrix, `[groups, features + 1, outputs]` float64.

    Parameters
    ----------
    weight, bias
        The map to start from, `[groups, features, outputs]` and `[groups, outputs]` float64.
    weighted
        Moments of the features of `key_rows`, for the preconditioner.
    head_dim
        Outputs of a head.
    """

    def __init__(self, weight: Tensor, bias: Tensor, weighted: Moments, head_dim: int) -> None:
        self.head_dim = head_dim
        self.mean = weighted.source_mean
        ridge = PRECONDITIONER_LAMBDA * weighted.gram.diagonal(dim1=-2, dim2=-1).mean(-1)
        ridge = ridge.clamp(min=torch.finfo(ridge.dtype).tiny)
        system = weighted.gram + torch.diag_embed(ridge[:, None].expand_as(self.mean))
        self.factor = torch.linalg.cholesky(system)
        self.weight = weighted.weight[:, None, None]
        offset = bias + torch.einsum("gf,gfo->go", self.mean, weight)
        self.solution = torch.cat([weight, offset[:, None]], dim=1)
        self.best = self.solution.clone()
        self.started = False
        self.direction = self.solution  # what the first pass is about
        self._clear()

    def _clear(self) -> None:
        """Nothing added yet: J^T J d at the map's weights, and |J d|^2 and |o|^2 held out."""
        self.fitted = torch.zeros_like(self.solution)
        self.held_out = torch.zeros_like(self.solution)
        self.squares = self.solution.new_zeros(2)

    def add(
        self,
        layer: Layer,
        source_keys: Tensor,
        held_out: Tensor,
        heads: Heads,
        rope: Rope,
        exact_prefix: int,
    ) -> None:
        """Add a batch; `source_keys` is that of `key_rows`, and `held_out` says which rows are."""
        batch, kv_heads, tokens, head_dim = layer.keys.shape
        features = group_features(source_keys, heads)
        features = features - self.mean.to(features.dtype)
        features = torch.cat([features, torch.ones_like(features[..., :1])], dim=-1)
        errors = torch.einsum("tgf,gfo->tgo", features, self.direction.to(features.dtype))
        errors = errors.reshape(batch, tokens, kv_heads, head_dim).transpose(1, 2)
        if not self.started:
            positions = torch.arange(tokens, device=errors.device)
            errors = errors - strip_rope(layer.keys, positions, rope)
        gradient, change, outputs = feel_errors(layer, errors, rope, exact_prefix)
        back = gradient.transpose(1, 2).reshape(batch * tokens, len(self.mean), -1)
        for total, which in ((self.fitted, ~held_out), (self.held_out, held_out)):
            rows = which.repeat_interleave(tokens)
            total += torch.einsum("tgf,tgo->gfo", features[rows], back[rows])
        self.squares += torch.stack([change[held_out].sum(), outputs[held_out].sum()])

    def step(self) -> None:
        """Go on with what a pass gave, under `torchrun` on all ranks together."""
        fitted, held_out, squares = map(sum_over_ranks, (self.fitted, self.held_out, self.squares))
        self._clear()
        if not self.started:
            self.started = True
            self.squares_at_start = squares
            self.residual, self.slope = -fitted, held_out
            self.direction = self._preconditioned()
            self.descent = self._dot(self.residual, self.direction)
            # Half of the held-out error of each head, less that at the start.
            self.loss = self.best_loss = torch.zeros_like(self.descent)
            return
        before = self.descent
        curvature = self._dot(self.direction, fitted)
        length = torch.where(curvature > 0, before / curvature, 0)
        along = self._spread(length)
        self.loss = self.loss + length * self._dot(self.slope, self.direction)
        self.loss += length**2 / 2 * self._dot(self.direction, held_out)
        self.solution = self.solution + along * self.direction
        self.slope = self.slope + along * held_out
        self.residual = self.residual - along * fitted
        self.best = torch.where(self._spread(self.loss < self.best_loss), self.solution, self.best)
        self.best_loss = torch.minimum(self.loss, self.best_loss)
        towards = self._preconditioned()
        self.descent = self._dot(self.residual, towards)
        turn = torch.where(before > 0, self.descent / before, 0)
        self.direction = towards + self._spread(turn) * self.direction

    def result(self) -> tuple[Tensor, Tensor, float]:
        """The best weights and bias so far, as given, and their relative held-out error."""
        weight = self.best[:, :-1]
        bias = self.best[:, -1] - torch.einsum("gf,gfo->go", self.mean, weight)
        change, outputs = self.squares_at_start.tolist()
        left = max(0.0, change + 2 * float(self.best_loss.sum()))
        return weight, bias, left / outputs

    def _preconditioned(self) -> Tensor:
        """The preconditioner's inverse times the residual."""
        weights = torch.cholesky_solve(self.residual[:, :-1], self.factor)
        return torch.cat([weights, self.residual[:, -1:] / self.weight], dim=1)

    def _dot(self, first: Tensor, second: Tensor) -> Tensor:
        """`[groups, heads of a group]`."""
        groups, rows, _ = first.shape
        return (first * second).view(groups, rows, -1, self.head_dim).sum((1, 3))

    def _spread(self, by_head: Tensor) -> Tensor:
        """`[groups, heads of a group]` to `[groups, 1, outputs]`."""
        return by_head.repeat_interleave(self.head_dim, dim=1)[:, None]
