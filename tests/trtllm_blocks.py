"""The blocks of a stand-in engine: allocation, reuse tree, pins; and V2's description of pools.

After WindowBlockManager in cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp of TensorRT-LLM 1.2:
loadOrAllocateBlocks, findMatchingBlock, storeBlocks, releaseBlocks, unpinBlocksById. Of what is
there, the secondary pool, priorities and beams are left out.
"""

import ctypes
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch


class OutOfBlocksError(RuntimeError):
    """No block is free. The capacity scheduler is there to let this never happen."""


@dataclass(eq=False)
class Node:
    tokens: tuple[int, ...]
    block: int
    parent: "Node | None"
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    used: int = 0


class Blocks:
    """Reference counted blocks, and a radix tree over those whose tokens are known.

    A block without references stays in the tree, to be matched, until somebody needs it. The tree
    is keyed by the tokens, and at its root by whatever else is to keep requests apart: the salt.
    """

    def __init__(
        self,
        count: int,
        size: int,
        copy: Callable[[int, int], None],
        partial: bool = True,
        seed: int = 0,
    ) -> None:
        self.size, self.copy, self.partial = size, copy, partial
        self.refs = [0] * count
        self._random = random.Random(seed)
        self._unused = list(range(count))  # no reference, not in the tree
        self._roots: dict[Hashable, Node] = {}
        self._nodes: dict[int, Node] = {}
        self._clock = 0

    @property
    def referenced(self) -> set[int]:
        return {block for block, refs in enumerate(self.refs) if refs}

    def take(self) -> int:
        """Return a block with one reference, evicting the least recently used if need be."""
        if not self._unused:
            free = [node for block, node in self._nodes.items() if not self.refs[block]]
            if not free:
                raise OutOfBlocksError("no free block")
            # A leaf is preferred, as in the eviction policy: a parent is older than its children.
            self._forget(min(free, key=lambda node: (bool(node.children), node.used)))
        # At random: nobody may rely on blocks that lie side by side.
        index = self._random.randrange(len(self._unused))
        self._unused[index], self._unused[-1] = self._unused[-1], self._unused[index]
        block = self._unused.pop()
        self.refs[block] = 1
        return block

    def match(self, tokens: Sequence[int], key: Hashable) -> tuple[list[int], int]:
        """Return referenced blocks that hold a prefix of the prompt, and its length.

        The last token is never matched. A block of which only the beginning fits is copied; even
        without partial reuse that happens where the remainder of the prompt is exactly what a
        partial block holds (findMatchingBlock).
        """
        blocks: list[int] = []
        matched = 0
        node = self._roots.get(key)
        for part in self._chop(tokens[:-1]):
            if node is None:
                break
            child = node.children.get(part)
            if child is not None and len(part) == self.size:
                self._reference(child.block)
                blocks.append(child.block)
                matched += len(part)
                node = child
                self._touch(child)
                continue
            common = len(part)
            if child is None and self.partial:
                found = [(_common(c.tokens, part), c) for c in node.children.values()]
                common, child = max(found, key=lambda pair: pair[0], default=(0, None))
            if child is not None and common:
                blocks.append(self._private(child))
                matched += common
            break
        return blocks, matched

    def extend(self, blocks: list[int], tokens: int) -> None:
        """Append fresh blocks until there is room for `tokens`."""
        while len(blocks) * self.size < tokens:
            blocks.append(self.take())

    def store(
        self,
        tokens: Sequence[int],
        key: Hashable,
        blocks: Sequence[int],
        partial: bool = False,
        pin: bool = False,
    ) -> list[int]:
        """Let the tree hold `blocks` under `tokens`; return the ones that were pinned.

        Where the tree has those tokens already, its own block stays. That block is also the one
        that is pinned, which upstream does in storeBlocks: a duplicate is free to be overwritten.
        """
        node = self._roots.setdefault(key, Node((), -1, None))
        pinned = []
        for part, block in zip(self._chop(tokens), blocks, strict=False):
            if len(part) < self.size and not partial:
                break
            child = node.children.get(part)
            if child is None:
                if block in self._nodes:
                    break  # reused under other tokens; nothing can hang below it
                child = self._nodes[block] = node.children[part] = Node(part, block, node)
            node = child
            self._touch(node)
            if pin:
                self._reference(node.block)
                pinned.append(node.block)
        return pinned

    def pin(self, blocks: Sequence[int]) -> list[int]:
        """Add a reference to each block; `release` takes it away."""
        for block in blocks:
            self._reference(block)
        return list(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] < 0:
                raise RuntimeError(f"block {block} was released twice")
            if not self.refs[block] and block not in self._nodes:
                self._unused.append(block)

    def _private(self, node: Node) -> int:
        """Return a block that starts as the one of `node`, to write on in."""
        if not self.refs[node.block] and not node.children:  # nobody else wants it
            self._forget(node)
            self._unused.remove(node.block)
            self._reference(node.block)
            return node.block
        self._reference(node.block)  # not to be evicted for its own copy
        block = self.take()
        self.copy(node.block, block)
        self.release([node.block])
        return block

    def _reference(self, block: int) -> None:
        self.refs[block] += 1

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock

    def _forget(self, node: Node) -> None:
        """Take `node` and what hangs below it out of the tree."""
        for child in list(node.children.values()):
            self._forget(child)
        if node.parent is not None:
            del node.parent.children[node.tokens]
        del self._nodes[node.block]
        if not self.refs[node.block]:
            self._unused.append(node.block)

    def _chop(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        starts = range(0, len(tokens), self.size)
        return [tuple(tokens[start : start + self.size]) for start in starts]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


# How V2 describes its pools to a connector: connectors/kv_cache_layout.py.


@dataclass(frozen=True)
class KvCacheBufferRef:
    layer_id: int
    role: str
    expansion: int = 1


@dataclass(frozen=True)
class KvCacheRegion:
    base: int
    size: int
    stride: int
    num_slots: int
    buffers: tuple[KvCacheBufferRef, ...]

    def address_of(self, slot_id: int) -> int:
        if not 0 <= slot_id < self.num_slots:
            raise IndexError(slot_id)
        return self.base + self.stride * slot_id

    def as_tensor(self, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """`[num_slots, size // itemsize]`, strided; like the real one it does not own memory."""
        length = self.stride * (self.num_slots - 1) + self.size
        memory = (ctypes.c_char * length).from_address(self.base)
        flat = torch.frombuffer(memory, dtype=dtype)
        shape = (self.num_slots, self.size // dtype.itemsize)
        return flat.as_strided(shape, (self.stride // dtype.itemsize, 1))


@dataclass(frozen=True)
class KvCacheLayerGroupLayout:
    layer_group_id: int
    layer_ids: tuple[int, ...]
    window_size: int | None
    regions: tuple[KvCacheRegion, ...]

    @property
    def bytes_per_page(self) -> int:
        return sum(region.size for region in self.regions)


@dataclass(frozen=True)
class _Layout:
    tokens_per_block: int
    groups: tuple[KvCacheLayerGroupLayout, ...]

    def group(self, layer_group_id: int) -> KvCacheLayerGroupLayout:
        return {group.layer_group_id: group for group in self.groups}[layer_group_id]

    def group_of_layer(self, layer_id: int) -> KvCacheLayerGroupLayout:
        return {layer: group for group in self.groups for layer in group.layer_ids}[layer_id]


@dataclass(frozen=True)
class LayoutWithDtype(_Layout):
    dtype: torch.dtype = torch.uint8

    def as_single_pool_tensor(self) -> torch.Tensor | None:
        if len(self.groups) != 1 or len(self.groups[0].regions) != 1:
            return None
        pool = self.groups[0].regions[0].as_tensor(self.dtype)
        return pool.unflatten(1, (len(self.groups[0].layer_ids), 2, -1))


@dataclass(frozen=True)
class LayoutWithMapping(_Layout):
    gpu_pool_mapping_bytes: int | None = None
