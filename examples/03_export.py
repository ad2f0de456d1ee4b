"""Export a mapper to ONNX and run it with onnxruntime, without PyTorch in the loop.

python examples/03_export.py [MAPPER]

It needs the extra `onnx`: pip install "kvhub[onnx]".
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
from kvhub.exporters import export

from kvhub import KVMapper

mapper = KVMapper.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else "tiny-middle-to-large")
source = mapper.config.source

with tempfile.TemporaryDirectory() as folder:
    # The export is tested against the mapper before it appears.
    exported = export(mapper, "onnx", Path(folder) / "exported")
    for file in sorted(exported.iterdir()):
        print(f"{file.name:16} {file.stat().st_size:>10,} bytes")
    session = onnxruntime.InferenceSession(str(exported / "model.onnx"))

    # Any batch and any number of tokens: here two rows of 100, which stand at different places.
    shape = (source.num_layers, 2, source.kv_heads, 100, source.head_dim)
    random = np.random.default_rng(0)
    outputs = session.run(
        None,
        {
            "source_keys": random.standard_normal(shape, dtype=np.float32),
            "source_values": random.standard_normal(shape, dtype=np.float32),
            "positions": np.stack([np.arange(100), np.arange(1000, 1100)]),
        },
    )
    for description, array in zip(session.get_outputs(), outputs, strict=True):
        print(f"{description.name}: {list(array.shape)} {array.dtype}")
