"""What vLLM's answers are compared with: transformers, and kvhub's own handoff."""

import torch
from conftest import OTHER, mapper_to, model

from kvhub import handoff

TIE = 1e-2  # of logits: float32 in two implementations differs by less than a thousandth


def own(name, tokens, count=16):
    """The target's own greedy tokens."""
    ids = torch.tensor([tokens])
    seen = {"attention_mask": torch.ones_like(ids)}
    made = model(name).generate(ids, max_new_tokens=count, do_sample=False, **seen)
    return made[0, len(tokens) :].tolist()


def handed_off(name, tokens, mapped, count=16, exact=0):
    """Those after a handoff in which tokens from `exact` up to `mapped` are mapped."""
    made = handoff(
        *(mapper_to(name), model(OTHER[name]), model(name), torch.tensor([tokens])),
        max_new_tokens=count,
        exact_prefix=exact,
        exact_suffix=len(tokens) - mapped,
        do_sample=False,
    )
    return made[0, len(tokens) :].tolist()


def require_equal(found, expected, name, tokens):
    """Equal, or different from a token on where the model's two best are as good as equal."""
    if found == expected:
        return
    first = next(
        at for at, pair in enumerate(zip(found, expected, strict=True)) if len({*pair}) > 1
    )
    ids = torch.tensor([[*tokens, *expected[:first]]])
    with torch.no_grad():
        logits = model(name)(ids).logits[0, -1]
    gap = float(abs(logits[found[first]] - logits[expected[first]]))
    assert gap < TIE, f"token {first}: {found} instead of {expected}, logits {gap:.3f} apart"
