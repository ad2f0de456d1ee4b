"""Tasks of lm-evaluation-harness on a target that goes on from a mapped cache; extra `lm-eval`.

A request has a context and a continuation. All but the last token of the context become a cache,
in one of three ways; that last token and the continuation then run through the model on top:

    target_alone   the target has read the context itself
    mapped         the source has read it, and its cache is mapped, as in a hand-off
    source_alone   the source has read it, and the source goes on

Tokenization, truncation and scoring are the same in all three, and as in the harness' own `hf`
model. The harness' command line with the model `kvhub` is `python -m kvhub.lm_eval_adapter`:

    python -m kvhub.lm_eval_adapter --model kvhub --model_args mapper=NAME,setting=mapped \
        --tasks arc_challenge --num_fewshot 25
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers.utils.logging import tqdm

from kvhub.cache import build_cache, cache_of, prefill
from kvhub.compatibility import require_same
from kvhub.continuations import repeat_row, score_continuations
from kvhub.errors import UsageError
from kvhub.generation import EXACT_PREFIX, generate_from, prefill_mapped
from kvhub.mapper import KVMapper
from kvhub.spec import ModelSpec
from kvhub.tokenization import tokenizer_digest

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    raise UsageError(
        f"Harness tasks need the package {error.name}, which is not installed.",
        'Run pip install "kvhub[lm-eval]".',
    ) from error

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["SETTINGS", "HandoffLM"]

logger = logging.getLogger(__name__)

Setting = Literal["target_alone", "mapped", "source_alone"]
SETTINGS: tuple[Setting, ...] = ("target_alone", "mapped", "source_alone")
BATCH_SIZE = 8
MAX_NEW_TOKENS = 256  # where a task does not say; the harness' own default
# The harness' names for how many tokens to generate, the first one wins.
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@register_model("kvhub")
class HandoffLM(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """A pair of models and their mapper, as one language model of the harness.

    Parameters
    ----------
    mapper
        Fitted for these two models.
    source_model, target_model
        In eval mode; they and the mapper may be on different devices.
    tokenizer
        Of the target, which is the source's too.
    setting
        Who reads the context and who goes on: `target_alone`, `mapped` or `source_alone`.
    exact_prefix
        First context tokens that the target reads itself in the mapped setting.
    max_length
        Longest input in tokens; what is longer loses tokens on its left. None: the shorter of the
        two models' limits, so that all settings see the same input.
    batch_size
        Continuations of one context that are scored at once.

    Raises
    ------
    UsageError
        A parameter out of range; later, a tokenizer with neither BOS nor EOS, or a request that
        does not fit into `max_length`.
    IncompatiblePairError
        The mapper was fitted for other models or another tokenizer.
    """

    def __init__(
        self,
        mapper: KVMapper,
        source_model: "PreTrainedModel",
        target_model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        *,
        setting: Setting = "mapped",
        exact_prefix: int = EXACT_PREFIX,
        max_length: int | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> None:
        super().__init__()
        if setting not in SETTINGS:
            raise UsageError(f"setting must be one of {', '.join(SETTINGS)}; found {setting!r}.")
        source, target = mapper.config.source, mapper.config.target
        if max_length is None:
            max_length = min(source.max_positions, target.max_positions)
        if exact_prefix < 0 or max_length < 1 or batch_size < 1:
            raise UsageError(
                "exact_prefix must be at least 0, max_length and batch_size at least 1; found "
                f"{exact_prefix}, {max_length} and {batch_size}."
            )
        require_same(source, ModelSpec.from_model(source_model), "source")
        found = ModelSpec.from_model(target_model)
        require_same(target, replace(found, tokenizer_digest=tokenizer_digest(tokenizer)), "target")
        self.mapper, self.source, self.target = mapper, source_model, target_model
        self.tokenizer = tokenizer
        self.setting, self.exact_prefix = setting, exact_prefix
        self.max_length, self.batch_size = max_length, batch_size
        self._device = self.model.device

    @classmethod
    def from_pretrained(
        cls,
        mapper: str,
        *,
        source: str | None = None,
        target: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        **options: Any,
    ) -> "HandoffLM":
        """Load a mapper and its models by name; `options` as for the class.

        `source` and `target` name the models where they have been moved.
        """
        from kvhub.pairs import load_mapper_pair

        loaded, pair = load_mapper_pair(mapper, source, target, dtype, device)
        return cls(loaded, pair.source, pair.target, pair.tokenizer, **options)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> "HandoffLM":
        """Do `from_pretrained` with the harness' `--model_args`, `--batch_size` and `--device`."""
        added = {name: value for name, value in (additional_config or {}).items() if value}
        options = {**added, **arg_dict}
        options.pop("max_batch_size", None)
        if "mapper" not in options:
            raise UsageError(
                f"The model kvhub needs a mapper; found {sorted(options)}.",
                "Pass --model_args mapper=NAME.",
            )
        if "batch_size" in options:
            size = str(options["batch_size"])
            if not size.isdecimal():
                raise UsageError(f"batch_size must be a whole number; found {size!r}.")
            options["batch_size"] = int(size)
        return cls.from_pretrained(**options)

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: Mapping[str, Any] | None = None
    ) -> "HandoffLM":
        """Do the same with `key=value,key=value`."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def model(self) -> "PreTrainedModel":
        """The model that goes on."""
        return self.source if self.setting == "source_alone" else self.target

    @property
    def eot_token_id(self) -> int | None:
        token: int | None = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is: BOS, or EOS for a tokenizer without BOS."""
        token: int | None = self.tokenizer.bos_token_id
        if token is None:
            token = self.eot_token_id
        if token is None:
            raise UsageError(
                "The tokenizer has neither a BOS nor an EOS token; one must stand for an empty "
                "context.",
                "Load the tokenizer from the target model's own directory.",
            )
        return token

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids of a text, with the tokenizer's BOS unless the text begins with it."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode(self.prefix_token_id))
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return ids

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log likelihood of whole texts, in nats.

        In the harness' windows nearly every token is continuation, so little of a text is mapped
        here; `kvhub.evaluation.evaluate` measures perplexity on a mapped prefix.
        """
        windows: list[tuple[None, list[int], list[int]]] = []
        owners = []
        for owner, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in rolling:
                windows.append((None, *make_disjoint_window(window)))
                owners.append(owner)
        sums = [0.0] * len(requests)
        # Windows are as long as the models allow: one at a time.
        answers = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm, batch_size=1)
        for owner, (logprob, _) in zip(owners, answers, strict=True):
            sums[owner] += logprob
        for request, logprob in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, logprob)
        return sums

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Sum of log probabilities in nats, and whether greedy decoding would write the same."""
        # The last token of a continuation is predicted but never read.
        contexts = [
            self._cut(context, self.max_length + 1 - len(text)) for _, context, text in requests
        ]
        answers: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc=f"kvhub {self.setting}") as bar:
            for context, group in _same(contexts):
                cache = self._read(context)
                # Rows of about one length waste little on padding.
                group.sort(key=lambda index: len(requests[index][2]))
                step = batch_size or self.batch_size
                for start in range(0, len(group), step):
                    rows = group[start : start + step]
                    texts = [requests[index][2] for index in rows]
                    scores = score_continuations(
                        self.model, repeat_row(cache, len(rows)), context[-1], texts
                    )
                    for index, answer in zip(rows, scores, strict=True):
                        answers[index] = answer
                        if requests[index][0] is not None:
                            self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
                    bar.update(len(rows))
        return [answers[index] for index in range(len(requests))]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Write on greedily until one of a request's `until` strings, which is left out.

        Raises
        ------
        UsageError
            A task that is not greedy, or that generates more tokens than there is room for.
        """
        plans = [self._plan(*request.args) for request in requests]
        answers: dict[int, str] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc=f"kvhub {self.setting}") as bar:
            for context, group in _same([context for context, _, _ in plans]):
                cache = self._read(context)
                for index in group:
                    _, until, options = plans[index]
                    answers[index] = self._write(repeat_row(cache, 1), context, until, options)
                    args = requests[index].args
                    self.cache_hook.add_partial("generate_until", args, answers[index])
                    bar.update(1)
        return [answers[index] for index in range(len(requests))]

    def _cut(self, context: list[int], room: int) -> list[int]:
        """As much of a context's end as there is room for."""
        if not 0 < room <= self.max_length:
            raise UsageError(
                f"A request leaves room for {room} tokens of context; expected 1 to max_length, "
                f"{self.max_length}: its continuation is empty or too long.",
                "Raise max_length, generate fewer tokens, or leave this task out.",
            )
        context = context or [self.prefix_token_id]
        if len(context) > room:
            logger.warning("A context of %d tokens is cut to its last %d.", len(context), room)
        return context[-room:]

    def _plan(
        self, text: str, request: Mapping[str, Any]
    ) -> tuple[list[int], list[str], dict[str, Any]]:
        """Context, stop strings and options for `generate`."""
        options = dict(request)
        until = options.pop("until", None) or []
        until = [until] if isinstance(until, str) else list(until)
        limits = [options.pop(name, None) for name in LIMITS]
        tokens = int(next((limit for limit in limits if limit is not None), MAX_NEW_TOKENS))
        temperature = float(options.pop("temperature", None) or 0.0)
        beams = int(options.pop("num_beams", None) or 1)
        if options.pop("do_sample", temperature > 0) or beams > 1:
            raise UsageError(
                f"A task decodes with {dict(request)}; expected greedy decoding.",
                "Pass gen_kwargs do_sample=False,num_beams=1, or leave this task out.",
            )
        for name in ("top_k", "top_p"):  # without effect on greedy decoding
            options.pop(name, None)
        context = self._cut(self.tok_encode(text), self.max_length - tokens)
        return context, until, {**options, "max_new_tokens": tokens}

    def _read(self, context: Sequence[int]) -> "Cache":
        """The cache of all context tokens but the last."""
        ids = torch.tensor([context])
        if self.setting == "mapped":
            return prefill_mapped(
                self.mapper, self.source, self.target, ids, exact_prefix=self.exact_prefix
            )
        if len(context) == 1:
            return build_cache([], [])
        return cache_of(prefill(self.model, ids[:, :-1].to(self._device), logits_to_keep=1))

    def _write(
        self, cache: "Cache", context: Sequence[int], until: list[str], options: Mapping[str, Any]
    ) -> str:
        padding = self.tokenizer.pad_token_id
        if self.eot_token_id is not None:
            until = [*until, str(self.tokenizer.decode(self.eot_token_id))]
            padding = self.eot_token_id if padding is None else padding
        until = [stop for stop in until if stop]

        def stopped(ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            written = str(self.tokenizer.decode(ids[0, len(context) :]))
            return torch.tensor([any(stop in written for stop in until)], device=ids.device)

        output_ids = generate_from(
            self.model,
            torch.tensor([context]),
            cache,
            **{"do_sample": False, "pad_token_id": padding, **options},
            stopping_criteria=[stopped],
        )
        text = str(self.tokenizer.decode(output_ids[0, len(context) :], skip_special_tokens=True))
        for stop in until:
            text = text.split(stop)[0]
        return text


def _same(contexts: Sequence[list[int]]) -> Iterable[tuple[tuple[int, ...], list[int]]]:
    """Distinct contexts in order, each with the indices where it stands."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, context in enumerate(contexts):
        groups.setdefault(tuple(context), []).append(index)
    return groups.items()


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
