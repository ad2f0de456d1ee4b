"""Answers to CoQA's questions over ten turns: F1 of models that share a conversation.

The paper's multi-turn experiment with its data. It needs the Hub for the data set, and models that
can answer questions; of the latter the embedded ones are none.
"""

import re
import string
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice

import torch

from kvhub import Conversation, console
from kvhub.bootstrap import Bootstrap

DATASET = "stanfordnlp/coqa"
TURNS = 10
NEW_TOKENS = 24
WAYS = ("alone", "once", "switch")


@dataclass(frozen=True)
class Dialogue:
    """A passage with questions and the answers that people gave."""

    story: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]


def dialogues() -> Iterator[Dialogue]:
    """Those of the validation split that have enough questions."""
    from datasets import load_dataset

    for row in load_dataset(DATASET, split="validation", streaming=True):
        if len(row["questions"]) >= TURNS:
            answers = tuple(row["answers"]["input_text"][:TURNS])
            yield Dialogue(row["story"], tuple(row["questions"][:TURNS]), answers)


def f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall in words, without case, punctuation and articles."""
    found, expected = _words(answer), _words(reference)
    if not found or not expected:
        return float(found == expected)
    common = sum((Counter(found) & Counter(expected)).values())
    return 2 * common / (len(found) + len(expected))


def _words(text: str) -> list[str]:
    text = "".join(" " if letter in string.punctuation else letter for letter in text.lower())
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def converse(models: dict, mappers: dict, tokenizer, dialogue: Dialogue, way: str) -> list[float]:
    """F1 of the second model's answers by turn; NaN at the turns of the first one.

    The answers stay in the conversation as they were given, right or wrong.
    """
    needed = {
        "alone": {},
        "once": {pair: mapper for pair, mapper in mappers.items() if pair[1] == "second"},
        "switch": mappers,
    }
    conversation = Conversation(models, needed[way])
    text = tokenizer(f"{dialogue.story}\n", return_tensors="pt")["input_ids"]
    if way != "alone":
        conversation.read("first", text)
    scores = []
    exchanges = zip(dialogue.questions, dialogue.answers, strict=True)
    for turn, (question, reference) in enumerate(exchanges):
        role = "first" if way == "switch" and turn % 2 == 1 else "second"
        asked = tokenizer(f"\nQ: {question}\nA:", return_tensors="pt", add_special_tokens=False)
        text = torch.cat([text, asked["input_ids"]], dim=1)
        reply = conversation.reply(
            role,
            text,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
        answer = tokenizer.decode(reply[0], skip_special_tokens=True).split("\n")[0]
        scores.append(f1(answer, reference) if role == "second" else float("nan"))
        # Only the answer's line goes on, so the next turn crops what was written behind it.
        said = tokenizer(answer, return_tensors="pt", add_special_tokens=False)["input_ids"]
        text = torch.cat([text, said.long()], dim=1)
    return scores


def measure(models: dict, mappers: dict, tokenizer, count: int, given=None) -> dict:
    """Mean F1 of each way with 95 % intervals over dialogues, and by turn."""
    rows: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for done, dialogue in enumerate(islice(given or dialogues(), count), start=1):
        for way in WAYS:
            rows[way].append(converse(models, mappers, tokenizer, dialogue, way))
        console.say(f"CoQA: {done} of {count} dialogues")
    result = {}
    for way, scores in rows.items():
        table = torch.tensor(scores, dtype=torch.float64)
        answered = ~table.isnan()
        sums = torch.stack([table.nan_to_num().sum(1), answered.sum(1).double()], dim=1)
        result[way] = {
            "f1": asdict(Bootstrap(sums).estimate(lambda total: total[..., 0] / total[..., 1])),
            "f1_by_turn": [None if mean.isnan() else float(mean) for mean in table.nanmean(0)],
        }
    return result
