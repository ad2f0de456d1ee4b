"""The SmolLM2 pair in two servers: a language model with a chat template of its own."""

from pathlib import Path

import pytest
from conftest import SMOLLM2, Deployed, folder, serving
from conversation import converse
from servers import Server

from kvhub.models import load_tokenizer

pytestmark = pytest.mark.skipif(
    not (SMOLLM2 / "source").is_dir(),
    reason="needs the models of examples/smollm2/make_models.py, which make test-vllm makes",
)
ASKED = (
    "Name the three largest rivers of South America, and say in which countries each of them "
    "begins and ends. Then tell me which of them carries most water, and why that is so.",
    "And which of them is the longest one? Answer in one sentence, please.",
    "How do people there use these rivers? Write about fishing, trade and travel.",
    "Say it once more, for a child that has never seen a river.",
)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    return Deployed("target", tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def servers(smollm2):
    started = {
        side: Server(
            *(folder(side), smollm2.path, smollm2.transfer(side), smollm2.root / f"{side}.log")
        )
        for side in ("source", "target")
    }
    yield from serving(started)


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_a_conversation_goes_back_and_forth(servers, smollm2, chat):
    names = ["source", "target", "source", "target"]
    texts = ASKED if chat else [Path(__file__).read_text()[:900], *ASKED[1:]]
    tokenizer = load_tokenizer(str(folder("target")))
    found = converse(servers, {"target": smollm2}, names, texts, tokenizer, chat=chat)
    assert {*found[1]} == {"mapped"}
    assert found[3][-1] == "mapped"
    assert len(found[3]) > len(found[1])
