"""Sufficient statistics of a calibration: all that selection and ridge ever need, in one file."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kvhub.compatibility import Heads
from kvhub.errors import IncompatiblePairError, NotFoundError, VerificationError
from kvhub.moments import KINDS, TENSORS, Block, Moments
from kvhub.spec import ModelSpec
from kvhub.tensor_file import read_tensor_file, write_tensor_file

__all__ = ["Statistics"]

FORMAT = "kvhub-statistics-1"


@dataclass
class Statistics:
    """What a calibration leaves behind: from here on no model is needed.

    Attributes
    ----------
    source, target
        The specs of the two models.
    heads
        Whether a target head sees all source heads (`all`, from which `matched` can be derived)
        or only its namesake (`matched`, 1 / kv_heads of the size).
    weighting
        `uniform`, or `attention` when rows were weighted by the attention they receive.
    fitted, held_out
        `{"keys": Moments, "values": Moments}` of the sequences for fitting and of those kept
        apart for scoring; keys in content space.
    provenance
        Where the tokens came from; written into the mapper's config.
    """

    source: ModelSpec
    target: ModelSpec
    heads: Heads
    weighting: Literal["uniform", "attention"]
    fitted: dict[str, Moments]
    held_out: dict[str, Moments]
    provenance: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def empty(
        cls,
        source: ModelSpec,
        target: ModelSpec,
        heads: Heads = "all",
        weighting: Literal["uniform", "attention"] = "uniform",
        provenance: dict[str, Any] | None = None,
        device: Any = "cpu",
    ) -> "Statistics":
        groups = 1 if heads == "all" else target.kv_heads
        features = source.num_layers * source.kv_dim // groups
        outputs = target.num_layers * target.kv_dim // groups

        def zeros() -> dict[str, Moments]:
            return {kind: Moments.zeros(groups, features, outputs, device) for kind in KINDS}

        return cls(source, target, heads, weighting, zeros(), zeros(), dict(provenance or {}))

    @property
    def tokens(self) -> int:
        """Rows for fitting, held-out ones not counted."""
        return self.fitted["keys"].tokens

    def block(
        self, part: str, kind: str, source_layers: list[int], target_layer: int | None
    ) -> Block:
        """The regression problem of a target layer, or of all; `part` is `fitted` or `held_out`."""
        moments: Moments = getattr(self, part)[kind]
        return moments.block(
            source_layers, target_layer, self.source.num_layers, self.target.num_layers
        )

    def matched(self) -> "Statistics":
        """The statistics of `matched` heads; itself if it has them."""
        if self.heads == "matched":
            return self
        if self.source.kv_heads != self.target.kv_heads:
            raise IncompatiblePairError(
                f"Matched heads need equal KV heads: {self.source.model_id} has "
                f"{self.source.kv_heads}, {self.target.model_id} has {self.target.kv_heads}.",
                "Use heads='all'.",
            )
        layers = (self.target.kv_heads, self.source.num_layers, self.target.num_layers)
        return replace(
            self,
            heads="matched",
            fitted={kind: self.fitted[kind].matched(*layers) for kind in KINDS},
            held_out={kind: self.held_out[kind].matched(*layers) for kind in KINDS},
        )

    def __add__(self, other: "Statistics") -> "Statistics":
        for name in ("source", "target", "heads", "weighting"):
            if getattr(self, name) != getattr(other, name):
                raise IncompatiblePairError(
                    f"These statistics do not belong together: {name} is "
                    f"{_brief(getattr(self, name))} and {_brief(getattr(other, name))}.",
                    "Add only statistics of the same pair with the same settings.",
                )
        total = Statistics.empty(
            self.source,
            self.target,
            self.heads,
            self.weighting,
            _merge_provenance(self.provenance, other.provenance),
        )
        for part in ("fitted", "held_out"):
            for kind in KINDS:
                moments = getattr(total, part)[kind]
                moments.merge(getattr(self, part)[kind])
                moments.merge(getattr(other, part)[kind])
        return total

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, atomically: a reader sees the old file or the new one."""
        tensors = {}
        tokens = {}
        for part in ("fitted", "held_out"):
            for kind in KINDS:
                moments = getattr(self, part)[kind]
                tokens[f"{part}.{kind}"] = moments.tokens
                for name in TENSORS:
                    tensors[f"{part}.{kind}.{name}"] = getattr(moments, name).cpu().contiguous()
        header = {
            "format": FORMAT,
            "source": self.source.to_dict(),
            "target": self.target.to_dict(),
            "heads": self.heads,
            "weighting": self.weighting,
            "tokens": tokens,
            "provenance": self.provenance,
        }
        write_tensor_file(Path(path), tensors, header)

    @classmethod
    def load(cls, path: str | Path) -> "Statistics":
        """Read a file that `save` wrote.

        Raises
        ------
        NotFoundError
            There is no such file.
        VerificationError
            The file is truncated, is not a statistics file, or its tensors do not fit its specs.
        """
        path = Path(path)
        if not path.is_file():
            raise NotFoundError(
                f"No statistics file {path}.", "Write one with `kvhub fit NAME --statistics FILE`."
            )
        tensors, header = read_tensor_file(path, "Calibrate again.")
        if header.get("format") != FORMAT:
            raise VerificationError(
                f"{path} is not a statistics file: expected format {FORMAT!r}, found "
                f"{header.get('format')!r}.",
                "Calibrate again with this version of kvhub.",
            )
        result = cls.empty(
            ModelSpec.from_dict(header["source"]),
            ModelSpec.from_dict(header["target"]),
            header["heads"],
            header["weighting"],
            header["provenance"],
            device="meta",
        )
        for part in ("fitted", "held_out"):
            for kind in KINDS:
                moments = getattr(result, part)[kind]
                moments.tokens = header["tokens"][f"{part}.{kind}"]
                for name in TENSORS:
                    found = tensors.pop(f"{part}.{kind}.{name}", None)
                    expected = getattr(moments, name).shape
                    if found is None or found.shape != expected:
                        raise VerificationError(
                            f"{path}: {part}.{kind}.{name} should have shape {tuple(expected)}, "
                            f"found {None if found is None else tuple(found.shape)}.",
                            "Calibrate again.",
                        )
                    setattr(moments, name, found)
        return result


def _brief(value: ModelSpec | str) -> str:
    return value.model_id if isinstance(value, ModelSpec) else repr(value)


def _merge_provenance(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Counts add up; what differs otherwise is listed in parts."""
    merged: dict[str, Any] = {}
    for name in {**first, **second}:
        a, b = first.get(name), second.get(name)
        if name in ("sequences", "held_out_sequences"):
            merged[name] = (a or 0) + (b or 0)
        elif a == b:
            merged[name] = a
        else:
            merged[name] = [
                *(a if isinstance(a, list) else [a]),
                *(b if isinstance(b, list) else [b]),
            ]
    return merged
