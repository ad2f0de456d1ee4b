"""What a map competes with: the target reads the whole context itself, through transformers."""

from collections.abc import Callable, Iterator

import torch
from gpu_pools import Sizes
from gpu_timing import Budget, Row, Timer, Times, row
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvhub.roofline import Device, prefill_flops, prefill_time

# Guesses, only to skip in time: making the model; then each length from the one before, by how
# much the products grow and a half for attention.
SET_UP_SECONDS = 40.0
GROWTH = 1.5
# Kept free besides the weights, per token: this model's cache, and the widest activations (the
# MLP's, of which three or four exist at once).
ACTIVATIONS = 5
FREE_SHARE = 0.95


def time_prefills(
    sizes: Sizes, roof: Device | None, device: torch.device, budget: Budget
) -> Iterator[Row]:
    """The target's prefill for each length, random weights, or of as many layers as fit."""
    cuda = device.type == "cuda"
    if not budget.allows(SET_UP_SECONDS if cuda else 1, "the target's prefill", last=True):
        return
    config = AutoConfig.for_model(**sizes.target)
    wanted = config.num_hidden_layers
    config.num_hidden_layers = _layers_that_fit(sizes, config, device) if cuda else wanted
    if config.num_hidden_layers < 2:
        budget.skip("the target's prefill: not two layers fit")
        return
    model = random_model(config, sizes.dtype if cuda else torch.float32, device)
    made = config.num_hidden_layers
    layers = list(model.model.layers)
    target = sizes.specs[1]
    layer_weights = sum(part.numel() for part in layers[0].parameters() if part.dim() == 2)
    timer, before = Timer(device, sizes.seconds), None
    for tokens in sizes.tokens:
        predicted = 1 if before is None else before[1] * GROWTH * tokens / before[0]
        # A warm-up, the call that is timed to choose how often, and three runs; twice if two
        # depths are needed.
        runs = 5 if made == wanted else 8
        runs = runs if cuda else 3
        if not budget.allows(runs * predicted, f"prefill of {tokens} tokens", last=True):
            continue
        ids = torch.randint(0, config.vocab_size, (1, tokens), device=device)
        found = None
        # The caches of half of the layers may still fit where those of all do not.
        for depth in (made, made // 2):
            found = found or _time_layers(timer, model, layers[:depth], ids, wanted)
        if found is None:
            budget.skip(f"prefill of {tokens} tokens: out of memory")
            continue
        times, setting = found
        before = (tokens, 1e-3 * times.median_ms)
        # The head is multiplied with the last token only, so it does not count.
        weights = wanted * layer_weights
        expected = prefill_time(target, weights, tokens, roof) if roof else None
        flops = prefill_flops(target, weights, tokens)
        yield row("prefill", None, tokens, setting, times, expected=expected, flops=flops)


def random_model(config: object, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model of this config whose weights never were on the host."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.to_empty(device=device)
    for parameter in model.parameters():
        # Norms of one, or the activations would fade from layer to layer.
        parameter.data.fill_(1.0) if parameter.dim() == 1 else parameter.data.normal_(0, 0.02)
    # Frequencies are computed when a model is made, and on meta that is nothing.
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config).to(device)
    return model.eval().requires_grad_(False)


def _layers_that_fit(sizes: Sizes, config: object, device: torch.device) -> int:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    hidden, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
    queries = config.num_attention_heads * config.head_dim
    layer = 2 * hidden * queries + 2 * hidden * kv + 3 * hidden * config.intermediate_size
    # At half of the longest context: the longest is tried, and skipped if it does not fit.
    tokens = max(sizes.tokens) // 2
    fixed = 2 * config.vocab_size * hidden + ACTIVATIONS * tokens * config.intermediate_size
    per_layer = layer + 2 * tokens * kv
    numbers = FREE_SHARE * free / sizes.dtype.itemsize
    return min(config.num_hidden_layers, int((numbers - fixed) // per_layer))


def _time_layers(
    timer: Timer, model: PreTrainedModel, layers: list, ids: torch.Tensor, wanted: int
) -> tuple[Times, str] | None:
    """Times of a prefill with `wanted` layers, and how they were found; None without the memory."""
    try:
        return _time_depths(timer, model, layers, ids, wanted)
    except torch.cuda.OutOfMemoryError:
        pass
    # Only here, where the error and the tensors of its frames are gone.
    torch.cuda.empty_cache()
    return None


def _time_depths(
    timer: Timer, model: PreTrainedModel, layers: list, ids: torch.Tensor, wanted: int
) -> tuple[Times, str]:
    common = "transformers, sdpa, logits of the last token, random weights"
    full = timer.measure(_prefill(model, layers, ids), wall=True)
    if len(layers) == wanted:
        return full, f"{common}, all {wanted} layers"
    half = layers[: len(layers) // 2]
    part = timer.measure(_prefill(model, half, ids), wall=True)
    more = (wanted - len(layers)) / (len(layers) - len(half))
    found = (
        getattr(full, name) + more * (getattr(full, name) - getattr(part, name))
        for name in ("median_ms", "best_ms")
    )
    setting = f"{common}, EXTRAPOLATED to {wanted} layers from {len(half)} and {len(layers)}"
    return Times(*found, full.runs), setting


def _prefill(model: PreTrainedModel, layers: list, ids: torch.Tensor) -> Callable[[], object]:
    def run() -> None:
        model.model.layers = torch.nn.ModuleList(layers)
        model.config.num_hidden_layers = len(layers)
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return run
