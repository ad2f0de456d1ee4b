"""What an exported directory says: the mapper, both models, and how this deployment serves them.

`kvhub.json` is written by an export and describes the mapper. `settings.json` beside it, or the
file that the environment variable TLLM_KVHUB_SETTINGS names, is the operator's.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from kvhub.exporters.chain import Namespace
from kvhub.exporters.map_plan import MapPlan, RopeTable
from torch import Tensor

from kvhub.errors import UsageError, VerificationError
from kvhub.products import WORKSPACE_BYTES

__all__ = [
    "SALT",
    "Deployment",
    "Settings",
    "Side",
    "load_deployment",
    "load_plan",
    "mapper_digest",
]

SCHEMA = 1
REQUIRED = ("digest", "heads", "groups", "top_k", "gather", "weights_sha256", "source", "target")
FACTS, SETTINGS, WEIGHTS = "kvhub.json", "settings.json", "weights.safetensors"
# The engines forward variables to their workers only if they begin so.
SETTINGS_VARIABLE = "TLLM_KVHUB_SETTINGS"
SALT = "kvhub"  # requests are served only under the cache salt kvhub:DIGEST or kvhub:DIGEST:TENANT
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
}


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two models.

    Attributes
    ----------
    model, revision
        Its id, and its commit or another name of exactly these weights.
    tokenizer_digest
        Of its vocabulary.
    num_layers, kv_heads, head_dim
        Of its cache.
    rope
        How it rotates keys.
    """

    model: str
    revision: str
    tokenizer_digest: str
    num_layers: int
    kv_heads: int
    head_dim: int
    rope: RopeTable

    def namespace(
        self, kv_dtype: str, chunk_tokens: int, scales: tuple[float, ...] | None = None
    ) -> Namespace:
        """Of the entries with this model's states; `scales` are those of a float8 pool."""
        rope = self.rope
        text = json.dumps(
            [rope.rotary_dim, rope.interleaved, rope.attention_scaling, rope.inv_freq.tolist()]
        )
        return Namespace(
            model=self.model,
            revision=self.revision,
            tokenizer_digest=self.tokenizer_digest,
            rope_digest=hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
            kv_dtype=kv_dtype if scales is None else f"{kv_dtype} {json.dumps(scales)}",
            num_layers=self.num_layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            chunk_tokens=chunk_tokens,
        )


@dataclass(frozen=True)
class Settings:
    """An operator's choices. Both engines of a pair must agree on all but the last five.

    Attributes
    ----------
    store
        As for `open_store`.
    source_kv_dtype, target_kv_dtype
        Of the engines' pools.
    source_kv_scales, target_kv_scales
        Of float8 pools, a number per layer: a stored number times its scale is the true one.
    source_tp, target_tp
        Over how many ranks each engine divides its KV heads.
    chunk_tokens
        Tokens of an entry, a power of two.
    tenants
        Salts of requests to the source whose states may be found; None is a request without one.
        Needed by name where an engine shows only a hash of a request's salt.
    exact_prefix
        Positions that are never mapped: there the target's own states are in the store or in the
        engine, or the request is not served.
    lookup_seconds
        How long a request may wait for its entries to be read and checked.
    staging_bytes
        Bound on entries that are promised and not loaded yet, in `staging_path`.
    saving_bytes
        Bound on states on their way into the store; what comes above is not saved.
    workspace_bytes
        As for `map_paged`, and as much again for the source's states on the device.
    status_file
        Where a line of JSON is added for each request; None for none.
    """

    store: Mapping[str, Any] = field(
        default_factory=lambda: {"kind": "files", "capacity_bytes": 8 * 2**30}
    )
    source_kv_dtype: str = "bfloat16"
    target_kv_dtype: str = "bfloat16"
    source_kv_scales: tuple[float, ...] | None = None
    target_kv_scales: tuple[float, ...] | None = None
    source_tp: int = 1
    target_tp: int = 1
    chunk_tokens: int = 32
    tenants: tuple[str | None, ...] = (None,)
    exact_prefix: int = 0
    lookup_seconds: float = 0.5
    staging_bytes: int = 8 * 2**30
    staging_path: str | None = None
    saving_bytes: int = 2**30
    workspace_bytes: int = WORKSPACE_BYTES
    status_file: str | None = None

    def __post_init__(self) -> None:
        for side in ("source", "target"):
            dtype, scales = (getattr(self, f"{side}_kv_{name}") for name in ("dtype", "scales"))
            if dtype not in DTYPES:
                raise UsageError(
                    f"{side}_kv_dtype must be one of {', '.join(DTYPES)}, found {dtype!r}."
                )
            if (scales is not None) != (dtype == "float8_e4m3fn"):
                raise UsageError(
                    f"{side}_kv_scales belong to float8_e4m3fn pools and to no others, found "
                    f"{scales!r} for {dtype}.",
                    "Give a scale per layer; they are 1.0 where the checkpoint has none.",
                )
        for name in ("source_tp", "target_tp", "staging_bytes", "saving_bytes", "workspace_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, found {getattr(self, name)}.")
        if self.exact_prefix < 0 or self.lookup_seconds <= 0:
            raise UsageError(
                "exact_prefix must be at least 0 and lookup_seconds above 0, found "
                f"{self.exact_prefix} and {self.lookup_seconds}."
            )


