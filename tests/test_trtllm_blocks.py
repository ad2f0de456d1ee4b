"""The blocks of the stand-in engine: who holds them, what is matched, what is evicted."""

import itertools

import pytest
from trtllm_blocks import Blocks, OutOfBlocksError


def test_blocks_run_out_and_are_evicted():
    blocks = Blocks(4, 2, copy=lambda source, target: None)
    own, _ = blocks.match([1, 2, 3, 4, 5], None)
    blocks.extend(own, 6)
    blocks.store([1, 2, 3, 4], None, own)
    blocks.release(own)
    assert not blocks.referenced
    taken = list(itertools.islice(iter(blocks.take, None), 3))
    assert blocks.match([1, 2, 3, 4, 5], None) == (own[:1], 2)  # the leaf went first
    with pytest.raises(OutOfBlocksError):
        blocks.take()
    blocks.release(taken)
    with pytest.raises(RuntimeError, match="twice"):
        blocks.release(taken)


def test_a_block_of_which_a_part_fits_is_copied_unless_nobody_needs_it():
    copies = []
    blocks = Blocks(6, 4, copy=lambda source, target: copies.append((source, target)))
    own, _ = blocks.match([1, 2, 3, 4, 5, 6, 7], "salt")
    blocks.extend(own, 8)
    blocks.store([1, 2, 3, 4, 5, 6], "salt", own, partial=True)
    assert blocks.match([1, 2, 3, 4, 5, 6, 7], None) == ([], 0)
    copied, count = blocks.match([1, 2, 3, 4, 5, 9, 9], "salt")
    assert (copied[0], count) == (own[0], 5)
    assert copies == [(own[1], copied[1])]
    blocks.release(own)
    blocks.release(copied)
    assert blocks.match([1, 2, 3, 4, 5, 6, 7], "salt") == (own, 6)
    assert len(copies) == 1
    exact = Blocks(6, 4, copy=lambda source, target: None, partial=False)
    own, _ = exact.match([1, 2, 3, 4, 5, 6], None)
    exact.extend(own, 6)
    exact.store([1, 2, 3, 4, 5], None, own, partial=True)
    assert exact.match([1, 2, 3, 4, 5, 6, 7], None) == (own[:1], 4)
    assert exact.match([1, 2, 3, 4, 5, 6], None)[1] == 5  # what is left is all that a block has
