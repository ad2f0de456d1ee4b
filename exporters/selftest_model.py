"""A model's own files against what an exported directory says of it: geometry, weights, RoPE.

transformers is needed for the last one only, and is used as versions 4.56 to 5 have it.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from kvhub.exporters.serving import Deployment, Side
from torch import Tensor

from kvhub.errors import IncompatiblePairError, UsageError, VerificationError
from kvhub.rope import strip_rope

__all__ = ["FILES", "check_files", "check_rope", "files_digest", "side_of"]

FILES = "files:"  # how a revision begins that is a digest of a model's files
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
TOKENS = 8
FARTHEST_POSITION = 131072
# Of the length of a pair of key dims, as in `kvhub.probe`: frequencies that were rounded
# differently in float32 cost up to 0.008 at the farthest position.
TOLERANCE = 0.02


def files_digest(model: Path) -> str:
    """A name of exactly these weights, for a model without a commit: `files:` and 32 hex digits.

    Over the names and contents of its weight files, in the first of the forms that it has.

    Raises
    ------
    UsageError
        There are none.
    """
    for pattern in WEIGHTS:
        files = sorted(model.glob(pattern))
        if files:
            break
    else:
        raise UsageError(
            f"Expected weights in {model}, found no {', '.join(WEIGHTS)}.",
            "Give the directory that save_pretrained wrote.",
        )
    digest = hashlib.sha256()
    for file in files:
        content = hashlib.sha256()
        with file.open("rb") as opened:
            while block := opened.read(2**24):
                content.update(block)
        digest.update(f"{file.name}\0{content.hexdigest()}\n".encode())
    return FILES + digest.hexdigest()[:32]


def side_of(deployment: Deployment, model: Path, wanted: str | None) -> str:
    """Which of the two models a directory holds: `source` or `target`.

    Raises
    ------
    IncompatiblePairError
        Neither, or not the wanted one.
    UsageError
        Both have this geometry and none is wanted.
    """
    found = _geometry(model)
    sides = {"source": deployment.source, "target": deployment.target}
    fitting = [
        name
        for name, side in sides.items()
        if (side.num_layers, side.kv_heads, side.head_dim) == found and wanted in (None, name)
    ]
    if not fitting:
        expected = {
            name: (side.num_layers, side.kv_heads, side.head_dim) for name, side in sides.items()
        }
        raise IncompatiblePairError(
            f"{model} has (layers, KV heads, head_dim) = {found}; expected those of the "
            f"{wanted or 'source or target'}: {expected}.",
            "Give the models that kvhub.json names.",
        )
    if len(fitting) > 1:
        raise UsageError(
            f"{model} may be the source or the target: both have this geometry.",
            "Say which: --side source, or --side target.",
        )
    return fitting[0]


def check_files(side: Side, model: Path) -> str:
    """Compare the weights with the revision, where it is a digest of them.

    Raises
    ------
    VerificationError
        These are others.
    """
    if not side.revision.startswith(FILES):
        return f"revision {side.revision} cannot be told from the files"
    found = files_digest(model)
    if found != side.revision:
        raise VerificationError(
            f"{model} has weights {found}; expected {side.revision} of {side.model}.",
            "Serve the weights that the mapper was exported for, or export it again with these.",
        )
    return f"weights {found}"


@torch.no_grad()
def check_rope(side: Side, model: Path) -> str:
    """Compare how the model rotates its keys with what `kvhub.json` says.

    The content keys of the first layer depend on the token alone: of the same tokens at position
    0 and far away they must be equal once the rotation is removed, and differ before. Only that
    layer is loaded, on the CPU in float32.

    Raises
    ------
    ImportError
        transformers is not installed.
    IncompatiblePairError
        The keys differ, or their shape is another one.
    """
    from transformers import AutoConfig, AutoModel
    from transformers.utils import logging

    logging.set_verbosity_error()  # it would list every layer that is left out
    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(model)
    text = config.get_text_config()
    far = max(min(text.max_position_embeddings, FARTHEST_POSITION) - TOKENS, 1)
    text.num_hidden_layers = 1
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    loaded = AutoModel.from_pretrained(model, config=config, dtype=torch.float32).eval()
    starts = (0, far)
    rotated = [_keys(loaded, text.vocab_size, start) for start in starts]
    if tuple(rotated[0].shape) != (side.kv_heads, TOKENS, side.head_dim):
        raise IncompatiblePairError(
            f"{model} caches keys {list(rotated[0].shape)} of {TOKENS} tokens; expected "
            f"{[side.kv_heads, TOKENS, side.head_dim]}."
        )
    content = [
        strip_rope(keys, start + torch.arange(TOKENS), side.rope)
        for keys, start in zip(rotated, starts, strict=True)
    ]
    error = _difference(content[0], content[1], side)
    if not error <= TOLERANCE:
        raise IncompatiblePairError(
            f"Expected the keys of {model} at positions 0 and {far} to agree within {TOLERANCE} "
            f"once the rotation of kvhub.json is removed, found a relative difference of "
            f"{error:.3g}.",
            "Serve the model that the mapper was exported for, with its own rope settings.",
        )
    before = _difference(rotated[0], rotated[1], side)
    if not before > TOLERANCE:
        raise IncompatiblePairError(
            f"Expected {model} to rotate its keys, found the same ones at positions 0 and {far}.",
            "This version of transformers does not read it as it was trained.",
        )
    return f"keys at positions 0 and {far} differ by {before:.2g} before and {error:.2g} after"


def _geometry(model: Path) -> tuple[int, int, int]:
    """Layers, KV heads and head_dim of a config.json, of the text model of a multimodal one."""
    file = model / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        heads = config["num_attention_heads"]
        return (
            config["num_hidden_layers"],
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{file} cannot be read as a model's config: {type(error).__name__}: {error}.",
            "Give the directory that save_pretrained wrote.",
        ) from error


def _keys(model: Any, vocabulary: int, start: int) -> Tensor:
    """Rotated keys of the first layer, `[kv_heads, TOKENS, head_dim]`, of fixed tokens."""
    tokens = (torch.arange(TOKENS) * 37 + 11) % vocabulary
    positions = start + torch.arange(TOKENS)
    output = model(input_ids=tokens[None], position_ids=positions[None], use_cache=True)
    keys: Tensor = output["past_key_values"].layers[0].keys
    return keys[0].float()


def _difference(first: Tensor, second: Tensor, side: Side) -> float:
    """The largest relative difference of any pair of dims, over all heads and tokens."""
    rope = side.rope

    def squares(keys: Tensor) -> Tensor:
        found = keys.double().square().sum((0, 1))
        pairs = found[: rope.rotary_dim]
        pairs = pairs.view(-1, 2) if rope.interleaved else pairs.view(2, -1).T
        return torch.cat([pairs.sum(-1), found[rope.rotary_dim :]])

    # The bound only keeps dims that are zero in both from giving 0 / 0.
    ratio = squares(first - second) / squares(first).clamp_min(1e-30)
    return float(ratio.max().sqrt())
