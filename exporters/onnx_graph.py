"""A mapper as an ONNX graph: dense caches in, dense caches out, positions as an input.

The graph has one small product per target layer rather than a stacked one: its intermediates stay
at a layer's size, and no tensor comes near the 2 GB that a protobuf message may have.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import onnx
import torch
from kvhub.exporters.map_plan import RopeTable
from kvhub.exporters.onnx_check import MODEL, require_runtime, self_test
from kvhub.exporters.plan import ExportPlan
from onnx import TensorProto, helper
from torch import Tensor

from kvhub import __version__
from kvhub.atomic import new_directory
from kvhub.errors import UsageError

if TYPE_CHECKING:
    from onnx.onnx_ml_pb2 import ModelProto

__all__ = ["export_onnx", "self_test"]

OPSET = 20  # the newest that TensorRT 10.1 documents
IR_VERSION = 9  # the one that belongs to it
INLINE_BYTES = 2 * 10**9  # weights above this go into a file of their own; protobuf ends at 2 GiB
ALIGNMENT = 4096  # pages, so that a runtime can map the weights
DATA = "model.onnx.data"
ELEMENT_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
}
README = """# {source} to {target}: KV cache mapper as ONNX

Written by kvhub {version}: heads {heads}, top_k {top_k}, {dtype}, opset {opset}. The facts are in
the metadata of `{model}`{data}.

| | name | type | shape |
|---|---|---|---|
| input | source_keys | {dtype} | [{source_shape}] |
| input | source_values | {dtype} | [{source_shape}] |
| input | positions | int64 | [batch, tokens] |
| output | target_keys | {dtype} | [{target_shape}] |
| output | target_values | {dtype} | [{target_shape}] |

The dims are [layers, batch, kv_heads, tokens, head_dim]; batch and tokens may have any size. Keys
are rotated, as the models cache them. Positions are absolute, one per token of each row. Tokens do
not see each other here: map a long context in spans of tokens to bound the memory it takes.

```python
import onnxruntime

session = onnxruntime.InferenceSession("{model}")
feeds = {{"source_keys": keys, "source_values": values, "positions": positions}}
target_keys, target_values = session.run(None, feeds)
```

{note}

Every operator is one that TensorRT 10.1's ONNX parser documents; kvhub has not run it there.
"""
NOTES = {
    torch.float32: "Compared with the PyTorch mapper by onnxruntime on a CPU when it was written.",
    torch.float16: "Compared with the PyTorch mapper by onnxruntime on a CPU when it was written.",
    torch.bfloat16: "onnxruntime has no bfloat16 products on a CPU: run it where there are some. "
    "It was compared with the PyTorch mapper with float32 arithmetic in the place of bfloat16.",
}


class Graph:
    """Nodes and constants, in the order of their adding: equal plans give equal bytes.

    Parameters
    ----------
    data
        Where weights go; None to keep them in the graph.
    """

    def __init__(self, data: BinaryIO | None) -> None:
        self.data = data
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, TensorProto] = {}

    def op(self, kind: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Add a node with one output and return the output's name."""
        return self._node(kind, inputs, [name or f"{kind}_{len(self.nodes)}"], attributes)[0]

    def split(self, states: str, sizes: Sequence[int]) -> list[str]:
        """Split along the last dim; sizes of 0 are left out."""
        sizes = [size for size in sizes if size]
        if len(sizes) == 1:
            return [states]
        names = [f"Split_{len(self.nodes)}_{number}" for number in range(len(sizes))]
        return self._node("Split", (states, self.integers(sizes)), names, {"axis": -1})

    def reshape(self, states: str, shape: Sequence[int]) -> str:
        """Reshape; 0 keeps the dim in that place."""
        return self.op("Reshape", states, self.integers(shape))

    def cast(self, states: str, found: torch.dtype, wanted: torch.dtype) -> str:
        """Cast, if the dtypes differ."""
        if found == wanted:
            return states
        return self.op("Cast", states, to=ELEMENT_TYPES[wanted])

    def integers(self, values: Sequence[int] | int) -> str:
        """A constant int64 vector or scalar."""
        array = np.asarray(values, dtype="<i8")
        name = "_".join(["integers" if array.ndim else "integer", *map(str, array.flat)])
        self.constants[name] = onnx.numpy_helper.from_array(array, name)
        return name

    def tensor(self, name: str, values: Tensor, *, large: bool = False) -> str:
        """A constant of floats; a large one goes to the data file if there is one."""
        flat = values.detach().cpu().contiguous()
        constant = TensorProto(
            name=name, data_type=ELEMENT_TYPES[values.dtype], dims=list(values.shape)
        )
        content = flat.reshape(-1).view(torch.uint8).numpy()
        if large and self.data is not None:
            self.data.write(b"\0" * (-self.data.tell() % ALIGNMENT))
            constant.data_location = TensorProto.EXTERNAL
            for key, value in (
                ("location", DATA),
                ("offset", self.data.tell()),
                ("length", content.nbytes),
            ):
                constant.external_data.add(key=key, value=str(value))
            self.data.write(content.data)
        else:
            constant.raw_data = content.tobytes()
        self.constants[name] = constant
        return name

    def _node(
        self, kind: str, inputs: Sequence[str], outputs: list[str], attributes: dict[str, Any]
    ) -> list[str]:
        name = f"node_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=name, **attributes))
        return outputs


