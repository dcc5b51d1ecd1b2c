"""Bit packing: exact round trips and exact sizes for every width and length."""

import pytest
import torch

from kvfold.codecs.packing import pack, packed_bytes, unpack

WIDTHS = range(1, 9)


@pytest.mark.parametrize("bits", WIDTHS)
def test_round_trip_for_every_length(bits):
    generator = torch.Generator().manual_seed(bits)
    for n in range(201):
        codes = torch.randint(0, 2**bits, (3, n), dtype=torch.uint8, generator=generator)
        packed = pack(codes, bits)
        assert packed.shape == (3, packed_bytes(n, bits))
        assert packed.dtype == torch.uint8
        assert torch.equal(unpack(packed, bits, n), codes)


def test_size_is_dense():
    for bits in WIDTHS:
        assert packed_bytes(0, bits) == 0
        for n in range(1, 201):
            assert -(-n * bits // 8) <= packed_bytes(n, bits) <= -(-n * bits // 8) + 2
        assert packed_bytes(128, bits) == 16 * bits


@pytest.mark.parametrize("bits", WIDTHS)
def test_leading_shapes(bits):
    for shape in [(7,), (0, 7), (2, 0, 5), (2, 3, 4, 129), (2, 3, 0)]:
        codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8)
        packed = pack(codes, bits)
        assert packed.shape == (*shape[:-1], packed_bytes(shape[-1], bits))
        assert torch.equal(unpack(packed, bits, shape[-1]), codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_padding_bits_are_zero_and_no_input_is_touched(bits):
    for n in (1, 5, 9, 13):
        codes = torch.full((n,), 2**bits - 1, dtype=torch.uint8)
        packed = pack(codes, bits)
        ones = sum(bin(byte).count("1") for byte in packed.tolist())
        assert ones == n * bits
        before = packed.clone()
        unpack(packed, bits, n).zero_()
        assert torch.equal(packed, before)
        assert torch.equal(codes, torch.full((n,), 2**bits - 1, dtype=torch.uint8))


def test_split_order():
    assert pack(torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8), 4).tolist() == [1 | 4 << 4, 2 | 5 << 4, 3]
    assert pack(torch.tensor([3, 1, 0, 2, 1], dtype=torch.uint8), 2).tolist() == [
        3 | 0 << 2 | 1 << 4,
        1 | 2 << 2,
    ]
    # Three bits: the low two first, then the third.
    assert pack(torch.tensor([5, 2], dtype=torch.uint8), 3).tolist() == [1 | 2 << 2, 1 | 0 << 1]


def test_non_contiguous_codes():
    codes = torch.randint(0, 8, (6, 10), dtype=torch.uint8).T
    assert torch.equal(unpack(pack(codes, 3), 3, 6), codes)


def test_surplus_bits_do_not_reach_neighbours():
    assert pack(torch.tensor([0xFF, 0], dtype=torch.uint8), 4).tolist() == [0x0F]


@pytest.mark.parametrize("bits", [0, 9, 16, -1, 2.5])
def test_bad_bits(bits):
    with pytest.raises(ValueError, match="1 to 8"):
        pack(torch.zeros(4, dtype=torch.uint8), bits)


def test_bad_tensors():
    with pytest.raises(ValueError, match="uint8"):
        pack(torch.zeros(4), 4)
    with pytest.raises(ValueError, match="uint8"):
        pack(torch.tensor(1, dtype=torch.uint8), 4)
    with pytest.raises(ValueError, match="n that were packed"):
        unpack(torch.zeros(3, dtype=torch.uint8), 4, 8)
    with pytest.raises(ValueError, match=">= 0"):
        packed_bytes(-1, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_same_bytes_on_a_gpu():
    for bits in WIDTHS:
        for n in (1, 77, 128):
            codes = torch.randint(0, 2**bits, (3, n), dtype=torch.uint8)
            packed = pack(codes.cuda(), bits)
            assert torch.equal(packed.cpu(), pack(codes, bits))
            assert torch.equal(unpack(packed, bits, n).cpu(), codes)
