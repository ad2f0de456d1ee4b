"""What a mapper is, apart from its numbers: the content of config.json."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from kvhub.compatibility import Heads
from kvhub.errors import VerificationError
from kvhub.spec import ModelSpec

__all__ = ["MapperConfig", "Repair", "tensor_shapes"]

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Repair:
    """Which target layers have a network beside their linear map, see `kvhub.networks`.

    Attributes
    ----------
    hidden
        Width of its two hidden layers.
    keys, values
        Target layers whose keys or values it repairs, ascending.
    """

    hidden: int
    keys: tuple[int, ...]
    values: tuple[int, ...]

    def layers(self, kind: str) -> tuple[int, ...]:
        """Of `key` or `value`."""
        return self.keys if kind == "key" else self.values

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"hidden": self.hidden, "keys": list(self.keys), "values": list(self.values)}

    @classmethod
    def from_dict(cls, data: Any) -> "Repair":
        """The inverse of `to_dict`; VerificationError where it is not one."""
        wanted = {item.name for item in fields(cls)}
        lists = [data.get(kind) for kind in ("keys", "values")] if isinstance(data, dict) else []
        if not lists or set(data) != wanted or not all(isinstance(one, list) for one in lists):
            raise VerificationError(
                f"config.json: expected repair to hold {sorted(wanted)}, found {data!r}.",
                "Upgrade kvhub, or download the mapper again.",
            )
        return cls(data["hidden"], tuple(data["keys"]), tuple(data["values"]))

    def is_sound(self, target_layers: int) -> bool:
        """Whether there is something to repair, each layer once and one that there is."""
        return (
            isinstance(self.hidden, int)
            and self.hidden > 0
            and bool(self.keys or self.values)
            and all(
                list(layers) == sorted(set(layers)) and set(layers) <= set(range(target_layers))
                for layers in (self.keys, self.values)
            )
        )


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
    repair
        Networks beside the linear maps; None where there are none, and then config.json does not
        speak of them: a kvhub that does not know them reads it, and refuses one that has them.
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
    repair: Repair | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, with the schema's version."""
        result = {item.name: getattr(self, item.name) for item in fields(self)}
        result["source"], result["target"] = self.source.to_dict(), self.target.to_dict()
        result["selection"] = [list(layers) for layers in self.selection]
        if self.repair is None:
            del result["repair"]
        else:
            result["repair"] = self.repair.to_dict()
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
        repair = data.pop("repair", None)
        expected = {item.name for item in fields(cls)} - {"repair"}
        if set(data) != expected:
            raise VerificationError(
                f"config.json: unknown keys {sorted(set(data) - expected)}, missing keys "
                f"{sorted(expected - set(data))}.",
                "Upgrade kvhub, or download the mapper again.",
            )
        data["source"] = ModelSpec.from_dict(data["source"])
        data["target"] = ModelSpec.from_dict(data["target"])
        data["selection"] = tuple(tuple(layers) for layers in data["selection"])
        config = cls(**data, repair=None if repair is None else Repair.from_dict(repair))
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
            and (self.repair is None or self.repair.is_sound(self.target.num_layers))
        )
        if not sound:
            raise VerificationError(
                f"config.json contradicts itself: heads {self.heads!r}, top_k {k}, "
                f"{len(self.selection)} selections for {self.target.num_layers} target layers, "
                f"{layers} source layers, repair {self.repair}.",
                "Download or fit the mapper again.",
            )


def tensor_shapes(config: MapperConfig) -> dict[str, tuple[int, ...]]:
    """The mapper's tensors by name, with their shapes."""
    groups = 1 if config.heads == "all" else config.target.kv_heads
    layers = config.target.num_layers
    features = config.top_k * config.source.kv_dim // groups
    outputs = config.target.kv_dim // groups
    weight, bias = (layers, groups, features, outputs), (layers, groups, outputs)
    shapes: dict[str, tuple[int, ...]] = {}
    for kind in ("key", "value"):
        shapes |= {f"{kind}_weight": weight, f"{kind}_bias": bias}
    if config.repair is not None:
        for kind in ("key", "value"):
            shapes |= _network_shapes(kind, config.repair, groups, features, outputs)
    return shapes


def _network_shapes(
    kind: str, repair: Repair, groups: int, features: int, outputs: int
) -> dict[str, tuple[int, ...]]:
    """The networks of one kind; nothing where no layer has one."""
    layers, hidden = len(repair.layers(kind)), repair.hidden
    if not layers:
        return {}
    shapes = {
        "in": (features, hidden),
        "in_bias": (hidden,),
        "mid": (hidden, hidden),
        "mid_bias": (hidden,),
        "out": (hidden, outputs),
        "out_bias": (outputs,),
    }
    return {f"{kind}_repair_{part}": (layers, groups, *shape) for part, shape in shapes.items()}
