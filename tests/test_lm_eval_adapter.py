"""Harness tasks: scored as the harness' own model scores them, whoever has read the context."""

import importlib
import json
import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from mapping import config_for, identity_mapper, random_mapper
from tiny import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from kvhub import KVMapper, handoff
from kvhub.cache import cache_of, prefill
from kvhub.errors import (
    IncompatiblePairError,
    NetworkError,
    NotFoundError,
    UsageError,
    VerificationError,
)

pytest.importorskip("lm_eval")

import lm_eval
from lm_eval.tasks import TaskManager

from kvhub import continuations, lm_eval_tasks
from kvhub.lm_eval_adapter import SETTINGS, HandoffLM
from kvhub.lm_eval_tasks import evaluate_tasks

VOCABULARY = 320
QUESTIONS = [
    ("What melts in the sun?", ["snow", "a stone", "iron", "the sea itself"], 0),
    ("What do bees make?", ["bread", "honey", "paper", "wool"], 1),
    ("Which of these is a colour?", ["seven", "running", "green"], 2),
    ("What is used to write?", ["a spoon", "a pencil", "a shoe", "a cloud"], 1),
    ("Where do fish live?", ["in trees", "in the desert", "under the bed", "in water"], 3),
    ("What is colder than water?", ["ice", "fire", "steam", "sand"], 0),
]
PAIRS = [
    ("Question: What melts in the sun?\nAnswer:", " snow"),
    ("Question: What melts in the sun?\nAnswer:", " the sea itself"),
    ("Bees make honey and ", "wax, and they live in a hive."),
    ("Question: What melts in the sun?\nAnswer:", " a stone"),
    ("W", "ater"),
    ("", "Fish live in water."),
    ("Fish live in water. Where do fish live? Fish", " live in water."),
]
TEXTS = ["Bees make honey. Fish live in water, and snow melts in the sun.", "Snow.", ""]


