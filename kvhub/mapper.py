"""The fitted object: a linear map from a source model's KV cache to a target model's.

For target layer l, with X the content keys (or values) of its selected source layers
(paper, section 3):

    K_target[l] = apply_rope(X W_K[l] + b_K[l]),    V_target[l] = X W_V[l] + b_V[l]
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from kvhub.cache import build_cache, positions_from_mask, read_cache
from kvhub.errors import IncompatiblePairError, UsageError, VerificationError
from kvhub.moments import Heads
from kvhub.rope import apply_rope, strip_rope
from kvhub.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import Cache, DynamicCache

__all__ = ["KVMapper", "MapperConfig", "tensor_shapes"]

SCHEMA_VERSION = 1
WORKSPACE_BYTES = 256 * 2**20  # bound on what mapping allocates besides its result
CPU_ROWS = 512  # tokens at once on a CPU: few enough for its caches, enough per pass over weights


@dataclass(frozen=True)
class MapperConfig:
    """Everything about a mapper but its tensors: the content of config.json.

    Attributes
    ----------
    source, target
        The specs of the two models, with their RoPE tables.
    heads
        `all` or `matched`, see `kvhub.ridge.fit`.
    top_k
        Source layers per target layer.
    selection
        `[target_layers][top_k]` source layer indices, best first.
    selection_method
        `probe` or `greedy`.
    ridge
        Penalty, its scale, and the tokens and features of the regressions.
    weighting
        `uniform` or `attention`.
    calibration
        Where the tokens came from.
    quality
        Figures of the fit; the full report is in report.json.
    """

    source: ModelSpec
    target: ModelSpec
    heads: Heads
    top_k: int
    selection: tuple[tuple[int, ...], ...]
    selection_method: str
    ridge: dict[str, Any]
    weighting: Literal["uniform", "attention"]
    calibration: dict[str, Any] = field(default_factory=dict)
    quality: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, with the schema's version."""
        result = {item.name: getattr(self, item.name) for item in fields(self)}
        result["source"], result["target"] = self.source.to_dict(), self.target.to_dict()
        result["selection"] = [list(layers) for layers in self.selection]
        return {"schema_version": SCHEMA_VERSION, **result}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "MapperConfig":
        """The inverse of `to_dict`.

        Raises
        ------
        VerificationError
            Another schema version, or missing or unknown keys: an unknown key may change the
            maths, so it is never ignored.
        """
        data = dict(data)
        version = data.pop("schema_version", None)
        if version != SCHEMA_VERSION:
            raise VerificationError(
                f"This mapper has schema version {version}; this kvhub reads {SCHEMA_VERSION}.",
                "Upgrade kvhub: pip install -U kvhub",
            )
        expected = {item.name for item in fields(cls)}
        if set(data) != expected:
            raise VerificationError(
                f"config.json: unknown keys {sorted(set(data) - expected)}, missing keys "
                f"{sorted(expected - set(data))}.",
                "Upgrade kvhub, or download the mapper again.",
            )
        data["source"] = ModelSpec.from_dict(data["source"])
        data["target"] = ModelSpec.from_dict(data["target"])
        data["selection"] = tuple(tuple(layers) for layers in data["selection"])
        config = cls(**data)
        config.validate()
        return config

    def validate(self) -> None:
        """Raise VerificationError where the fields contradict each other."""
        k, layers = self.top_k, self.source.num_layers
        sound = (
            self.heads in ("all", "matched")
            and len(self.selection) == self.target.num_layers
            and all(len(set(chosen)) == len(chosen) == k for chosen in self.selection)
            and all(0 <= layer < layers for chosen in self.selection for layer in chosen)
            and (self.heads == "all" or self.source.kv_heads == self.target.kv_heads)
        )
        if not sound:
            raise VerificationError(
                f"config.json contradicts itself: heads {self.heads!r}, top_k {k}, "
                f"{len(self.selection)} selections for {self.target.num_layers} target layers, "
                f"{layers} source layers.",
                "Download or fit the mapper again.",
            )


def tensor_shapes(config: MapperConfig) -> dict[str, tuple[int, ...]]:
    """The mapper's tensors by name, with their shapes."""
    groups = 1 if config.heads == "all" else config.target.kv_heads
    layers = config.target.num_layers
    features = config.top_k * config.source.kv_dim // groups
    outputs = config.target.kv_dim // groups
    weight, bias = (layers, groups, features, outputs), (layers, groups, outputs)
    return {"key_weight": weight, "key_bias": bias, "value_weight": weight, "value_bias": bias}


def multiply(sources: list[Tensor], weight: Tensor, bias: Tensor, *, gather: bool) -> Tensor:
    """X W + b, where X is `sources` side by side.

    Parameters
    ----------
    sources
        Per chosen source layer `[groups, rows, features of the layer]`.
    weight, bias
        `[groups, features, outputs]` and `[groups, 1, outputs]`.
    gather
        One wide product of gathered features: few launches, and half precision is rounded once.
        Otherwise a sum of products: gathering costs a CPU a fifth of the product.

    Returns
    -------
    Tensor
        `[groups, rows, outputs]`.
    """
    if gather:
        return torch.baddbmm(bias, torch.cat(sources, dim=-1), weight)
    parts = weight.view(len(weight), len(sources), -1, weight.shape[-1]).unbind(1)
    result = torch.baddbmm(bias, sources[0], parts[0])
    for source, part in zip(sources[1:], parts[1:], strict=True):
        result.baddbmm_(source, part)
    return result


