"""How likely a model finds continuations of a context that is in its cache already."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvhub.cache import build_cache, cache_of, prefill
from kvhub.errors import VerificationError

if TYPE_CHECKING:
    from transformers import Cache, DynamicCache, PreTrainedModel

__all__ = ["repeat_row", "score_continuations"]

MAX_LOGITS = 2**26  # numbers copied to float32 at once: 256 MiB


@torch.no_grad()
def score_continuations(
    model: "PreTrainedModel", cache: "Cache", last: int, continuations: Sequence[list[int]]
) -> list[tuple[float, bool]]:
    """Score continuations of one context.

    Parameters
    ----------
    model
        The model that the cache belongs to.
    cache
        Of all context tokens but the last, with a row for each continuation; it is used up.
    last
        The last context token.
    continuations
        The token ids of each.

    Returns
    -------
    list of (float, bool)
        Each one's summed log probability in nats, and whether greedy decoding would write it.

    Raises
    ------
    VerificationError
        A log probability is not a number.
    """
    rows, longest = len(continuations), max(map(len, continuations))
    # Padding on the right: no token before it attends to it.
    text = torch.zeros(rows, longest, dtype=torch.long)
    real = torch.zeros(rows, longest, dtype=torch.bool)
    for row, continuation in enumerate(continuations):
        text[row, : len(continuation)] = torch.tensor(continuation)
        real[row, : len(continuation)] = True
    text, real = text.to(model.device), real.to(model.device)
    inputs = torch.cat([text.new_full((rows, 1), last), text[:, :-1]], dim=1)
    logprobs = torch.zeros(rows, dtype=torch.float64)
    greedy = torch.ones(rows, dtype=torch.bool)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    step = max(1, MAX_LOGITS // (rows * vocabulary))
    for start in range(0, longest, step):
        span = slice(start, start + step)
        output = prefill(model, inputs[:, span], cache=cache)
        cache = cache_of(output)
        logprob, right = _score_tokens(output.logits, text[:, span])
        logprobs += torch.where(real[:, span], logprob, 0.0).sum(1, dtype=torch.float64).cpu()
        greedy &= (right | ~real[:, span]).all(1).cpu()
    if bool(logprobs.isnan().any()):
        raise VerificationError(
            f"The log probabilities of a continuation are not numbers in {model.dtype}.",
            "Load the models in bfloat16 or float32.",
        )
    return list(zip(logprobs.tolist(), greedy.tolist(), strict=True))


def repeat_row(cache: "Cache", rows: int) -> "DynamicCache":
    """A new cache with a one-row cache's row `rows` times."""
    return build_cache(
        (layer.keys.expand(rows, -1, -1, -1) for layer in cache.layers),
        (layer.values.expand(rows, -1, -1, -1) for layer in cache.layers),
    )


def _score_tokens(logits: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Log probability of each token in at least float32, and whether it is the most likely."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logprobs = logits.log_softmax(-1, dtype=dtype).gather(-1, text[..., None])[..., 0]
    return logprobs, logits.argmax(-1) == text
