"""The connector with a fault: loads of every other request fail once they are promised.

In the environment with vLLM, where an exported directory is on the path.
"""

from kvhub_runtime import vllm_connector


class KVHubConnector(vllm_connector.KVHubConnector):
    """Named like the original, for `kv_connector_module_path` to find."""

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        loader = self.worker.transfer.loader
        original, self.loads = loader._load, 0

        def load(found, kernels):
            self.loads += kernels is None  # on CPUs both attempts are in torch
            if self.loads % 4 < 2:
                raise OSError("The staged file is gone.")
            original(found, kernels)

        loader._load = load
