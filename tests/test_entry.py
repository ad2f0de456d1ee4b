"""An entry's bytes give its states back, or an error: never other states."""

import json
import struct
import zlib

import pytest
import torch
from kvhub.exporters.entry import DTYPES, decode, encode

from kvhub.errors import UsageError, VerificationError

KEY, HEADS = "0123456789abcdef" * 2, (2, 5)


def random_states(dtype=torch.bfloat16, shape=(2, 2, 3, 4, 8)):
    # Every bit pattern, so that NaNs, infinities and negative zeros are among them.
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).view(shape)


def joined(states, key=KEY, heads=HEADS):
    return bytearray(b"".join(encode(states, key, heads)))


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(2, 2, 3, 4, 8), (1, 2, 3, 1, 1), (3, 2, 3, 32, 7)])
def test_states_come_back_bit_by_bit(name, shape):
    states = random_states(DTYPES[name], shape)
    found = decode(joined(states), KEY)
    assert (found.dtype, found.shape) == (states.dtype, states.shape)
    assert bits(found) == bits(states)


def test_nothing_is_copied():
    states = random_states()
    header, payload = encode(states, KEY, HEADS)
    assert len(header) % 64 == 0
    states.view(torch.uint8)[0, 0, 0, 0, 0] ^= 1
    assert bytes(payload) == bytes(bits(states))
    buffer = joined(states)
    found = decode(memoryview(buffer), KEY)
    found.zero_()
    assert not any(buffer[-states.nbytes :])


def test_what_cannot_be_written_to_is_copied():
    states = random_states()
    buffer = bytes(joined(states))
    decode(buffer, KEY).zero_()
    assert bits(decode(buffer, KEY)) == bits(states)


def test_a_changed_byte_is_found_wherever_it_is():
    buffer = joined(random_states())
    for position in range(len(buffer)):
        for change in (1, 0x80, 0xFF):
            buffer[position] ^= change
            with pytest.raises(VerificationError, match="expected"):
                decode(buffer, KEY)
            buffer[position] ^= change
    decode(buffer, KEY)


def test_missing_and_additional_bytes_are_found():
    buffer = joined(random_states())
    for length in range(len(buffer)):
        with pytest.raises(VerificationError, match="expected"):
            decode(buffer[:length], KEY)
    with pytest.raises(VerificationError, match="expected as many bytes as bfloat16"):
        decode(buffer + b"\0", KEY)
    with pytest.raises(VerificationError, match="expected"):
        decode(bytes(len(buffer)), KEY)


def test_another_entry_is_refused():
    with pytest.raises(VerificationError, match=f"expected key {'f' * 32}, found {KEY}") as caught:
        decode(joined(random_states()), "f" * 32)
    assert caught.value.hint


def forged(states, **changes):
    """An entry whose checksums hold, with another header."""
    crc = zlib.crc32(bytes(bits(states)))
    about = {"key": KEY, "dtype": "bfloat16", "shape": list(states.shape), "heads": [2, 5]}
    about = {name: value for name, value in {**about, "crc32": crc, **changes}.items() if value}
    text = json.dumps(about).encode()
    header = struct.pack("<8sII", b"kvhub-kv", 1, len(text)) + text
    return header + struct.pack("<I", zlib.crc32(header)) + bytes(bits(states))


def test_a_header_with_right_checksums_has_to_fit_too():
    states = random_states()
    assert bits(decode(forged(states), KEY)) == bits(states)
    wrong = [
        *({name: None} for name in ("key", "dtype", "shape", "heads", "crc32")),
        *({"dtype": "float32"}, {"dtype": "int8"}, {"dtype": ["bfloat16"]}, {"crc32": "x"}),
        *({"shape": [2, 2, 3, 4, 9]}, {"shape": [2, 2, 3, 32]}, {"shape": [-2, 2, 3, -4, 8]}),
        *({"shape": [4, 1, 3, 4, 8]}, {"shape": {"2": 1}}, {"shape": "22348"}, {"shape": 5}),
        *({"heads": [0, 2]}, {"heads": [-1, 2]}, {"heads": [3]}, {"heads": "25"}, {"heads": 1}),
    ]
    for change in wrong:
        with pytest.raises(VerificationError):
            decode(forged(states, **change), KEY)


@pytest.mark.parametrize(
    ("states", "heads"),
    [
        (random_states(shape=(2, 2, 3, 4)), (0, 3)),
        (random_states(shape=(2, 3, 3, 4, 8)), (0, 3)),
        (random_states(shape=(2, 2, 3, 0, 8)), (0, 3)),
        (random_states(), (0, 2)),
        (random_states(), (-1, 2)),
        (random_states().transpose(0, 1), (0, 3)),
        (torch.zeros(2, 2, 3, 4, 8, dtype=torch.int64), (0, 3)),
        (torch.zeros(2, 2, 3, 4, 8, device="meta"), (0, 3)),
    ],
)
def test_what_is_no_chunk_is_not_encoded(states, heads):
    with pytest.raises(UsageError, match="must be contiguous"):
        encode(states, KEY, heads)


def test_states_that_require_grad_are_encoded():
    states = torch.ones(1, 2, 1, 2, 4, requires_grad=True)
    assert torch.equal(decode(joined(states, heads=(0, 1)), KEY), states)