@dataclass(frozen=True, eq=False)
class Deployment:
    """An exported directory, read.

    Attributes
    ----------
    path
        The directory.
    facts
        `kvhub.json`.
    source, target
        The two models.
    digest
        Of the mapper: 16 hex digits in every salt.
    settings
        The operator's.
    """

    path: Path
    facts: dict[str, Any]
    source: Side
    target: Side
    digest: str
    settings: Settings

    def salt(self, tenant: str | None = None) -> str:
        """The cache salt of requests that may be served with this mapper."""
        return ":".join([SALT, self.digest, *([] if tenant is None else [tenant])])


def load_deployment(path: Path, overrides: Mapping[str, Any] | None = None) -> Deployment:
    """Read an exported directory, without its weights.

    Parameters
    ----------
    path
        The directory.
    overrides
        Settings that the engine was started with, in the place of those of the file.

    Raises
    ------
    UsageError
        Settings that are not ones.
    VerificationError
        `kvhub.json` is missing, not one of this version, or was changed.
    """
    facts = _read_json(path / FACTS)
    if facts.get("schema") != SCHEMA:
        raise VerificationError(
            f"{path / FACTS} has schema {facts.get('schema')!r}; expected {SCHEMA}.",
            "Export the mapper again, with the version of kvhub that this code is from.",
        )
    if missing := [name for name in REQUIRED if name not in facts]:
        raise VerificationError(
            f"{path / FACTS} has no {', '.join(missing)}.", "Export the mapper again."
        )
    named = os.environ.get(SETTINGS_VARIABLE)
    file = Path(named) if named else path / SETTINGS
    values = _read_json(file) if named or file.exists() else {}
    settings = _settings({**values, **(overrides or {})}, file)
    found = mapper_digest(facts)
    if found != facts["digest"]:
        raise VerificationError(
            f"{path / FACTS} says that its digest is {facts['digest']}, found {found}: something "
            "in it was changed.",
            "Export the mapper again; what operators may change is in settings.json.",
        )
    return Deployment(
        path=path,
        facts=facts,
        source=_side(facts["source"]),
        target=_side(facts["target"]),
        digest=facts["digest"],
        settings=settings,
    )