class Turn:
    """A rotation in the graph: cos and sin once, in float32, for all layers.

    Parameters
    ----------
    rope
        How the model rotates.
    strip
        Undo the rotation: (a R)^T k' / a^2, with attention scaling a.
    """

    def __init__(self, graph: Graph, name: str, rope: RopeTable, *, strip: bool) -> None:
        self.graph, self.rope = graph, rope
        inv_freq, axes = rope.inv_freq, [1, 3]
        if rope.interleaved:  # the pairs have a dim of their own
            inv_freq, axes = inv_freq[:, None], [1, 3, 4]
        positions = graph.op("Cast", "positions", to=TensorProto.FLOAT)
        positions = graph.op("Unsqueeze", positions, graph.integers(axes))
        angles = graph.op("Mul", positions, graph.tensor(f"{name}_inv_freq", inv_freq))
        scale = 1 / rope.attention_scaling if strip else rope.attention_scaling
        factors = {"cos": scale, "sin": -scale if strip else scale}
        self.cos, self.sin = (
            graph.op(
                "Mul",
                graph.op(kind.capitalize(), angles),
                graph.tensor(f"{name}_{kind}_scale", torch.tensor([factor])),
            )
            for kind, factor in factors.items()
        )

    def __call__(self, keys: str, head_dim: int) -> str:
        """Turn float32 keys `[batch, kv_heads, tokens, head_dim]`."""
        graph, rotary = self.graph, self.rope.rotary_dim
        half = rotary // 2
        if self.rope.interleaved:
            rotating, *rest = graph.split(keys, [rotary, head_dim - rotary])
            pairs = graph.reshape(rotating, [0, 0, 0, half, 2])
            first, second = graph.split(pairs, [1, 1])
        else:
            first, second, *rest = graph.split(keys, [half, half, head_dim - rotary])
        turned = [
            graph.op("Sub", graph.op("Mul", first, self.cos), graph.op("Mul", second, self.sin)),
            graph.op("Add", graph.op("Mul", second, self.cos), graph.op("Mul", first, self.sin)),
        ]
        if self.rope.interleaved:
            turned = [graph.reshape(graph.op("Concat", *turned, axis=-1), [0, 0, 0, rotary])]
        if len(turned + rest) == 1:
            return turned[0]
        return graph.op("Concat", *turned, *rest, axis=-1)


def export_onnx(plan: ExportPlan, path: Path) -> Path:
    """Write a directory with the graph, its weights and a README, and test it.

    Parameters
    ----------
    plan
        Its dtype is that of weights, caches and products: float32, float16 or bfloat16.
        Rotations and biases are computed in float32.
    path
        The directory to make; after an error it is not there.

    Returns
    -------
    path
        Of the directory. Above 2 GB the weights are in `model.onnx.data`.

    Raises
    ------
    UsageError
        The plan is float64, or onnxruntime is not installed.
    ConflictError
        Something is at `path` already.
    VerificationError
        The graph does not map as the PyTorch mapper does.
    """
    if plan.dtype not in ELEMENT_TYPES:
        raise UsageError(
            f"ONNX takes {', '.join(map(_name, ELEMENT_TYPES))}; found {_name(plan.dtype)}.",
            "Choose one with --dtype, or for the plan with make_plan(mapper, dtype=...).",
        )
    require_runtime()
    with new_directory(path) as directory:
        with ExitStack() as stack:
            data = None
            if plan.size_bytes > INLINE_BYTES:
                data = stack.enter_context((directory / DATA).open("wb"))
            model = _build(plan, data)
        content = model.SerializeToString(deterministic=True)
        (directory / MODEL).write_bytes(content)
        onnx.checker.check_model(directory / MODEL, full_check=True)
        (directory / "README.md").write_text(_readme(plan, data is not None), encoding="utf-8")
        self_test(directory, plan)
    return path


def _build(plan: ExportPlan, data: BinaryIO | None) -> "ModelProto":
    graph = Graph(data)
    strip = Turn(graph, "source", plan.source_rope, strip=True)
    apply = Turn(graph, "target", plan.target_rope, strip=False)
    _add_targets(graph, plan, "key", _sources(graph, plan, "key", strip), apply)
    _add_targets(graph, plan, "value", _sources(graph, plan, "value", None), None)
    shapes = {"source": _shape(plan, "source"), "target": _shape(plan, "target")}
    inputs, outputs = (
        [
            helper.make_tensor_value_info(f"{side}_{kind}", ELEMENT_TYPES[plan.dtype], shapes[side])
            for kind in ("keys", "values")
        ]
        for side in ("source", "target")
    )
    positions = helper.make_tensor_value_info("positions", TensorProto.INT64, ["batch", "tokens"])
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "kv_mapper",
            [*inputs, positions],
            outputs,
            initializer=list(graph.constants.values()),
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="kvhub",
        producer_version=__version__,
    )
    helper.set_model_props(model, _metadata(plan))
    return model


