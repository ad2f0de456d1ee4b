"""Train the embedded family: three small Qwen3 language models with one tokenizer.

    python examples/tiny_family/train.py            # everything, about two hours on one core
    python examples/tiny_family/train.py large      # one stage: tokenizer, large, middle or small

The text is the Python standard library's own source, which every machine with Python has.
`HELD_OUT` modules never enter training, so that evaluation on them is honest; `measure.py` says
how good each model is on them.

- `large`: 8 layers, width 192, trained from scratch.
- `middle`: `large` without its layers 1, 3, 5 and 6, then distilled from `large` (the way
  Ministral 3 was made), so its cache is related to its parent's: the easy pair.
- `small`: 4 layers, width 96, trained from scratch by itself with another seed, so its cache
  has nothing in common with `large`'s but the data: the hard pair.

All have 2 KV heads of 32, QK-norm and the same RoPE. Weights are stored in float16. The models in
this folder were made with Python 3.11 and torch 2.13 on one thread; another Python has other
sources, and so gives other weights.
"""

import math
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
HELD_OUT = (
    "argparse", "calendar", "configparser", "csv", "difflib", "fractions", "heapq", "ipaddress",
    "mailbox", "optparse", "pprint", "sched", "shelve", "statistics", "tarfile", "textwrap",
    "threading", "typing", "uuid", "zipfile",
)  # fmt: skip
VOCABULARY = 4096
LENGTH = 512  # tokens per training sequence
BATCH = 8  # sequences per step
REMOVED_LAYERS = (1, 3, 5, 6)
STEPS = {"large": 1600, "middle": 220, "small": 700}
SEEDS = {"large": 0, "middle": 1, "small": 2}


def is_held_out(path: Path) -> bool:
    """True for a held-out module, the files of a held-out package, and their tests."""
    return any(part.removesuffix(".py").removeprefix("test_") in HELD_OUT for part in path.parts)


def sources() -> list[str]:
    """Every training module of the standard library, in the order of its path."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "pydoc_data", "encodings", "idlelib", "__pycache__", "lib2to3"}
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path for path in paths if not skipped & set(path.parts) and not is_held_out(path)]
    texts = [(root / path).read_text(encoding="utf-8", errors="replace") for path in kept]
    return [text for text in texts if 500 < len(text) < 200_000]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with one special token, which opens every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|start|>",
        eos_token="<|start|>",
        pad_token="<|start|>",
        clean_up_tokenization_spaces=False,
    )


def tokenize(tokenizer: PreTrainedTokenizerFast, texts: list[str], seed: int) -> torch.Tensor:
    """All texts in a seeded order, each opened by the start token, as [sequences, LENGTH + 1]."""
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    start = tokenizer.bos_token_id
    encoded = tokenizer([texts[index] for index in order], add_special_tokens=False)["input_ids"]
    stream = torch.tensor([token for ids in encoded for token in (start, *ids)])
    sequences = (len(stream) - 1) // LENGTH
    return torch.stack(
        [stream[index * LENGTH : (index + 1) * LENGTH + 1] for index in range(sequences)]
    )


def batches(sequences: torch.Tensor, steps: int, seed: int) -> Iterator[torch.Tensor]:
    """`steps` batches, every sequence once before any is seen again."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        while len(order) < BATCH:
            order = torch.cat([order, torch.randperm(len(sequences), generator=generator)])
        yield sequences[order[:BATCH]]
        order = order[BATCH:]


