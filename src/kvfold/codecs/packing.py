"""Dense bit packing of 1 to 8 bit codes along the last dimension.

A width that divides a byte (1, 2, 4, 8) is one *plane*. Other widths are the sum of several planes, stored
one after the other, low bits first: 3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2, 7 = 4 + 2 + 1.

A plane of width ``p`` over ``n`` codes is ``m = ceil(n * p / 8)`` bytes. Byte ``i`` holds the codes ``i``,
``i + m``, ``i + 2 m`` ... from its low bits to its high bits ("split packing"; RDKV, packed layout, uses it
for 2 and 4 bits), so that unpacking is a mask and a shift of whole tensors into contiguous pieces, never an
interleave.
"""

import torch
from torch import Tensor

_PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}


def _planes(bits: int) -> tuple[int, ...]:
    if bits not in _PLANES:
        raise ValueError(
            f"bits must be an integer from 1 to 8, got {bits!r}; keep 16-bit values as fp16 instead."
        )
    return _PLANES[bits]


def packed_bytes(n: int, bits: int) -> int:
    """Bytes that `pack` needs for one row of ``n`` codes.

    Parameters
    ----------
    n : int
        Number of codes, >= 0.
    bits : int
        Width of a code, 1 to 8.

    Returns
    -------
    int
        Bytes: the sum over planes of ``ceil(n * plane / 8)``.

    Raises
    ------
    ValueError
        If ``n`` is negative or ``bits`` is not 1 to 8.
    """
    if n < 0:
        raise ValueError(f"n must be the number of codes in a row, >= 0, got {n}.")
    return sum(-(-n * plane // 8) for plane in _planes(bits))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes densely along the last dimension.

    Parameters
    ----------
    codes : Tensor (..., n) uint8
        Codes below ``2 ** bits``. Higher bits are dropped: checking for them would wait for the device.
    bits : int
        Width of a code, 1 to 8.

    Returns
    -------
    Tensor (..., packed_bytes(n, bits)) uint8
        Padding bits are zero.

    Raises
    ------
    ValueError
        If ``codes`` is not uint8 or has no dimension, or ``bits`` is not 1 to 8.
    """
    planes = _planes(bits)
    if codes.dtype != torch.uint8 or codes.dim() == 0:
        raise ValueError(
            f"codes must be uint8 (..., n), got {codes.dtype} {tuple(codes.shape)}; cast them first."
        )
    packed, low = [], 0
    for width in planes:
        packed.append(_pack_plane((codes >> low) & ((1 << width) - 1), width))
        low += width
    return packed[0] if len(packed) == 1 else torch.cat(packed, dim=-1)


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """Recover the codes that `pack` stored.

    Parameters
    ----------
    packed : Tensor (..., packed_bytes(n, bits)) uint8
    bits : int
        Width of a code, 1 to 8.
    n : int
        Number of codes in a row; the packed bytes alone do not tell it.

    Returns
    -------
    Tensor (..., n) uint8

    Raises
    ------
    ValueError
        If the last dimension is not ``packed_bytes(n, bits)`` or the dtype is not uint8.
    """
    planes = _planes(bits)
    if packed.dtype != torch.uint8 or packed.dim() == 0 or packed.shape[-1] != packed_bytes(n, bits):
        raise ValueError(
            f"{n} codes of {bits} bits are uint8 (..., {packed_bytes(n, bits)}), got {packed.dtype} "
            f"{tuple(packed.shape)}; pass the bits and n that were packed."
        )
    pieces = torch.split(packed, [packed_bytes(n, width) for width in planes], dim=-1)
    codes, low = _unpack_plane(pieces[0], planes[0], n, 0), planes[0]
    for piece, width in zip(pieces[1:], planes[1:]):
        codes |= _unpack_plane(piece, width, n, low)
        low += width
    return codes


def _pack_plane(codes: Tensor, width: int) -> Tensor:
    per_byte = 8 // width
    n = codes.shape[-1]
    m = packed_bytes(n, width)
    if per_byte == 1:
        return codes
    padded = torch.nn.functional.pad(codes, (0, m * per_byte - n))
    packed = padded[..., :m].clone()
    for k in range(1, per_byte):
        packed |= padded[..., k * m : (k + 1) * m] << (k * width)
    return packed


def _unpack_plane(packed: Tensor, width: int, n: int, low: int) -> Tensor:
    """Codes of one plane, moved up to bit ``low``."""
    per_byte = 8 // width
    m = packed.shape[-1]
    if per_byte == 1:
        return packed.clone()
    # A plane is a strided slice of each row; elementwise work on short strided rows is several times slower
    # than this copy.
    packed = packed.contiguous()
    mask = ((1 << width) - 1) << low
    pieces = []
    for k in range(per_byte):
        shift = k * width - low
        moved = packed >> shift if shift > 0 else packed << -shift if shift < 0 else packed.clone()
        pieces.append(moved.bitwise_and_(mask))
    codes = torch.cat(pieces, dim=-1)
    return codes if m * per_byte == n else codes[..., :n].contiguous()
