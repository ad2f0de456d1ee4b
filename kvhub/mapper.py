"""The fitted object: a linear map from a source model's KV cache to a target model's.

For target layer l, with X the content keys (or values) of its selected source layers
(paper, section 3):

    K_target[l] = apply_rope(X W_K[l] + b_K[l]),    V_target[l] = X W_V[l] + b_V[l]

Some target layers may have a network of X added to the linear map: see `kvhub.networks`.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvhub.cache import build_cache, positions_from_mask, read_cache
from kvhub.errors import IncompatiblePairError, UsageError, VerificationError
from kvhub.mapper_config import MapperConfig, tensor_shapes
from kvhub.networks import add_network, network_of
from kvhub.products import CPU_ROWS, WORKSPACE_BYTES, multiply
from kvhub.rope import Rotation

if TYPE_CHECKING:
    from transformers import Cache, DynamicCache

    from kvhub.publishing import Pushed

__all__ = ["KVMapper"]


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
    key_repair_in, value_repair_in and so on
        Where `config.repair` names layers: `[repaired layers, groups, ...]`, see
        `kvhub.networks.add_network`.
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
        revision: str | None = None,
        lock: str | Path | None = None,
        public_key: str | Path | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> "KVMapper":
        """Load a mapper, every file verified.

        Parameters
        ----------
        name_or_path
            A name in the local store, a directory that `save_pretrained` wrote, or `org/repo` on
            the Hub.
        revision
            Of a mapper on the Hub: a version (`v1.0.0`), a range of versions (`^1.2`), a commit
            or a branch; None for the newest version. It speaks of the mapper; the revisions of
            the two models are in its config.
        lock
            A lock file that `kvhub lock` wrote: load the commit that it names, or refuse.
        public_key
            Require a signature by this key, checked before anything else of the mapper is read
            (with a lock file, which pins every byte itself, after that); see `kvhub.signing`.
        device, dtype
            Where to put the tensors, and as what; None keeps the stored dtype.

        Raises
        ------
        NotFoundError
            There is no such mapper or revision.
        VerificationError
            A file is missing, extra, truncated or edited, or does not fit config.json; a version
            on the Hub was moved; or the lock file says otherwise.
        AuthError, NetworkError
            The Hub refuses, or cannot be reached and the cache does not have the mapper.
        UsageError
            A revision or lock file for a local mapper, or both.
        """
        from kvhub.package import load
        from kvhub.store import find_local, find_mapper

        name = str(name_or_path)
        if revision is not None and lock is not None:
            raise UsageError("Give a revision or a lock file, not both.")
        if (revision is not None or lock is not None) and find_local(name) is not None:
            raise UsageError(
                f"{name} is a local mapper, which has no revisions.",
                "Leave revision and lock out, or name a mapper on the Hub: org/repo.",
            )
        key = None if public_key is None else Path(public_key)
        if lock is not None:
            from kvhub.lockfile import load_locked

            path = load_locked(name, Path(lock))
            if key is not None:
                from kvhub.signing import verify_signature

                verify_signature(path, key)
        else:
            path = find_mapper(name if revision is None else f"{name}@{revision}", key)
        return load(path).to(device=device, dtype=dtype)

    def push_to_hub(self, repo_id: str, *, version: str | None = None, **options: Any) -> "Pushed":
        """Publish this mapper as a version of a repository on the Hub.

        Parameters
        ----------
        repo_id
            `org/repo`; it is made if it is not there.
        version
            `1.0.0`; None for the one that the change demands.
        options
            As for `kvhub.publishing.push`.

        Raises
        ------
        ConflictError
            The version exists with other content, or somebody else pushed meanwhile.
        AuthError, NetworkError, UsageError
            As for `kvhub.publishing.push`.
        """
        import tempfile

        from kvhub.publishing import push

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / repo_id.rpartition("/")[2]
            self.save_pretrained(path)
            return push(path, repo_id, version=version, **options)

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
        return torch.stack(list(self._products(content_keys, "key")))

    def map_values(self, values: Tensor) -> Tensor:
        """Map values; shapes as in `map_keys`."""
        return torch.stack(list(self._products(values, "value")))

    def _products(self, layers: Iterable[Tensor], kind: str) -> Iterator[Tensor]:
        """X W + b of one target layer after the other, `[batch, kv_heads, tokens, head_dim]`.

        With the layer's network, if it has one of this kind, `key` or `value`.

        One layer at a time, so that what is done to a layer before and after its product finds
        it in the processor's cache.
        """
        target, repair = self.config.target, self.config.repair
        tensors = self.tensors()
        weights, biases = tensors[f"{kind}_weight"], tensors[f"{kind}_bias"]
        repaired = () if repair is None else repair.layers(kind)
        groups = weights.shape[1]
        sources = []
        for states in layers:
            batch, _, tokens, head_dim = states.shape
            # CPUs emulate half precision in matrix products, slowly and no more exactly.
            dtype = weights.dtype
            if not states.is_cuda:
                dtype = torch.promote_types(dtype, torch.float32)
            grouped = states.to(dtype).reshape(batch, groups, -1, tokens, head_dim)
            grouped = grouped.permute(1, 0, 3, 2, 4)
            # [groups, batch * tokens, features of a source layer in a group]
            sources.append(grouped.flatten(3).flatten(1, 2))
        gather = sources[0].is_cuda
        for layer, chosen in enumerate(self.config.selection):
            weight, bias = weights[layer].to(dtype), biases[layer][:, None].to(dtype)
            read = [sources[index] for index in chosen]
            product = multiply(read, weight, bias, gather=gather)
            network = network_of(tensors, kind, repaired, layer)
            if network is not None:
                add_network(product, read, network, gather=gather)
            # [groups, batch, tokens, heads of a group, head_dim], as products come
            product = product.view(groups, batch, tokens, -1, target.head_dim)
            yield product.permute(1, 0, 3, 2, 4).flatten(1, 2)

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
        target = self.config.target
        shape = (batch, target.kv_heads, tokens, target.head_dim)
        mapped_keys, mapped_values = (
            [keys[0].new_empty(shape, dtype=dtype) for _ in range(target.num_layers)]
            for _ in range(2)
        )
        step = self._tokens_at_once(batch)
        for start in range(0, tokens, step):
            span = slice(start, min(start + step, tokens))
            self._map_span(keys, mapped_keys, span, positions[..., span])
            self._map_span(values, mapped_values, span, None)
        return build_cache(mapped_keys, mapped_values)

    def _map_span(
        self, layers: list[Tensor], results: list[Tensor], span: slice, positions: Tensor | None
    ) -> None:
        """Map the tokens `span` of all layers into `results`: keys with positions, else values."""
        source_layers = [layer[:, :, span] for layer in layers]
        mapped = [layer[:, :, span] for layer in results]
        _require_finite(source_layers, "source cache", span.start)
        if positions is None:
            products = self._products(source_layers, "value")
        else:
            device = positions.device
            strip = Rotation(positions, self.config.source.require_rope(), device=device).strip
            apply = Rotation(positions, self.config.target.require_rope(), device=device).apply
            content_keys = map(strip, source_layers)
            products = map(apply, self._products(content_keys, "key"))
        for layer, product in zip(mapped, products, strict=True):
            layer.copy_(product)
        _require_finite(mapped, "mapped cache", span.start)

    def _tokens_at_once(self, batch: int) -> int:
        """How many positions fit the workspace: all source layers, and one target layer's work.

        On a CPU no more than `CPU_ROWS` rows, so that one layer's stay in its caches.
        """
        source, target = self.config.source, self.config.target
        numbers = (source.num_layers + self.config.top_k) * source.kv_dim + 4 * target.kv_dim
        if self.config.repair is not None:  # both hidden layers of a network
            numbers += 2 * self.key_weight.shape[1] * self.config.repair.hidden
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


def _require_finite(layers: Iterable[Tensor], what: str, start: int) -> None:
    # No sum hides an infinity or a NaN, and it takes one pass where isfinite takes five. It may
    # overflow by itself, hence the second look.
    sums = torch.stack([states.sum(dtype=torch.float32) for states in layers])
    if bool(torch.isfinite(sums).all()):
        return
    for layer, states in enumerate(layers):
        for row, head, position, _ in (~torch.isfinite(states)).nonzero()[:1].tolist():
            raise VerificationError(
                f"The {what} is not finite: first at layer {layer}, row {row}, KV head {head}, "
                f"position {start + position} of dtype {states.dtype}.",
                "Use a wider dtype (bfloat16 or float32), or prefill the target itself.",
            )