def config(hidden: int, layers: int, heads: int, intermediate: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=intermediate,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


class Muon(torch.optim.Optimizer):
    """Momentum whose step is orthogonalised by Newton-Schulz, in float32.

    `torch.optim.Muon` iterates in bfloat16, which CPUs without bfloat16 units emulate: here that
    takes twice as long as the whole forward and backward pass. Method: Jordan et al. 2024.
    """

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float, momentum: float) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                average = self.state[weight].setdefault("average", torch.zeros_like(weight))
                average.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonalize(weight.grad.lerp(average, group["momentum"]))
                weight.add_(update, alpha=-group["lr"] * max(1, len(update) / len(update.T)) ** 0.5)


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """The quintic Newton-Schulz iteration towards U V^T of the matrix's singular vectors."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


def optimize(
    name: str, model: Qwen3ForCausalLM, sequences: torch.Tensor, teacher: Qwen3ForCausalLM | None
) -> None:
    """Muon for the matrices, AdamW for the rest; linear warm-up, constant, linear decay.

    With a teacher the loss is KL(teacher || model), which is distillation; without one it is the
    next token's negative log-likelihood.
    """
    steps = STEPS[name]
    matrices = [
        weight
        for key, weight in model.named_parameters()
        if weight.ndim == 2 and "embed" not in key
    ]
    others = [
        weight for key, weight in model.named_parameters() if weight.ndim != 2 or "embed" in key
    ]
    optimizers = [
        Muon(matrices, lr=0.02, momentum=0.95),
        torch.optim.AdamW(others, lr=0.004, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    started = time.monotonic()
    model.train()
    for step, batch in enumerate(batches(sequences, steps, SEEDS[name])):
        scale = min((step + 1) / 40, 1.0, (steps - step) / (0.4 * steps))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * scale
        tokens, labels = batch[:, :-1], batch[:, 1:]
        logits = model(tokens, use_cache=False).logits.flatten(0, 1)
        if teacher is None:
            loss = functional.cross_entropy(logits, labels.flatten())
        else:
            with torch.no_grad():
                wanted = teacher(tokens, use_cache=False).logits.flatten(0, 1).log_softmax(-1)
            loss = functional.kl_div(
                logits.log_softmax(-1), wanted, reduction="batchmean", log_target=True
            )
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            rate = (step + 1) * BATCH * LENGTH / (time.monotonic() - started)
            print(f"{name} step {step} loss {loss.item():.3f} {rate:.0f} tokens/s", flush=True)
        if not math.isfinite(loss.item()):
            raise RuntimeError(f"the loss of {name} is not finite at step {step}")


def prune(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """A copy of the model without `REMOVED_LAYERS`."""
    kept = [index for index in range(model.config.num_hidden_layers) if index not in REMOVED_LAYERS]
    pruned = Qwen3ForCausalLM(
        config(
            model.config.hidden_size,
            len(kept),
            model.config.num_attention_heads,
            model.config.intermediate_size,
        )
    )
    state = {key: value for key, value in model.state_dict().items() if ".layers." not in key}
    for new, old in enumerate(kept):
        prefix = f"model.layers.{old}."
        for key, value in model.state_dict().items():
            if key.startswith(prefix):
                state[f"model.layers.{new}.{key.removeprefix(prefix)}"] = value
    pruned.load_state_dict(state)
    return pruned


def train(name: str, sequences: torch.Tensor) -> Qwen3ForCausalLM:
    torch.manual_seed(SEEDS[name])
    if name == "large":
        model, teacher = Qwen3ForCausalLM(config(192, 8, 6, 512)), None
    elif name == "small":
        model, teacher = Qwen3ForCausalLM(config(96, 4, 4, 256)), None
    else:
        teacher = Qwen3ForCausalLM.from_pretrained(HERE / "large", dtype=torch.float32).eval()
        model = prune(teacher)
    optimize(name, model, sequences, teacher)
    return model


def main(stages: list[str]) -> None:
    texts = sources()
    print(f"{len(texts)} modules, {sum(map(len, texts)) / 1e6:.1f} million characters", flush=True)
    if "tokenizer" in stages:
        train_tokenizer(texts).save_pretrained(HERE / "large")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(HERE / "large")
    sequences = tokenize(tokenizer, texts, seed=0)
    print(f"{sequences.numel() / 1e6:.1f} million tokens", flush=True)
    for name in ("large", "middle", "small"):
        if name in stages:
            model = train(name, sequences)
            model.half().save_pretrained(HERE / name)
            tokenizer.save_pretrained(HERE / name)


if __name__ == "__main__":
    main(sys.argv[1:] or ["tokenizer", "large", "middle", "small"])
