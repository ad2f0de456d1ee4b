"""Whether an exported ONNX graph maps as the mapper does: run by onnxruntime, on the CPU."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import torch
from google.protobuf.message import DecodeError
from kvhub.exporters.plan import ExportPlan
from onnx import TensorProto, helper
from torch import Tensor

from kvhub.cache import build_cache
from kvhub.errors import UsageError, VerificationError
from kvhub.mapper import KVMapper

if TYPE_CHECKING:
    from onnx.onnx_ml_pb2 import ModelProto

__all__ = ["MODEL", "require_runtime", "self_test"]

MODEL = "model.onnx"
# Of the error in each dim of each target head over its size, both as norms over the tokens.
# float32: sums of thousands of products, in another order. float16: what goes into a product and
# what comes out is rounded by up to 2^-11 = 5e-4 of its size, and sums may be too. bfloat16 is
# tested in float32 arithmetic.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 1e-5}
TEST_TOKENS = (3, 8)


def self_test(path: Path, plan: ExportPlan) -> None:
    """Compare an exported directory with the PyTorch mapper on random caches.

    Parameters
    ----------
    path
        What `export_onnx` wrote.
    plan
        What it was written from.

    Raises
    ------
    UsageError
        onnxruntime is not installed.
    VerificationError
        The graph cannot be run, or does not map as the mapper does.
    """
    tensors = {
        name: getattr(plan, name).cpu()
        for name in ("key_weight", "key_bias", "value_weight", "value_bias")
    } | {name: tensor.cpu() for name, tensor in plan.repair.items()}
    selection = tuple(map(tuple, plan.gather.tolist()))
    mapper = KVMapper(replace(plan.config, selection=selection), tensors)
    generator = torch.Generator().manual_seed(0)
    starts = torch.tensor([[0], [plan.config.source.max_positions // 2]])
    session = _Session(path, plan.dtype)
    for tokens in TEST_TOKENS:
        heads, head_dim = plan.source_kv_heads, plan.source_head_dim
        shape = (plan.source_layers, len(starts), heads, tokens, head_dim)
        keys, values = (torch.randn(shape, generator=generator).to(plan.dtype) for _ in range(2))
        positions = starts + torch.arange(tokens)
        expected = mapper(build_cache(keys, values), positions=positions, dtype=torch.float32)
        found = session.run(keys, values, positions)
        for kind, result in zip(("keys", "values"), found, strict=True):
            wanted = torch.stack([getattr(layer, kind) for layer in expected.layers])
            _compare(path, kind, result, wanted, TOLERANCES[plan.dtype])


def _compare(path: Path, kind: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    if found.shape != expected.shape:
        raise VerificationError(
            f"{path / MODEL} gives {kind} of shape {list(found.shape)}; expected "
            f"{list(expected.shape)}.",
            "Export the mapper again.",
        )
    # Not element by element: one that is small by cancellation has a large relative error.
    error = (found - expected).norm(dim=(1, 3))
    size = expected.norm(dim=(1, 3))
    wrong = ~(error <= tolerance * size)  # true for NaN too
    for layer, head, dim in wrong.nonzero()[:1].tolist():
        raise VerificationError(
            f"{path / MODEL} does not map as the mapper does: {kind} of target layer {layer}, KV "
            f"head {head}, dim {dim} are off by {float(error[layer, head, dim]):.3g}; expected at "
            f"most {tolerance:g} of {float(size[layer, head, dim]):.3g}.",
            "Export the mapper again; if it is float16, try float32 or bfloat16.",
        )


class _Session:
    """An exported graph in onnxruntime, on the CPU."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        ort = require_runtime()
        from onnxruntime.capi import onnxruntime_pybind11_state as state

        self.errors = (
            *(state.Fail, state.InvalidArgument, state.InvalidGraph, state.InvalidProtobuf),
            *(state.NoSuchFile, state.NotImplemented, state.RuntimeException),
        )
        self.path, self.dtype = path, dtype
        try:
            model = onnx.load(path / MODEL, load_external_data=False)
        except (DecodeError, OSError) as error:
            raise self._unusable(error) from error
        if dtype == torch.bfloat16:
            _widen(model)
        options = ort.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        # Folding constants would hold every half-precision weight a second time, in float32.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(path.resolve())
        )
        try:
            self.session = ort.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except self.errors as error:
            raise self._unusable(error) from error

    def run(self, keys: Tensor, values: Tensor, positions: Tensor) -> list[Tensor]:
        """Return float32 target keys and values."""
        wide = torch.float32 if self.dtype == torch.bfloat16 else self.dtype
        feeds = {
            "source_keys": keys.to(wide).numpy(),
            "source_values": values.to(wide).numpy(),
            "positions": positions.numpy(),
        }
        try:
            results = self.session.run(["target_keys", "target_values"], feeds)
        except self.errors as error:
            raise self._unusable(error) from error
        return [torch.from_numpy(result).float() for result in results]

    def _unusable(self, error: Exception) -> VerificationError:
        return VerificationError(
            f"{self.path / MODEL} cannot be run: expected a graph that onnxruntime takes, found: "
            f"{error}.",
            "Export the mapper again.",
        )


def _widen(model: "ModelProto") -> None:
    """Compute in float32 what a graph computes in bfloat16, with the weights that it has."""
    graph = model.graph
    for value in (*graph.input, *graph.output):
        tensor_type = value.type.tensor_type
        if tensor_type.elem_type == TensorProto.BFLOAT16:
            tensor_type.elem_type = TensorProto.FLOAT
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == TensorProto.BFLOAT16:
                attribute.i = TensorProto.FLOAT
    narrow = {item.name for item in graph.initializer if item.data_type == TensorProto.BFLOAT16}
    for node in graph.node:
        for number, name in enumerate(node.input):
            if name in narrow:
                node.input[number] = f"{name}_wide"
    nodes = list(graph.node)
    del graph.node[:]
    for name in sorted(narrow):
        graph.node.append(helper.make_node("Cast", [name], [f"{name}_wide"], to=TensorProto.FLOAT))
    graph.node.extend(nodes)


def require_runtime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise UsageError(
            "Testing an ONNX export needs onnxruntime, which is not installed.",
            'Run pip install "kvhub[onnx]".',
        ) from error
    return onnxruntime
