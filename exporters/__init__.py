"""Run a mapper outside of PyTorch: the backends that `kvhub export` writes for."""