def _sources(graph: Graph, plan: ExportPlan, kind: str, strip: Turn | None) -> dict[int, str]:
    """What the products read of each source layer that is read at all.

    `[batch, kv_heads, tokens, head_dim]` where heads are matched, else with tokens before heads.
    """
    sources = {}
    for layer in sorted(set(plan.gather.flatten().tolist())):
        states = graph.op("Gather", f"source_{kind}s", graph.integers(layer), axis=0)
        if strip:
            states = graph.cast(states, plan.dtype, torch.float32)
            states = strip(states, plan.source_head_dim)
            states = graph.cast(states, torch.float32, plan.dtype)
        if plan.heads == "all":
            states = graph.op("Transpose", states, perm=[0, 2, 1, 3])
        sources[layer] = states
    return sources


def _add_targets(
    graph: Graph, plan: ExportPlan, kind: str, sources: dict[int, str], apply: Turn | None
) -> None:
    """X W + b of every target layer, rotated by `apply`, as an output of the graph."""
    together = plan.heads == "all"  # one product for all heads, or one per head
    weights, biases = getattr(plan, f"{kind}_weight"), getattr(plan, f"{kind}_bias").float()
    results = []
    for layer, chosen in enumerate(plan.gather.tolist()):
        weight, bias = weights[layer], biases[layer][:, None]
        states = graph.op(
            "Concat", *(sources[index] for index in chosen), axis=2 if together else 3
        )
        if together:
            states = graph.reshape(states, [0, 0, plan.features])
        read = states
        states = _linear(
            graph, plan, read, (f"{kind}_weight_{layer}", weight), (f"{kind}_bias_{layer}", bias)
        )
        network = plan.network(kind, layer)
        if network is not None:
            states = graph.op(
                "Add", states, _network(graph, plan, read, f"{kind}_repair_{layer}", network)
            )
        if together:
            states = graph.reshape(states, [0, 0, plan.target_kv_heads, plan.target_head_dim])
            states = graph.op("Transpose", states, perm=[0, 2, 1, 3])
        if apply:
            states = apply(states, plan.target_head_dim)
        states = graph.cast(states, torch.float32, plan.dtype)
        results.append(graph.op("Unsqueeze", states, graph.integers([0])))
    graph.op("Concat", *results, axis=0, name=f"target_{kind}s")


def _linear(
    graph: Graph,
    plan: ExportPlan,
    states: str,
    weight: tuple[str, Tensor],
    bias: tuple[str, Tensor],
) -> str:
    """X W + b in float32, of `[groups, inputs, width]` and `[groups, 1, width]` by their names."""
    (weight_name, weights), (bias_name, biases) = weight, bias
    if plan.heads == "all":
        weights, biases = weights[0], biases[0, 0]
    weight_name = graph.tensor(weight_name, weights, large=True)
    states = graph.cast(graph.op("MatMul", states, weight_name), plan.dtype, torch.float32)
    return graph.op("Add", states, graph.tensor(bias_name, biases))


def _network(
    graph: Graph, plan: ExportPlan, states: str, name: str, network: Sequence[Tensor]
) -> str:
    """relu(relu(X W1 + b1) W2 + b2) W3 + b3 in float32."""
    for number in range(3):
        weight, bias = network[2 * number], network[2 * number + 1].float()[:, None]
        if number:
            states = graph.cast(graph.op("Relu", states), torch.float32, plan.dtype)
        named = (f"{name}_weight_{number}", weight), (f"{name}_bias_{number}", bias)
        states = _linear(graph, plan, states, *named)
    return states


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(plan: ExportPlan, side: str) -> list[int | str]:
    layers, kv_heads, head_dim = (
        getattr(plan, f"{side}_{name}") for name in ("layers", "kv_heads", "head_dim")
    )
    return [layers, "batch", kv_heads, "tokens", head_dim]


def _metadata(plan: ExportPlan) -> dict[str, str]:
    source, target = plan.config.source, plan.config.target
    return {
        "kvhub_version": __version__,
        "source": source.model_id,
        "source_revision": source.revision or "",
        "target": target.model_id,
        "target_revision": target.revision or "",
        "heads": plan.heads,
        "top_k": str(plan.top_k),
        "selection": json.dumps(plan.gather.tolist()),
        "dtype": _name(plan.dtype),
    }


def _readme(plan: ExportPlan, external: bool) -> str:
    facts = _metadata(plan)
    return README.format(
        **{key: facts[key] for key in ("heads", "top_k", "dtype")},
        source=facts["source"] or plan.config.source.model_type,
        target=facts["target"] or plan.config.target.model_type,
        version=__version__,
        opset=OPSET,
        model=MODEL,
        data=f"; its weights are in `{DATA}`, which must stay beside it" if external else "",
        source_shape=", ".join(map(str, _shape(plan, "source"))),
        target_shape=", ".join(map(str, _shape(plan, "target"))),
        note=NOTES[plan.dtype],
    )
