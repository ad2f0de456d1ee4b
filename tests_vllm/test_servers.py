"""Two servers of the real engine: conversations that go from one to the other."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import FAMILY, OTHER, text_tokens
from conversation import entries, until
from reference import CHUNK, behind, handed_off, own, require_same
from servers import Server


def part(number, length=150):
    """Tokens of one test only: the others' states are in the store too."""
    start = 380 * number
    return text_tokens()[start : start + length]


def read_by(server, found, prompt, count=16, **fields):
    """A server's answer, once all of its chunks are in the store."""
    before = entries(found.store)
    answer = server.complete(prompt, count, **fields)
    saved = before + (len(prompt) + count - 1) // CHUNK
    until(lambda: entries(found.store) >= saved)
    return answer


def whole(tokens):
    return (len(tokens) - 1) // CHUNK * CHUNK


@pytest.mark.parametrize(("number", "name"), [(0, "large"), (1, "middle")])
def test_a_conversation_goes_on_at_the_target(servers, deployed, number, name):
    prompt = part(number)
    answer = read_by(servers[OTHER[name]], deployed[name], prompt)
    assert answer["tokens"] == own(OTHER[name], prompt)
    assert answer["cached"] == 0
    tokens = [*prompt, *answer["tokens"], *part(number, 165)[150:]]
    found = servers[name].complete(tokens, cache_salt=deployed[name].salt)
    # What the source computed, without its last token: that one it has only said.
    mapped = min(whole(tokens), (len(prompt) + 15) // CHUNK * CHUNK)
    assert found["kvhub"] == {
        "mapper": deployed[name].salt.split(":")[1],
        "status": "applied",
        "mapped_tokens": mapped,
        "exact_tokens": 0,
    }
    assert found["cached"] == mapped
    require_same(
        *(found, handed_off(name, tokens, mapped), servers[name]), cache_salt=deployed[name].salt
    )
    assert deployed[name].status()[-1]["state"] == "applied"


def test_without_the_salt_the_target_answers_itself(servers, deployed):
    prompt = part(2)
    read_by(servers["middle"], deployed["large"], prompt)
    salted = servers["large"].complete(prompt, cache_salt=deployed["large"].salt)
    assert salted["kvhub"]["status"] == "applied"
    plain = servers["large"].complete(prompt)
    assert (plain["cached"], plain["kvhub"]) == (0, None)
    require_same(plain, own("large", prompt), servers["large"])
    other = servers["large"].complete(prompt, cache_salt="kvhub:0123456789abcdef")
    assert (other["cached"], other["kvhub"]) == (0, None)
    tenant = servers["large"].complete(prompt, cache_salt=f"{deployed['large'].salt}:somebody")
    assert (tenant["cached"], tenant["kvhub"]["status"]) == (0, "fallback_reprefill")
    require_same(tenant, own("large", prompt), servers["large"])


def test_tenants_find_their_own(servers, deployed):
    prompt = part(3)
    read_by(servers["middle"], deployed["large"], prompt, cache_salt="me")
    mine = servers["large"].complete(prompt, cache_salt=f"{deployed['large'].salt}:me")
    assert mine["kvhub"]["mapped_tokens"] == whole(prompt)
    nobody = servers["large"].complete(prompt, cache_salt=deployed["large"].salt)
    assert nobody["kvhub"]["status"] == "fallback_reprefill"


def test_nothing_in_the_store(servers, deployed):
    prompt = part(4)
    found = servers["large"].complete(prompt, cache_salt=deployed["large"].salt)
    assert (found["cached"], found["kvhub"]["status"]) == (0, "fallback_reprefill")
    assert deployed["large"].status()[-1]["reason"] == "nothing in the store"
    require_same(found, own("large", prompt), servers["large"])


def test_poisoned_entries_are_misses(servers, deployed):
    """The first chunk of the prompt is damaged, so that none of them can be used."""
    store = deployed["large"].store
    before = {*store.rglob("*")}
    prompt = part(5)
    read_by(servers["middle"], deployed["large"], prompt, count=1)
    new = [path for path in {*store.rglob("*")} - before if path.is_file()]
    assert len(new) == len(prompt) // CHUNK
    for path in new:
        content = bytearray(path.read_bytes())
        content[-1] ^= 255
        path.chmod(0o600)
        path.write_bytes(content)
    found = servers["large"].complete(prompt, cache_salt=deployed["large"].salt)
    assert (found["cached"], found["kvhub"]["status"]) == (0, "fallback_reprefill")
    require_same(found, own("large", prompt), servers["large"])
    assert "miss: damaged" in servers["large"].log.read_text()


def test_requests_at_once(servers, deployed):
    """Of one prompt and of several, with and without the salt.

    Where the one without it comes first, its states are saved in time to be taken instead.
    """
    prompts = [part(number, 130) for number in (11, 12, 13)]
    for prompt in prompts:
        read_by(servers["middle"], deployed["large"], prompt, count=1)
    salt = deployed["large"].salt
    asked = [
        (prompt, {"cache_salt": salt} if mapped else {})
        for prompt in prompts
        for mapped in (True, False, True)
    ]
    with ThreadPoolExecutor(len(asked)) as threads:
        found = [*threads.map(lambda item: servers["large"].complete(item[0], **item[1]), asked)]
    for (prompt, fields), answer in zip(asked, found, strict=True):
        told = answer["kvhub"]
        assert (told is not None) == bool(fields)
        kinds = []
        if fields:
            exact, mapped = (told[f"{kind}_tokens"] // CHUNK for kind in ("exact", "mapped"))
            assert exact + mapped == 128 // CHUNK
            kinds = ["own"] * exact + ["mapped"] * mapped
        require_same(answer, behind("large", prompt, kinds), servers["large"], **fields)


def test_other_requests_are_unsupported(servers, deployed):
    prompt = part(14)
    read_by(servers["middle"], deployed["large"], prompt, count=1)
    named = {"kvhub": {"mapper": "another"}}
    found = servers["large"].complete(
        prompt, cache_salt=deployed["large"].salt, kv_transfer_params=named
    )
    assert (found["cached"], found["kvhub"]["status"]) == (0, "unsupported")
    digest = deployed["large"].salt.split(":")[1]
    found = servers["large"].complete(prompt, kv_transfer_params={"kvhub": {"mapper": digest}})
    assert (found["cached"], found["kvhub"]["status"]) == (0, "unsupported")
    require_same(found, own("large", prompt), servers["large"])


def test_a_source_that_is_killed_half_way(servers, deployed, root):
    """What it had saved is mapped, or not found; the target answers either way."""
    found, prompt = deployed["large"], part(15, 300)
    source = Server(
        *(FAMILY / "middle", found.path, found.transfer("source"), root / "killed.log"),
        *("--max-num-batched-tokens", "64"),
    )
    try:
        source.ready()
        before = entries(found.store)
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(source.complete, prompt, 600)
            until(lambda: entries(found.store) > before, seconds=60.0, pause=0.005)
            source.kill()
            assert isinstance(asked.exception(), OSError)
    finally:
        source.kill()
    assert entries(found.store) > before
    answer = servers["large"].complete(prompt, cache_salt=found.salt)
    mapped = answer["kvhub"]["mapped_tokens"]
    assert mapped % CHUNK == 0
    assert (answer["kvhub"]["status"] == "applied") == (mapped > 0)
    expected = handed_off("large", prompt, mapped) if mapped else own("large", prompt)
    require_same(answer, expected, servers["large"], cache_salt=found.salt)