@pytest.fixture(scope="module")
def source():
    return tiny_model("qwen3", 2, seed=7, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def target():
    return tiny_model("qwen3", 3, vocab_size=VOCABULARY)


def build_tokenizer(bos=False):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = [f"{question} {' '.join(choices)}" for question, choices, _ in QUESTIONS]
    tokenizer.train_from_iterator(text + TEXTS, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def adapted(source, target, tokenizer):
    """Return a function that makes the random mapper's model of a setting."""

    def adapt(setting="mapped", **options):
        mapper = options.pop("mapper", None) or random_mapper(source, target)
        return HandoffLM(
            mapper, source, target, options.pop("tokenizer", tokenizer), setting=setting, **options
        )

    return adapt


@pytest.fixture
def own(target, tokenizer):
    """Return a function that makes a model of the target handed to itself."""

    def adapt(setting="mapped", **options):
        return HandoffLM(
            identity_mapper(target), target, target, tokenizer, setting=setting, **options
        )

    return adapt


def harness_model(model, tokenizer, **options):
    pytest.importorskip("accelerate", reason="the harness' own model needs accelerate")
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", **options)


def requests(arguments):
    return [SimpleNamespace(args=tuple(args)) for args in arguments]


def assert_same_scores(found, expected):
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    logprobs = torch.tensor([logprob for logprob, _ in found])
    torch.testing.assert_close(
        logprobs, torch.tensor([logprob for logprob, _ in expected]), rtol=1e-4, atol=1e-4
    )


@torch.no_grad()
def direct(model, context, continuation):
    """Score by one forward over everything."""
    ids = torch.tensor([[*context, *continuation]])
    logprobs = model(ids[:, :-1]).logits[0, -len(continuation) :].double().log_softmax(-1)
    text = ids[0, -len(continuation) :]
    return (
        float(logprobs.gather(1, text[:, None]).sum()),
        bool((logprobs.argmax(-1) == text).all()),
    )


@torch.no_grad()
def stepwise(model, cache, last, continuation):
    """Score one token after the other on top of a cache."""
    total, greedy = 0.0, True
    for token in continuation:
        output = prefill(model, torch.tensor([[last]]), cache=cache)
        cache, last = cache_of(output), token
        logprobs = output.logits[0, -1].double().log_softmax(-1)
        total += float(logprobs[token])
        greedy = greedy and int(logprobs.argmax()) == token
    return total, greedy


def encoded(model):
    """Token ids of PAIRS, as the harness splits them."""
    return [
        model._encode_pair(*pair)
        if pair[0]
        else ([model.prefix_token_id], model.tok_encode(pair[1]))
        for pair in PAIRS
    ]


def count_calls(mapper):
    calls = []
    mapper.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("setting", ["target_alone", "source_alone"])
def test_alone_settings_score_like_one_forward(adapted, source, target, setting):
    model = adapted(setting)
    scorer = source if setting == "source_alone" else target
    expected = [direct(scorer, *ids) for ids in encoded(model)]
    assert_same_scores(model.loglikelihood(requests(PAIRS), disable_tqdm=True), expected)


@pytest.mark.parametrize("setting", ["target_alone", "source_alone"])
@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("max_length", [64, 12])
def test_alone_settings_are_the_harness_own_model(adapted, setting, bos, max_length):
    """Tokenization, truncation, windows and scores, with and without a BOS token."""
    tokenizer = build_tokenizer(bos)
    model = adapted(setting, tokenizer=tokenizer, max_length=max_length)
    reference = harness_model(model.model, build_tokenizer(bos), max_length=max_length)
    pairs = [pair for pair in PAIRS if len(tokenizer.encode(pair[1])) <= max_length]
    assert_same_scores(
        model.loglikelihood(requests(pairs), disable_tqdm=True),
        reference.loglikelihood(requests(pairs), disable_tqdm=True),
    )
    texts = [(text,) for text in TEXTS]
    torch.testing.assert_close(
        torch.tensor(model.loglikelihood_rolling(requests(texts), disable_tqdm=True)),
        torch.tensor(reference.loglikelihood_rolling(requests(texts), disable_tqdm=True)),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("setting", SETTINGS)
def test_generation_is_greedy_and_ends_at_the_first_stop(adapted, source, target, setting):
    model = adapted(setting)
    tokenizer, text = model.tokenizer, PAIRS[2][0]
    ids = torch.tensor([tokenizer.encode(text)])
    options = {"max_new_tokens": 16, "do_sample": False}
    if setting == "mapped":
        written = handoff(model.mapper, source, target, ids, **options)
    else:
        alone = source if setting == "source_alone" else target
        written = alone.generate(ids, attention_mask=torch.ones_like(ids), **options)
    free = tokenizer.decode(written[0, ids.shape[1] :])
    stop = free[3:5]
    asked = [(text, {"until": until, "max_gen_toks": 16}) for until in ([], ["no", stop], stop)]
    steps = []
    hook = model.model.register_forward_hook(lambda *_: steps.append(1))
    found = model.generate_until(requests(asked[:1]), disable_tqdm=True)
    unstopped = len(steps)
    found += model.generate_until(requests(asked[1:]), disable_tqdm=True)
    hook.remove()
    assert found == [free] + 2 * [free.split(stop)[0]]
    assert len(steps) - unstopped < 2 * unstopped - 10


@pytest.mark.parametrize("setting", ["target_alone", "source_alone"])
def test_generation_is_the_harness_own_model(adapted, tokenizer, setting):
    model = adapted(setting, max_length=40)
    reference = harness_model(model.model, tokenizer, max_length=40)
    free = reference.generate_until(requests([(PAIRS[2][0], {"max_gen_toks": 16})]))[0]
    assert len(free) > 4
    asked = [
        (PAIRS[2][0], {"until": [], "max_gen_toks": 16, "do_sample": False, "temperature": 0.0}),
        (PAIRS[2][0], {"until": [free[3:5]], "max_gen_toks": 16, "num_beams": 1}),
        (PAIRS[6][0], {"until": ["\n\n", "?"], "max_new_tokens": 30}),
    ]
    expected = reference.generate_until(requests(asked), disable_tqdm=True)
    assert model.generate_until(requests(asked), disable_tqdm=True) == expected
    assert expected[:2] == [free, free.split(free[3:5])[0]]


@pytest.mark.parametrize("exact_prefix", [0, 4])
@pytest.mark.parametrize("max_length", [64, 12])
def test_the_identity_mapper_changes_nothing(own, exact_prefix, max_length):
    mapped = own(exact_prefix=exact_prefix, max_length=max_length)
    calls = count_calls(mapped.mapper)
    alone = own("target_alone", max_length=max_length)
    pairs = [pair for pair in PAIRS if len(alone.tok_encode(pair[1])) <= max_length]
    found, expected = (
        model.loglikelihood(requests(pairs), disable_tqdm=True) for model in (mapped, alone)
    )
    assert_same_scores(found, expected)
    texts = [(text,) for text in TEXTS]
    found, expected = (
        model.loglikelihood_rolling(requests(texts), disable_tqdm=True) for model in (mapped, alone)
    )
    assert found == pytest.approx(expected, rel=1e-4)
    written = [(text, {"max_gen_toks": 8}) for text in (PAIRS[2][0], "B", "")]
    found, expected = (
        model.generate_until(requests(written), disable_tqdm=True) for model in (mapped, alone)
    )
    assert found == expected
    assert calls


@pytest.mark.parametrize("exact_prefix", [0, 4])
def test_continuations_run_on_the_mapped_context(adapted, source, target, exact_prefix):
    model = adapted(exact_prefix=exact_prefix)
    context, continuation = encoded(model)[1]
    cache = model.mapper(cache_of(prefill(source, torch.tensor([context[:-1]]))))
    if exact_prefix:
        exact = cache_of(prefill(target, torch.tensor([context[:exact_prefix]])))
        for layer, begin in zip(cache.layers, exact.layers, strict=True):
            layer.keys[:, :, :exact_prefix] = begin.keys
            layer.values[:, :, :exact_prefix] = begin.values
    expected = stepwise(target, cache, context[-1], continuation)
    found = model.loglikelihood(requests([PAIRS[1]]), disable_tqdm=True)
    assert_same_scores(found, [expected])
    assert abs(found[0][0] - direct(target, context, continuation)[0]) > 0.1


def test_contexts_of_up_to_one_token_are_exact(adapted, target):
    model = adapted(exact_prefix=0)
    calls = count_calls(model.mapper)
    context, continuation = [5], [6, 7, 8]
    found = model._loglikelihood_tokens(
        [(None, [], continuation), (None, context, continuation)], disable_tqdm=True
    )
    expected = [direct(target, ids, continuation) for ids in ([model.prefix_token_id], context)]
    assert_same_scores(found, expected)
    assert not calls
    model._loglikelihood_tokens([(None, [5, 6], continuation)], disable_tqdm=True)
    assert len(calls) == 1


def test_greedy_continuations_are_recognized(adapted):
    model = adapted()
    context = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        cache = model._read(context[0].tolist())
        greedy, last = [], 10
        for _ in range(4):
            output = prefill(model.target, torch.tensor([[last]]), cache=cache)
            cache, last = cache_of(output), int(output.logits[0, -1].argmax())
            greedy.append(last)
    wrong = [*greedy[:3], (greedy[3] + 1) % VOCABULARY]
    asked = [(None, context[0].tolist(), text) for text in (greedy, wrong, greedy[:1], wrong[3:])]
    found = model._loglikelihood_tokens(asked, disable_tqdm=True)
    assert [answer[1] for answer in found] == [True, False, True, False]


def test_each_context_is_mapped_once(adapted):
    model = adapted(batch_size=2)
    calls = count_calls(model.mapper)
    questions = [
        (f"Question: {q}\nAnswer:", f" {c}") for q, choices, _ in QUESTIONS for c in choices
    ]
    model.loglikelihood(requests(questions[::2] + questions[1::2]), disable_tqdm=True)
    assert len(calls) == len(QUESTIONS)
    asked = [(PAIRS[2][0], {"max_gen_toks": 4, "until": [stop]}) for stop in ("a", "b", "c")]
    model.generate_until(requests(asked), disable_tqdm=True)
    assert len(calls) == len(QUESTIONS) + 1


def test_neither_batches_nor_chunks_change_the_scores(adapted, monkeypatch):
    expected = adapted(batch_size=8).loglikelihood(requests(PAIRS), disable_tqdm=True)
    found = adapted(batch_size=1).loglikelihood(requests(PAIRS), disable_tqdm=True)
    assert_same_scores(found, expected)
    monkeypatch.setattr(continuations, "MAX_LOGITS", 3 * VOCABULARY)
    assert_same_scores(adapted().loglikelihood(requests(PAIRS), disable_tqdm=True), expected)


def test_long_contexts_lose_their_beginning_and_that_is_said(adapted, target, caplog):
    model = adapted("target_alone", max_length=8)
    context, continuation = list(range(10, 30)), [5, 6, 7]
    with caplog.at_level(logging.WARNING):
        found = model._loglikelihood_tokens([(None, context, continuation)], disable_tqdm=True)
    assert_same_scores(found, [direct(target, context[-6:], continuation)])
    assert "A context of 20 tokens is cut to its last 6." in caplog.text


@pytest.mark.parametrize("continuation", [[], list(range(3, 12))])
def test_continuations_that_cannot_be_scored_are_refused(adapted, continuation):
    with pytest.raises(UsageError, match="continuation is empty or too long"):
        adapted(max_length=8)._loglikelihood_tokens([(None, [5, 6], continuation)])


def test_requests_that_cannot_be_generated_are_refused(adapted):
    model = adapted(max_length=8)
    for other in ({"do_sample": True}, {"temperature": 0.7}, {"num_beams": 2}):
        with pytest.raises(UsageError, match="expected greedy decoding"):
            model.generate_until(requests([("Bees", {"max_gen_toks": 2, **other})]))
    with pytest.raises(UsageError, match="expected 1 to max_length, 8"):
        model.generate_until(requests([("Bees", {"max_gen_toks": 8})]))


def test_scores_that_are_no_numbers_are_refused(adapted, target):
    broken = tiny_model("qwen3", 3, vocab_size=VOCABULARY)
    broken.model.norm.weight.data[0] = float("nan")
    model = adapted("target_alone")
    model.target = broken
    with pytest.raises(VerificationError, match="not numbers"):
        model.loglikelihood(requests(PAIRS), disable_tqdm=True)


def test_wrong_models_tokenizers_and_settings_are_refused(adapted, source, target, tokenizer):
    with pytest.raises(IncompatiblePairError, match="source model"):
        HandoffLM(random_mapper(source, target), target, target, tokenizer)
    with pytest.raises(UsageError, match="found 'both'"):
        adapted("both")
    with pytest.raises(UsageError, match="max_length"):
        adapted(max_length=0)
    config = config_for(source, target)
    specs = {role: getattr(config, role).to_dict() for role in ("source", "target")}
    specs["target"]["tokenizer_digest"] = "0" * 64
    mapper = random_mapper(source, type(config.target).from_dict(specs["target"]))
    with pytest.raises(IncompatiblePairError, match="tokenizer_digest"):
        adapted(mapper=mapper)


@pytest.fixture
def harness(tmp_path, monkeypatch):
    """Write tasks made from local text, and return the harness' manager of these alone."""
    # Two seconds and more of looking for compilers and drivers.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    data = tmp_path / "questions.jsonl"
    rows = [{"question": q, "choices": choices, "label": label} for q, choices, label in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "Question: {{question}}\nAnswer:",
    }
    metrics = [
        {"metric": name, "aggregation": "mean", "higher_is_better": True}
        for name in ("acc", "acc_norm", "exact_match")
    ]
    choice = {
        "task": "local_choice",
        **common,
        "output_type": "multiple_choice",
        "doc_to_target": "{{label}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": metrics[:2],
    }
    tasks = [
        choice,
        {**choice, "task": "away", "dataset_path": "kvhub-tests/nothing", "dataset_kwargs": {}},
        {
            "task": "local_answer",
            **common,
            "output_type": "generate_until",
            "doc_to_target": "{{choices[label]}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6},
            "metric_list": metrics[2:],
        },
        {
            "group": "local",
            "task": ["local_choice", "local_answer"],
            "aggregate_metric_list": [{"metric": "acc", "filter_list": ["none"]}],
        },
    ]
    folder = tmp_path / "tasks"
    folder.mkdir()
    for number, task in enumerate(tasks):
        # JSON is YAML.
        (folder / f"{number}.yaml").write_text(json.dumps(task), encoding="utf-8")
    return TaskManager(include_path=str(folder), include_defaults=False)


def accuracy(score, normalized=False):
    """Share of questions that `score(context, continuation)` answers rightly."""
    right = 0
    for question, choices, label in QUESTIONS:
        scores = [
            score(f"Question: {question}\nAnswer:", f" {choice}")
            / (len(choice) if normalized else 1)
            for choice in choices
        ]
        right += scores.index(max(scores)) == label
    return right / len(QUESTIONS)


def test_a_task_from_local_text_runs_through_the_harness(
    adapted, source, target, tokenizer, harness
):
    found = evaluate_tasks(
        random_mapper(source, target),
        source,
        target,
        tokenizer,
        ["local_choice", "local_answer"],
        chance={"local_choice": 0.0},
        task_manager=harness,
    )
    assert set(found) == {"local_choice", "local_answer"}
    choice = found["local_choice"]
    assert (choice["samples"], choice["chance"]) == (len(QUESTIONS), 0.0)
    assert list(choice["settings"]) == list(SETTINGS)
    mapped = adapted()

    def score_mapped(*pair):
        context, continuation = mapped._encode_pair(*pair)
        return stepwise(target, mapped._read(context), context[-1], continuation)[0]

    scores = {
        "target_alone": lambda *pair: direct(target, *mapped._encode_pair(*pair))[0],
        "source_alone": lambda *pair: direct(source, *mapped._encode_pair(*pair))[0],
        "mapped": score_mapped,
    }
    for setting, score in scores.items():
        metrics = choice["settings"][setting]
        assert metrics["acc,none"] == pytest.approx(accuracy(score))
        assert metrics["acc_norm,none"] == pytest.approx(accuracy(score, normalized=True))
    exact = found["local_answer"]
    assert set(exact["settings"]["mapped"]) == {"exact_match,none", "exact_match_stderr,none"}
    assert exact["chance"] is None
    json.dumps(found, allow_nan=False)


def test_groups_and_limits_are_the_harness_own(source, target, tokenizer, harness):
    found = evaluate_tasks(
        random_mapper(source, target),
        source,
        target,
        tokenizer,
        "local",
        settings=["mapped"],
        limit=2,
        task_manager=harness,
    )
    assert set(found) == {"local", "local_choice", "local_answer"}
    assert found["local_choice"]["samples"] == 2
    assert found["local"]["samples"] is None
    assert found["local"]["retention"] == {}
    score = found["local_choice"]["settings"]["mapped"]["acc,none"]
    assert found["local"]["settings"]["mapped"]["acc,none"] == score


def test_missing_tasks_and_data_are_said(source, target, tokenizer, harness):
    pair = (random_mapper(source, target), source, target, tokenizer)
    with pytest.raises(NotFoundError, match="no task local_choise"):
        evaluate_tasks(*pair, ["local_choise"], task_manager=harness)
    with pytest.raises(NetworkError, match="The data of away cannot be had"):
        evaluate_tasks(*pair, ["away"], task_manager=harness)


def outputs(**accuracies):
    """Return the harness' results of one task, by setting: accuracy and standard error."""
    return {
        setting: {
            "results": {"quiz": {"alias": "quiz", "acc,none": acc, "acc_stderr,none": stderr}},
            "higher_is_better": {"quiz": {"acc": True}},
            "n-samples": {"quiz": {"original": 9, "effective": 9}},
            "group_subtasks": {},
            "configs": {"quiz": {}},
        }
        for setting, (acc, stderr) in accuracies.items()
    }


def test_retention_is_of_the_targets_score_and_of_its_distance_to_chance():
    found = lm_eval_tasks._compared(
        "quiz", outputs(mapped=(0.45, 0.01), target_alone=(0.5, 0.01)), {"quiz": 0.25}
    )
    assert found["retention"] == {"acc,none": pytest.approx(0.9)}
    assert found["floor_normalized_retention"] == {"acc,none": pytest.approx(0.8)}
    assert found["settings"]["mapped"] == {"acc,none": 0.45, "acc_stderr,none": 0.01}


@pytest.mark.parametrize(
    ("target_alone", "chance"), [((0.26, 0.01), 0.25), ((0.2, 0.01), 0.25), ((0.5, 0.01), None)]
)
def test_floor_normalized_retention_needs_a_target_above_a_known_chance(target_alone, chance):
    chances = {} if chance is None else {"quiz": chance}
    found = lm_eval_tasks._compared(
        "quiz", outputs(mapped=(0.25, 0.01), target_alone=target_alone), chances
    )
    assert found["floor_normalized_retention"] == {"acc,none": None}
    assert found["retention"]["acc,none"] == pytest.approx(0.25 / target_alone[0])


def test_scores_that_the_harness_has_not_are_none():
    found = lm_eval_tasks._compared(
        "quiz", outputs(mapped=(float("nan"), "N/A"), target_alone=(0.0, "N/A")), {"quiz": 0.0}
    )
    assert found["settings"]["mapped"] == {"acc,none": None, "acc_stderr,none": None}
    assert found["retention"] == found["floor_normalized_retention"] == {"acc,none": None}


def test_chance_of_a_group_is_that_of_its_tasks():
    mmlu = {"dataset_path": "cais/mmlu", "output_type": "multiple_choice"}
    output = {
        "configs": {
            "mmlu_anatomy": mmlu,
            "mmlu_virology": mmlu,
            "mmlu_generated": {**mmlu, "output_type": "generate_until"},
            "hellaswag": {},
            "winogrande": {},
        },
        "group_subtasks": {
            "mmlu_other": ["mmlu_anatomy", "mmlu_virology"],
            "mixed": ["hellaswag", "winogrande"],
            "unknown": ["mmlu_anatomy", "mmlu_generated"],
        },
    }
    expected = {
        "mmlu_anatomy": 0.25,
        "mmlu_other": 0.25,
        "mmlu": 0.25,
        "arc_challenge": 0.25,
        "gsm8k": 0.0,
        "mixed": None,
        "unknown": None,
        "mmlu_generated": None,
    }
    chances = lm_eval_tasks.CHANCE
    assert {task: lm_eval_tasks._chance(task, output, chances) for task in expected} == expected


def test_the_harness_loads_a_mapper_by_name(tmp_path, source, target, tokenizer, harness):
    for name, model in (("source", source), ("target", target)):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    random_mapper(source, target).save_pretrained(tmp_path / "mapper")
    places = {name: str(tmp_path / name) for name in ("mapper", "source", "target")}
    options = {"task_manager": harness, "tasks": ["local_choice"], "log_samples": False}
    results = [
        lm_eval.simple_evaluate(model="kvhub", model_args=arguments, batch_size="2", **options)
        for arguments in (
            {**places, "exact_prefix": 0, "device": "cpu"},
            ",".join(f"{name}={place}" for name, place in places.items())
            + ",exact_prefix=0,device=cpu",
        )
    ]
    pair = (KVMapper.from_pretrained(places["mapper"]), source, target, tokenizer)
    model = HandoffLM(*pair, exact_prefix=0)
    expected = lm_eval.simple_evaluate(model=model, **options)
    for found in results:
        assert found["results"] == expected["results"]
    with pytest.raises(UsageError, match="needs a mapper"):
        HandoffLM.create_from_arg_string("setting=mapped")
    with pytest.raises(UsageError, match="found 'auto'"):
        HandoffLM.create_from_arg_obj({"mapper": "m"}, {"batch_size": "auto"})


def test_chat_templates_are_the_tokenizers(adapted):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    model = adapted(tokenizer=tokenizer)
    chat = [{"role": "user", "content": "Do bees make honey?"}]
    assert model.apply_chat_template(chat) == "[user] Do bees make honey?\n[assistant]"
    assert model.chat_template(True) == tokenizer.chat_template


def test_without_the_harness_the_hint_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "kvhub.lm_eval_adapter")
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"lm_eval.* pip install \"kvhub\[lm-eval\]\""):
        importlib.import_module("kvhub.lm_eval_adapter")
