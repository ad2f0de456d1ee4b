"""What vLLM's answers are compared with: transformers, and kvhub's own handoff.

Both compute in float32, in other orders. So an answer may differ from a token on where the engine's
two best tokens are as good as equal. For servers that is shown by the engine: its own re-prefill of
the same tokens moves their log probabilities by more than they are apart. What an engine that is
gone has answered is held against the logits of the reference.
"""

from itertools import groupby

import torch
from conftest import OTHER, mapper_to, model

from kvhub import handoff
from kvhub.cache import build_cache, cache_of, concatenate_caches, crop_cache, prefill
from kvhub.generation import generate_from

CHUNK = 32
TIE = 1e-3  # of logits: what float32 in two implementations differs by


def own(name, tokens, count=16):
    """The target's own greedy tokens."""
    ids = torch.tensor([tokens])
    seen = {"attention_mask": torch.ones_like(ids)}
    made = model(name).generate(ids, max_new_tokens=count, do_sample=False, **seen)
    return made[0, len(tokens) :].tolist()


def handed_off(name, tokens, mapped, count=16):
    """Those after a handoff in which the first `mapped` tokens are mapped."""
    made = handoff(
        *(mapper_to(name), model(OTHER[name]), model(name), torch.tensor([tokens])),
        max_new_tokens=count,
        exact_prefix=0,
        exact_suffix=len(tokens) - mapped,
        do_sample=False,
    )
    return made[0, len(tokens) :].tolist()


def behind(name, tokens, kinds, count=16):
    """Greedy tokens behind chunks of these kinds: what is not `mapped` is the target's own."""
    if "mapped" not in kinds:
        return own(name, tokens, count)
    if {*kinds} == {"mapped"}:
        return handed_off(name, tokens, CHUNK * len(kinds), count)
    cache = cache_behind(name, tokens, kinds)
    made = generate_from(
        *(model(name), torch.tensor([tokens]), cache), max_new_tokens=count, do_sample=False
    )
    return made[0, len(tokens) :].tolist()


def cache_behind(name, tokens, kinds):
    """The target's cache of chunks: some mapped, the others computed on top of those before."""
    ids, cache, stop = torch.tensor([tokens]), build_cache([], []), 0
    source = cache_of(prefill(model(OTHER[name]), ids, logits_to_keep=1))
    for mapped, chunks in groupby(kinds, lambda kind: kind == "mapped"):
        start, stop = stop, stop + CHUNK * len([*chunks])
        if not mapped:
            past = cache if start else None
            cache = cache_of(prefill(model(name), ids[:, start:stop], cache=past, logits_to_keep=1))
            continue
        positions = torch.arange(start, stop)[None]
        part = mapper_to(name)(crop_cache(source, start, stop), positions=positions)
        cache = concatenate_caches(cache, part) if start else part
    return cache


def require_same(answer, expected, server, **fields):
    """Equal tokens, or a tie of the engine at the first that differs.

    Parameters
    ----------
    answer, server, fields
        The answer of a server to a request with these fields.
    expected
        Tokens of the reference.
    """
    tokens, best = answer["tokens"], answer["best"]
    if tokens == expected:
        return
    first = _first_difference(tokens, expected)
    noise = 0.0
    for at in range(first + 1):
        again = server.complete([*answer["prompt"], *tokens[:at]], count=1, **fields)
        (anew,) = again["best"]
        noise = max([noise, *(abs(anew[one] - best[at][one]) for one in {*anew} & {*best[at]})])
    (_, most), (other, less) = best[first].items()
    where = f"token {first}: {tokens} instead of {expected}"
    assert other == expected[first], f"{where}, which is not even its second"
    assert most - less <= noise, f"{where}, {most - less:.2g} apart, its own noise is {noise:.2g}"


def require_equal(found, expected, name, tokens, mapped=0):
    """Equal tokens, or a tie at the first that differs: the reference maps `mapped` tokens."""
    if found == expected:
        return
    first = _first_difference(found, expected)
    ids = torch.tensor([[*tokens, *expected[:first]]])
    past = cache_behind(name, tokens, ["mapped"] * (mapped // CHUNK)) if mapped else None
    logits = prefill(model(name), ids[:, mapped:], cache=past, logits_to_keep=1).logits[0, -1]
    gap = float(abs(logits[found[first]] - logits[expected[first]]))
    assert gap < TIE, f"token {first}: {found} instead of {expected}, logits {gap:.2g} apart"


def _first_difference(found, expected):
    pairs = enumerate(zip(found, expected, strict=True))
    return next(at for at, (one, other) in pairs if one != other)