class KVMapper(nn.Module):
    """Maps a source model's KV cache into a target model's.

    Attributes
    ----------
    config
        The `MapperConfig`.
    key_weight, value_weight
        `[target_layers, groups, features, outputs]`. With `heads="all"` there is one group,
        features are (top_k, source kv_heads, source head_dim) and outputs (target kv_heads,
        target head_dim); with `matched` a group is a KV head, features are (top_k, source
        head_dim) and outputs target head_dim. Keys in content space.
    key_bias, value_bias
        `[target_layers, groups, outputs]`.
    """

    key_weight: Tensor
    key_bias: Tensor
    value_weight: Tensor
    value_bias: Tensor

    def __init__(self, config: MapperConfig, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        config.validate()
        expected = tensor_shapes(config)
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if found != expected:
            raise VerificationError(
                f"The tensors do not fit the config: expected {expected}, found {found}.",
                "Download or fit the mapper again.",
            )
        self.config = config
        for name in expected:
            self.register_buffer(name, tensors[name])

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> "KVMapper":
        """Load a mapper by its local name or its directory, every file verified.

        Parameters
        ----------
        name_or_path
            A name in the local store, or a directory that `save_pretrained` wrote.
        device, dtype
            Where to put the tensors, and as what; None keeps the stored dtype.

        Raises
        ------
        NotFoundError
            There is no such mapper.
        VerificationError
            A file is missing, extra, truncated or edited, or does not fit config.json.
        """
        from kvhub.package import load
        from kvhub.store import find_mapper

        return load(find_mapper(str(name_or_path))).to(device=device, dtype=dtype)

    def save_pretrained(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write a package directory, atomically.

        Raises
        ------
        ConflictError
            Something is there already and `overwrite` is not set.
        """
        from kvhub.package import save

        save(self, Path(path), overwrite=overwrite)

    def tensors(self) -> dict[str, Tensor]:
        """The mapper's tensors by name, as `tensor_shapes` lists them."""
        return {name: getattr(self, name) for name in tensor_shapes(self.config)}

    @property
    def num_parameters(self) -> int:
        """Numbers in the mapper's tensors, biases included."""
        return sum(tensor.numel() for tensor in self.tensors().values())

    @property
    def size_bytes(self) -> int:
        """Bytes of the mapper's tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def map_keys(self, content_keys: Tensor) -> Tensor:
        """Map keys in content space.

        Parameters
        ----------
        content_keys
            `[source_layers, batch, kv_heads, tokens, head_dim]` of the source model.

        Returns
        -------
        content_keys
            `[target_layers, batch, kv_heads, tokens, head_dim]` of the target model, in the
            mapper's arithmetic: its own dtype, but at least float32 on a CPU.
        """
        return self._map(content_keys, self.key_weight, self.key_bias)

    def map_values(self, values: Tensor) -> Tensor:
        """Map values; shapes as in `map_keys`."""
        return self._map(values, self.value_weight, self.value_bias)

    def _map(
        self, states: Tensor, weights: Tensor, biases: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """X W + b of every target layer, written to `out` if given."""
        layers, batch, _, tokens, head_dim = states.shape
        target = self.config.target
        groups = weights.shape[1]
        # CPUs emulate half precision in matrix products, slowly and no more exactly.
        dtype = torch.promote_types(weights.dtype, torch.float32)
        if states.is_cuda:
            dtype = weights.dtype
        # [source_layers, groups, batch * tokens, features of a source layer in a group]
        grouped = states.to(dtype).reshape(layers, batch, groups, -1, tokens, head_dim)
        sources = grouped.permute(0, 2, 1, 4, 3, 5).flatten(4).flatten(2, 3)
        biases = biases[:, :, None].to(dtype)
        if out is None:
            out = sources.new_empty(
                target.num_layers, batch, target.kv_heads, tokens, target.head_dim
            )
        # [target_layers, groups, batch, tokens, heads of a group, head_dim], as products come
        results = out.view(target.num_layers, batch, groups, -1, tokens, target.head_dim)
        results = results.permute(0, 2, 1, 4, 3, 5)
        for layer, chosen in enumerate(self.config.selection):
            chosen_sources = [sources[index] for index in chosen]
            weight = weights[layer].to(dtype)
            y = multiply(chosen_sources, weight, biases[layer], gather=states.is_cuda)
            results[layer].copy_(y.view(results.shape[1:]))
        return out

    @torch.no_grad()
    def forward(
        self,
        source_cache: "Cache",
        *,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> "DynamicCache":
        """Map a whole cache.

        Parameters
        ----------
        source_cache
            The source model's cache of `tokens` tokens, any dtype, on the mapper's device.
        attention_mask
            `[batch, tokens]`, 0 where a row is padded. Needed for left-padded batches: positions
            are counted from each row's first token.
        positions
            Absolute positions, `[tokens]` or `[batch, tokens]` int64, where they are not counted
            from 0. The target cache gets the same ones.
        dtype
            Of the target cache; None: the source cache's.

        Returns
        -------
        target_cache
            A DynamicCache of the target model, on the device of the source's.
            Padded cells hold finite numbers without meaning; keep masking them.

        Raises
        ------
        IncompatiblePairError
            The cache is not one of the source model, or not on the mapper's device.
        VerificationError
            The cache, or what it maps to, is not finite.
        UsageError
            Mask or positions have the wrong shape, or both were given.
        """
        keys, values = read_cache(source_cache, self.config.source)
        batch, _, tokens, _ = keys[0].shape
        if keys[0].device != self.key_weight.device:
            raise IncompatiblePairError(
                f"The cache is on {keys[0].device}, the mapper on {self.key_weight.device}.",
                "Move the mapper: mapper.to(device).",
            )
        positions = _positions(positions, attention_mask, batch, tokens).to(keys[0].device)
        dtype = dtype or keys[0].dtype

        def map_keys(states: Tensor, span: slice, out: Tensor) -> None:
            out.copy_(self.map_rotated_keys(states, positions[..., span]))

        def map_values(states: Tensor, span: slice, out: Tensor) -> None:
            self._map(states, self.value_weight, self.value_bias, out)

        return build_cache(
            self._map_tokens(keys, dtype, map_keys), self._map_tokens(values, dtype, map_values)
        )

    def map_rotated_keys(self, rotated_keys: Tensor, positions: Tensor) -> Tensor:
        """Strip the source's RoPE, map, apply the target's; shapes as in `map_keys`."""
        content_keys = strip_rope(rotated_keys, positions, self.config.source.require_rope())
        mapped = self.map_keys(content_keys)
        return apply_rope(mapped, positions, self.config.target.require_rope())

    def _map_tokens(
        self,
        layers: Sequence[Tensor],
        dtype: torch.dtype,
        function: Callable[[Tensor, slice, Tensor], None],
    ) -> Tensor:
        """Apply `function(states, span, out)` to all layers, some tokens at a time."""
        batch, _, tokens, _ = layers[0].shape
        target = self.config.target
        shape = (target.num_layers, batch, target.kv_heads, tokens, target.head_dim)
        result = layers[0].new_empty(shape, dtype=dtype)
        step = self._tokens_at_once(batch)
        for start in range(0, tokens, step):
            span = slice(start, min(start + step, tokens))
            states = torch.stack([layer[:, :, span] for layer in layers])
            _require_finite(states, "source cache", start)
            mapped = result[:, :, :, span]
            function(states, span, mapped)
            _require_finite(mapped, "mapped cache", start)
        return result

    def _tokens_at_once(self, batch: int) -> int:
        """How many positions fit the workspace: source copies, gathered features, results.

        On a CPU no more than `CPU_ROWS` rows, so that they stay in its caches.
        """
        source, target = self.config.source, self.config.target
        numbers = (
            4 * source.num_layers * source.kv_dim
            + 2 * self.config.top_k * source.kv_dim
            + 4 * target.num_layers * target.kv_dim
        )
        rows = WORKSPACE_BYTES // (4 * numbers)
        if self.key_weight.device.type == "cpu":
            rows = min(rows, CPU_ROWS)
        return max(1, rows // batch)


def _positions(
    positions: Tensor | None, attention_mask: Tensor | None, batch: int, tokens: int
) -> Tensor:
    if positions is not None and attention_mask is not None:
        raise UsageError("Give either positions or attention_mask, not both.")
    if attention_mask is not None:
        if attention_mask.shape != (batch, tokens):
            raise UsageError(
                f"attention_mask must be [batch, tokens] = {[batch, tokens]}; found "
                f"{list(attention_mask.shape)}.",
                "Pass the mask of the cached tokens only.",
            )
        return positions_from_mask(attention_mask)
    if positions is None:
        return torch.arange(tokens)
    if tuple(positions.shape) not in ((tokens,), (batch, tokens)):
        raise UsageError(
            f"positions must be [{tokens}] or [{batch}, {tokens}]; found {list(positions.shape)}."
        )
    return positions


def _require_finite(states: Tensor, what: str, start: int) -> None:
    # No sum hides an infinity or a NaN, and it takes one pass where isfinite takes five. It may
    # overflow by itself, hence the second look.
    if bool(torch.isfinite(states.sum(dtype=torch.float32))):
        return
    bad = (~torch.isfinite(states)).nonzero()[:1].tolist()
    for layer, row, head, position, _ in bad:
        raise VerificationError(
            f"The {what} is not finite: first at layer {layer}, row {row}, KV head {head}, "
            f"position {start + position} of dtype {states.dtype}.",
            "Use a wider dtype (bfloat16 or float32), or prefill the target itself.",
        )
