"""Connectors that are small enough to be right, and what the tests serve with them."""

import functools
import sys
from contextlib import contextmanager
from types import ModuleType

import torch
import trtllm_api as api
from tiny import tiny_model
from trtllm_api import V1_2_1
from trtllm_host import Host

MODULE = "connector_of_this_test"


@functools.cache
def small_model():
    return tiny_model("qwen3", layers=3)


def greedy(prompt, count, model=None):
    """Return what transformers generates when no token ends the text."""
    model = model or small_model()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    seen = {"attention_mask": torch.ones_like(ids)}  # else the padding token is masked
    tokens = model.generate(ids, max_new_tokens=count, do_sample=False, **seen)
    return tokens[0, len(prompt) :].tolist()


@contextmanager
def serving():
    """Give a function that makes hosts; its `parts` are a scheduler and a worker without bases."""
    hosts = []

    def make(version=V1_2_1, parts=None, model=None, **options):
        api.install(version)  # for the bases
        try:
            if parts:
                base = sys.modules[version.connector_module]
                sys.modules[MODULE] = ModuleType(MODULE)
                for name, part in zip(("Scheduler", "Worker"), parts, strict=True):
                    bases = (part, getattr(base, f"KvCacheConnector{name}"))
                    setattr(sys.modules[MODULE], name, type(name, bases, {}))
            names = (MODULE, "Scheduler", "Worker") if parts else None
            options = {"tokens_per_block": 8, **options}
            hosts.append(Host(model or small_model(), version, names, **options))
        finally:
            api.uninstall()
        return hosts[-1]

    try:
        yield make
    finally:
        for host in hosts:
            host.close()
        sys.modules.pop(MODULE, None)


class Idle:
    """Does nothing, and keeps what it was told."""

    answer = (0, False)
    saves = False

    def __init__(self, llm_args):
        super().__init__(llm_args)
        self.outputs, self.allocated, self.computed, self.ended = [], [], [], []

    def build_connector_meta(self, scheduler_output):
        self.outputs.append(scheduler_output)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.computed.append(num_computed_tokens)
        return self.answer

    def request_finished(self, request, cache_block_ids):
        self.ended.append((request.request_id, list(cache_block_ids)))
        return self.saves

    def update_state_after_alloc(self, request, block_ids):
        self.allocated.append(list(block_ids))


class IdleWorker:
    def __init__(self, llm_args):
        super().__init__(llm_args)
        self.layers, self.asked, self.held, self.forwards = [], [], ([], []), 0

    def register_forward_pass_callable(self):
        return self.end_of_forward

    def end_of_forward(self):
        self.forwards += 1

    def register_kv_caches(self, kv_cache_tensor):
        self.pool = kv_cache_tensor

    def register_kv_cache_layout(self, layout):
        self.layout = layout

    def start_load_kv(self, stream):
        stream.synchronize()

    def wait_for_layer_load(self, layer_idx, stream):
        self.layers.append(layer_idx)

    def save_kv_layer(self, layer_idx, stream):
        pass

    def wait_for_save(self, stream):
        pass

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        self.asked.append((finished_gen_req_ids, started_loading_req_ids))
        return finished_gen_req_ids, started_loading_req_ids


def store_of(entries, in_background=False):
    """A connector of the same model that keeps whole blocks in a dict, by all tokens before."""

    class Keeper(Idle):
        def __init__(self, llm_args):
            super().__init__(llm_args)
            self.size = llm_args.kv_cache_config.tokens_per_block
            self.known, self.loads, self.queued = {}, {}, []

        def get_num_new_matched_tokens(self, request, num_computed_tokens):
            tokens = request.get_tokens(0)
            if num_computed_tokens % self.size:
                return 0, False
            first = end = num_computed_tokens // self.size
            while end < (len(tokens) - 1) // self.size and self.key(tokens, end) in entries:
                end += 1
            self.loads[request.request_id] = (tokens, first, end)
            return (end - first) * self.size, in_background and end > first

        def key(self, tokens, ordinal):
            return 0, *tokens[: (ordinal + 1) * self.size]

        def update_state_after_alloc(self, request, block_ids):
            tokens, first, end = self.loads.pop(request.request_id)
            self.queued += [(self.key(tokens, i)[1:], block_ids[i]) for i in range(first, end)]

        def build_connector_meta(self, scheduler_output):
            saves = []
            for data in scheduler_output.new_requests + scheduler_output.cached_requests:
                tokens, blocks = self.known.setdefault(data.request_id, ([], []))
                tokens += data.new_tokens
                blocks += data.new_block_ids
                done = (data.computed_position + data.num_scheduled_tokens) // self.size
                done = min(done, len(tokens) // self.size)
                saves += [(self.key(tokens, i)[1:], blocks[i]) for i in range(done)]
            loads, self.queued = self.queued, []
            return loads, saves

    class KeeperWorker(IdleWorker):
        def __init__(self, llm_args):
            super().__init__(llm_args)
            self.rank = sys.modules["tensorrt_llm"].mpi_rank()

        def register_kv_cache_layout(self, layout):
            (region,) = layout.groups[0].regions
            self.pool = region.as_tensor(torch.float32).unflatten(1, (3, 2, -1))

        def start_load_kv(self, stream):
            for key, block in self.get_connector_meta()[0]:
                self.pool[block] = entries[(self.rank, *key)]

        def wait_for_save(self, stream):
            for key, block in self.get_connector_meta()[1]:
                entries[(self.rank, *key)] = self.pool[block].clone()

    return Keeper, KeeperWorker


def prompts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 64, (n,), generator=generator).tolist() for n in lengths]


def raising(name, part):
    def method(self, *args):
        raise ValueError(name)

    return type("Raises", (part,), {name: method})
