"""A conversation that goes from server to server, and what each of them must find of it."""

import time
from collections import defaultdict

from conftest import OTHER
from reference import CHUNK, behind, require_same


class Ledger:
    """The rules of docs/serving.md once more, in sets of prompts' beginnings.

    Attributes
    ----------
    stored
        By model: the chunks that it computed on top of nothing but exact states.
    engines
        By model and salt: what is in the engine's prefix cache, and of which kind.
    """

    def __init__(self):
        self.stored, self.engines = defaultdict(set), defaultdict(dict)

    def expect(self, name, tokens, salt):
        """The kind of each chunk that is not computed: `exact`, `mapped`; `computed` before."""
        kinds, engine, local = [], self.engines[name, salt], True
        for start in _starts(tokens[:-1]):  # the last is always computed
            local = local and start in engine
            if local:
                kinds.append(engine[start])
            elif salt and start in self.stored[name]:
                kinds.append("exact")
            elif salt and start in self.stored[OTHER[name]]:
                kinds.append("mapped")
            else:
                break
        return kinds

    def served(self, name, answer, salt, kinds):
        """Note it; the last token of an answer is only said, not computed."""
        starts = _starts([*answer["prompt"], *answer["tokens"][:-1]])
        kinds = [*kinds, *["computed"] * (len(starts) - len(kinds))]
        self.engines[name, salt].update(zip(starts, kinds, strict=True))
        if "mapped" not in kinds:
            self.stored[name].update(starts)

    def entries(self):
        return sum(map(len, self.stored.values()))


def _starts(tokens):
    return [tuple(tokens[:stop]) for stop in range(CHUNK, len(tokens) + 1, CHUNK)]


def converse(servers, deployed, names, texts, tokenizer, *, chat):
    """Answer turn after turn, each at one of the servers; checks every turn.

    Parameters
    ----------
    servers, deployed
        By model; `deployed` has those that are the target of a mapper.
    names
        Who answers each turn. The first is asked without a salt, as a plain server.
    texts
        What is said in each turn.
    tokenizer
        Of both models.
    chat
        Over the chat endpoint, where the text of an answer comes back as text, in place of that of
        completions, where its tokens do.

    Returns
    -------
    kinds
        Per turn, the kinds of the chunks that were not computed in it.
    """
    ledger, messages, tokens, found = Ledger(), [], [], []
    store = next(iter(deployed.values())).store
    before = entries(store)
    for turn, (name, text) in enumerate(zip(names, texts, strict=True)):
        fields, salt = {}, None
        if turn and name in deployed:
            salt = deployed[name].salt
            named = {"kvhub": {"mapper": salt.split(":")[1]}}
            fields = {"cache_salt": salt, "kv_transfer_params": named}
        server = servers[name]
        if chat:
            messages.append({"role": "user", "content": text})
            answer = server.chat(messages, **fields)
            messages.append({"role": "assistant", "content": answer["text"]})
        else:
            tokens = [*tokens, *tokenizer(text, add_special_tokens=False).input_ids]
            answer = server.complete(tokens, **fields)
            tokens = [*tokens, *answer["tokens"]]
        kinds = ledger.expect(name, answer["prompt"], salt)
        require_found(answer, kinds, salt)
        require_same(answer, behind(name, answer["prompt"], kinds), server, **fields)
        ledger.served(name, answer, salt, kinds)
        until(lambda: entries(store) - before >= ledger.entries())
        assert entries(store) - before == ledger.entries()  # nothing that is not exact
        found.append(kinds)
    return found


def require_found(answer, kinds, salt):
    """An answer says of its prompt what it must."""
    assert answer["cached"] == CHUNK * len(kinds)
    if salt is None:
        assert answer["kvhub"] is None
        return
    mapped, exact = (CHUNK * kinds.count(kind) for kind in ("mapped", "exact"))
    assert answer["kvhub"] == {
        "mapper": salt.split(":")[1],
        "status": "applied" if mapped or exact else "fallback_reprefill",
        "mapped_tokens": mapped,
        "exact_tokens": exact,
    }


def entries(store):
    return sum(path.is_file() for path in store.rglob("*"))


def until(reached, seconds=20.0, pause=0.05):
    """Wait, not for ever: saving goes on behind an answer."""
    deadline = time.monotonic() + seconds
    while not reached() and time.monotonic() < deadline:
        time.sleep(pause)