def mapper_digest(facts: Mapping[str, Any]) -> str:
    """16 hex digits over all that decides what a mapper maps, from `kvhub.json`."""
    names = ["source", "target", "gather", "heads", *(["repaired"] if "repaired" in facts else [])]
    text = json.dumps({name: facts[name] for name in names}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256((facts["weights_sha256"] + text).encode()).hexdigest()[:16]


def load_plan(deployment: Deployment, device: torch.device | str, rank: int) -> MapPlan:
    """What a rank of the target engine maps with: all that its KV heads need, on its device.

    Raises
    ------
    VerificationError
        The weights are not those that `kvhub.json` names.
    UsageError
        The target's KV heads do not divide among its ranks.
    """
    from safetensors.torch import load_file

    file = deployment.path / WEIGHTS
    found = _sha256(file)
    expected = deployment.facts["weights_sha256"]
    if found != expected:
        raise VerificationError(
            f"{file} has sha256 {found}; expected {expected}.", "Export the mapper again."
        )
    facts, source, target = deployment.facts, deployment.source, deployment.target
    tensors = load_file(file)
    repaired = {kind: tuple(layers) for kind, layers in facts.get("repaired", {}).items()}
    repair = {name: tensors.pop(name) for name in sorted(tensors) if "_repair_" in name}
    whole = MapPlan(
        heads=facts["heads"],
        groups=facts["groups"],
        top_k=facts["top_k"],
        source_layers=source.num_layers,
        target_layers=target.num_layers,
        source_kv_heads=source.kv_heads,
        source_head_dim=source.head_dim,
        target_kv_heads=target.kv_heads,
        target_head_dim=target.head_dim,
        gather=torch.tensor(facts["gather"], dtype=torch.int32),
        source_rope=source.rope,
        target_rope=target.rope,
        repaired=repaired,
        repair=repair,
        **tensors,
    )
    start, stop = heads_of(target.kv_heads, deployment.settings.target_tp, rank)
    part = _slice(whole, start, stop)
    moved = {
        name: value.to(device) for name, value in vars(part).items() if isinstance(value, Tensor)
    }
    ropes = {
        name: replace(rope, inv_freq=rope.inv_freq.to(device))
        for name, rope in (("source_rope", part.source_rope), ("target_rope", part.target_rope))
    }
    repair = {name: tensor.to(device) for name, tensor in part.repair.items()}
    return replace(part, **moved, **ropes, repair=repair)


def heads_of(kv_heads: int, ranks: int, rank: int) -> tuple[int, int]:
    """The first KV head of a rank, and the one after its last.

    Raises
    ------
    UsageError
        They do not divide.
    """
    if kv_heads % ranks:
        raise UsageError(
            f"{kv_heads} KV heads do not divide among {ranks} ranks.",
            f"Use a tensor parallel size that divides {kv_heads}.",
        )
    size = kv_heads // ranks
    return rank * size, (rank + 1) * size


def _slice(plan: MapPlan, start: int, stop: int) -> MapPlan:
    """The plan of some of the target's KV heads; matched ones need as many of the source's."""
    if (start, stop) == (0, plan.target_kv_heads):
        return plan
    count = stop - start
    if plan.groups > 1:
        parts: dict[str, Any] = {
            name: getattr(plan, name)[:, start:stop].contiguous()
            for name in ("key_weight", "value_weight", "key_bias", "value_bias")
        }
        repair = {name: tensor[:, start:stop].contiguous() for name, tensor in plan.repair.items()}
        parts |= {"groups": count, "source_kv_heads": count}
    else:
        outputs = slice(start * plan.target_head_dim, stop * plan.target_head_dim)
        parts = {
            name: getattr(plan, name)[..., outputs].contiguous()
            for name in ("key_weight", "value_weight", "key_bias", "value_bias")
        }
        # The hidden layers are every head's; of the last one each rank has its heads' outputs.
        repair = {
            name: tensor[..., outputs].contiguous()
            if name.endswith(("_out", "_out_bias"))
            else tensor
            for name, tensor in plan.repair.items()
        }
    return replace(plan, target_kv_heads=count, repair=repair, **parts)


def _side(facts: Mapping[str, Any]) -> Side:
    rope = facts["rope"]
    table = RopeTable(
        inv_freq=torch.tensor(rope["inv_freq"], dtype=torch.float32),
        attention_scaling=rope["attention_scaling"],
        rotary_dim=rope["rotary_dim"],
        interleaved=rope["interleaved"],
    )
    names = [item.name for item in fields(Side) if item.name != "rope"]
    return Side(**{name: facts[name] for name in names}, rope=table)


def _settings(values: dict[str, Any], file: Path) -> Settings:
    known = {item.name for item in fields(Settings)}
    if unknown := sorted(set(values) - known):
        raise UsageError(
            f"{file} has unknown settings {', '.join(unknown)}.",
            f"There are: {', '.join(sorted(known))}.",
        )
    listed: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    try:
        return Settings(**listed)
    except TypeError as error:  # a text where a number belongs
        raise UsageError(f"{file} has a setting of the wrong kind: {error}.") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise VerificationError(f"{file} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise VerificationError(f"{file} must hold a JSON object, found {type(content).__name__}.")
    return content


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        digest = hashlib.sha256()
        while block := opened.read(2**24):
            digest.update(block)
    return digest.hexdigest()
