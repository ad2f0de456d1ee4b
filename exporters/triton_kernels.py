"""The map as two Triton kernels: source blocks to dense scratch, scratch to target blocks.

`gather` is bound by memory: it reads every chosen source layer once, takes RoPE off the keys and
writes them densely. `multiply` reads that scratch for each target layer that chose it, through
tensor descriptors (TMA), and ends with bias, RoPE and the target's blocks in one pass. Stripping
inside the product would be repeated for every target layer and every tile of outputs.

`cells` hold where a token lies in its pool: block * block stride + slot * slot stride, in numbers
and not bytes. Strides are constants of a pool, so one compilation serves all of its contexts.
Rotating is shared by pairs of dims, `first` and `second`, whichever dims these are in a model.

For Triton 3.5 to 3.9: descriptors and plain pointers only, no block pointers.
"""

import triton
import triton.language as tl

__all__ = ["gather", "multiply"]


@triton.jit
def _rotate(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _dims(pair, side, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr):
    """The dims of each pair, unless interleaved: (i, i + ROTARY_DIM / 2), and so on for the rest.

    Pairs behind the rotating ones hold the dims that pass, halved in the same way.
    """
    half: tl.constexpr = ROTARY_DIM // 2
    # Not tl.where: Triton would lose sight of which dims lie together.
    behind = (pair >= half).to(tl.int32)
    return pair + behind * half + side * (half + behind * (HEAD_DIM // 2 - ROTARY_DIM))


@triton.jit(do_not_specialize=["tokens", "scratch_rows"])
def gather(
    pool,
    cells,
    layers,
    cos,
    sin,
    scratch,
    tokens,
    scratch_rows,
    LAYER_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STRIP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Copy one source layer of some tokens into scratch, keys without their rotation.

    Programs are (blocks of tokens, slots of scratch).

    Parameters
    ----------
    pool
        The source's keys or values, any floating dtype.
    cells
        `[tokens]` int64.
    layers
        `[slots]` int32: the source layer of each slot.
    cos, sin
        `[tokens, HEAD_DIM / 2]` float32: of the stripping rotation, 1 and 0 for dims that pass.
        Not read if not STRIP.
    scratch
        `[slots, scratch_rows, HEADS * HEAD_DIM]`; rows from `tokens` on are left as they are.
    """
    slot = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = (token < tokens)[:, None]
    cell = tl.multiple_of(tl.load(cells + token, mask=token < tokens, other=0), 8)[:, None]
    source = pool + tl.load(layers + slot).to(tl.int64) * LAYER_STRIDE + cell
    row = slot.to(tl.int64) * scratch_rows + token.to(tl.int64)
    target = scratch + (row * (HEADS * HEAD_DIM))[:, None]
    dtype = scratch.dtype.element_ty
    dim = tl.arange(0, HEAD_DIM)[None, :]
    pair = tl.arange(0, HEAD_DIM // 2)[None, :]
    first_dim = _dims(pair, 0, HEAD_DIM, ROTARY_DIM)
    second_dim = _dims(pair, 1, HEAD_DIM, ROTARY_DIM)
    if STRIP:
        angle = token[:, None] * (HEAD_DIM // 2) + pair
        turn_cos = tl.load(cos + angle, mask=inside, other=0.0)
        turn_sin = tl.load(sin + angle, mask=inside, other=0.0)
    for head in range(HEADS):
        read = source + head * HEAD_STRIDE
        write = target + head * HEAD_DIM
        if STRIP and not INTERLEAVED:
            first = tl.load(read + first_dim, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(read + second_dim, mask=inside, other=0.0).to(tl.float32)
            first, second = _rotate(first, second, turn_cos, turn_sin)
            tl.store(write + first_dim, first.to(dtype), mask=inside)
            tl.store(write + second_dim, second.to(dtype), mask=inside)
        else:
            states = tl.load(read + dim, mask=inside, other=0.0).to(tl.float32)
            if STRIP:
                first, second = tl.split(tl.reshape(states, (BLOCK_TOKENS, HEAD_DIM // 2, 2)))
                first, second = _rotate(first, second, turn_cos, turn_sin)
                states = tl.reshape(tl.join(first, second), (BLOCK_TOKENS, HEAD_DIM))
            tl.store(write + dim, states.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["tokens", "scratch_rows"])
def multiply(
    scratch,
    weights,
    biases,
    slots,
    cells,
    cos,
    sin,
    pool,
    flag,
    tokens,
    scratch_rows,
    LAYER_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    LAYER_FEATURES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    APPLY: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):
    """Multiply a group's features of some tokens with a target layer's weights, into its blocks.

    Programs are (blocks of tokens, groups and blocks of outputs, target layers). Sums are float32.
    BLOCK_OUTPUTS is a multiple of HEAD_DIM, BLOCK_FEATURES divides LAYER_FEATURES.

    Parameters
    ----------
    scratch
        Descriptor of `[slots * scratch_rows, groups * LAYER_FEATURES]`, boxes of BLOCK_TOKENS x
        BLOCK_FEATURES.
    weights
        Descriptor of `[target_layers * GROUPS * TOP_K * LAYER_FEATURES, OUTPUTS]`, boxes of
        BLOCK_FEATURES x BLOCK_OUTPUTS. If APPLY, outputs 2p and 2p + 1 of a head are its pair p:
        a rotation then meets both in one thread.
    biases
        `[target_layers, GROUPS, OUTPUTS]` float32, outputs as in the weights.
    slots
        `[target_layers, ceil(TOP_K / 8)]` int64, a byte for the slot of each chosen layer, the
        first lowest: a load inside the loop would take stages from its pipeline.
    cells, tokens
        As for `gather`, of the target's pool.
    cos, sin
        `[tokens, HEAD_DIM / 2]` float32 of the target's rotation. Not read if not APPLY.
    pool
        The target's keys or values.
    flag
        `[1]` int32: set to 1 if a result of a token is beyond LIMIT or not a number.
    """
    blocks: tl.constexpr = (OUTPUTS + BLOCK_OUTPUTS - 1) // BLOCK_OUTPUTS
    steps: tl.constexpr = LAYER_FEATURES // BLOCK_FEATURES
    parts: tl.constexpr = (TOP_K + 7) // 8
    first_token = tl.program_id(0) * BLOCK_TOKENS
    group = tl.program_id(1) // blocks
    first_output = tl.program_id(1) % blocks * BLOCK_OUTPUTS
    layer = tl.program_id(2)
    weight_row = (layer * GROUPS + group) * (TOP_K * LAYER_FEATURES)
    sums = tl.zeros((BLOCK_TOKENS, BLOCK_OUTPUTS), dtype=tl.float32)
    for part in tl.static_range(parts):
        packed = tl.load(slots + layer * parts + part)
        for step in range(min(8, TOP_K - 8 * part) * steps):
            slot = ((packed >> (step // steps * 8)) & 255).to(tl.int32)
            column = group * LAYER_FEATURES + step % steps * BLOCK_FEATURES
            features = scratch.load([slot * scratch_rows + first_token, column])
            weight = weights.load(
                [weight_row + (8 * part * steps + step) * BLOCK_FEATURES, first_output]
            )
            sums = tl.dot(features, weight, sums)

    output = first_output + tl.arange(0, BLOCK_OUTPUTS)
    bias = biases + (layer * GROUPS + group) * OUTPUTS + output
    sums += tl.load(bias, mask=output < OUTPUTS, other=0.0)[None, :]
    token = first_token + tl.arange(0, BLOCK_TOKENS)
    inside = (token < tokens)[:, None]
    # Before the rotation and one dim after the other: later or at once, registers would not do.
    beyond = (inside & ~(tl.abs(sums) <= LIMIT)).to(tl.int32)
    if tl.max(tl.max(beyond, 1), 0) > 0:
        tl.store(flag, 1)

    cell = tl.multiple_of(tl.load(cells + token, mask=token < tokens, other=0), 8)[:, None]
    first_head = (group * OUTPUTS + first_output) // HEAD_DIM
    target = pool + layer.to(tl.int64) * LAYER_STRIDE + first_head * HEAD_STRIDE + cell
    dtype = pool.dtype.element_ty
    if APPLY:
        # By head, so that all heads of a token share one set of cos and sin: two would not fit.
        heads: tl.constexpr = BLOCK_OUTPUTS // HEAD_DIM
        half: tl.constexpr = HEAD_DIM // 2
        angle = token[:, None] * half + tl.arange(0, half)[None, :]
        turn_cos = tl.load(cos + angle, mask=inside, other=0.0)[:, None, :]
        turn_sin = tl.load(sin + angle, mask=inside, other=0.0)[:, None, :]
        first, second = tl.split(tl.reshape(sums, (BLOCK_TOKENS, heads, half, 2)))
        first, second = _rotate(first, second, turn_cos, turn_sin)
        sums = tl.reshape(tl.join(first, second), (BLOCK_TOKENS, BLOCK_OUTPUTS))
    if APPLY and not INTERLEAVED:
        head = tl.arange(0, heads)[None, :, None, None]
        pair = tl.arange(0, half)[None, None, :, None]
        side = tl.arange(0, 2)[None, None, None, :]
        dim = _dims(pair, side, HEAD_DIM, ROTARY_DIM)
        tl.store(
            target[:, :, None, None] + head * HEAD_STRIDE + dim,
            tl.join(first, second).to(dtype),
            mask=inside[:, :, None, None] & (first_output // HEAD_DIM + head < OUTPUTS // HEAD_DIM),
        )
    else:
        place = tl.arange(0, BLOCK_OUTPUTS)
        place = place // HEAD_DIM * HEAD_STRIDE + place % HEAD_DIM
        tl.store(target + place[None, :], sums.to(dtype), mask=inside & (output < OUTPUTS)[None, :])
