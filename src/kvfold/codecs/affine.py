"""Asymmetric uniform quantiser with its minimum stored, not an integer zero point.

RDKV (and KIVI before it) store ``zp = round(clamp(-min / scale, 0, 2^b - 1))``. A vector whose values all
have one sign saturates there: mean 10, std 1 loses more than dropping the vector does, at every width. Here
the minimum itself is stored, so an offset costs nothing but the rounding of one number.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Affine(NamedTuple):
    """A quantised tensor: ``x[i] ~ codes[i] * scale[g] + minimum[g]`` with ``g = i // group``."""

    codes: Tensor
    """(..., n) uint8, below ``2 ** bits``."""
    scale: Tensor
    """(..., n_groups) in the meta dtype, >= 0; zero for a constant group."""
    minimum: Tensor
    """(..., n_groups) in the meta dtype."""


def quantise(
    x: Tensor,
    bits: int,
    group: int | None = None,
    meta_dtype: torch.dtype = torch.float16,
    clip: Literal["minmax", "mse"] = "minmax",
) -> Affine:
    """Quantise groups of the last dimension uniformly between their extremes.

    Scale and minimum are rounded to ``meta_dtype`` before any code is computed, so that `dequantise` uses
    exactly what is stored. With ``clip="minmax"`` no element is further than half a scale from its
    reconstruction, whatever its offset.

    Parameters
    ----------
    x : Tensor (..., n)
        Any floating dtype; arithmetic is float32. To quantise keys per channel, transpose so that tokens come
        last.
    bits : int
        Width of a code, 1 to 8.
    group : int, optional
        Consecutive elements that share one scale and minimum; the last group may be shorter. None: the whole
        row.
    meta_dtype : torch.dtype
        float16 (finer, up to 65504), bfloat16 (coarser, any range) or float32.
    clip : "minmax" or "mse"
        "mse" tries several shrunken ranges and keeps, for each group, the one with the least squared error.
        It pays at 2 and 3 bits and costs about eleven times the arithmetic; memory does not grow with the
        number tried.

    Returns
    -------
    Affine
        codes uint8 (..., n), scale and minimum (..., n_groups) in ``meta_dtype``.

    Raises
    ------
    ValueError
        If an option is out of range, ``x`` holds NaN or infinity, or ``meta_dtype`` cannot hold the range of
        ``x``.

    References
    ----------
    RDKV, quantiser of keys (per channel over tokens) and values (per token over channels).
    """
    if bits not in range(1, 9):
        raise ValueError(f"bits must be an integer from 1 to 8, got {bits!r}.")
    if not x.is_floating_point() or x.dim() == 0:
        raise ValueError(f"x must be a floating tensor (..., n), got {x.dtype} {tuple(x.shape)}.")
    if group is not None and group < 1:
        raise ValueError(
            f"group must be at least 1 element, got {group}; None makes one group of the whole row."
        )
    if meta_dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"meta_dtype must be float16, bfloat16 or float32, got {meta_dtype}.")
    if clip not in ("minmax", "mse"):
        raise ValueError(f"clip must be 'minmax' or 'mse', got {clip!r}.")

    n = x.shape[-1]
    group = min(n, group or n)
    if x.numel() == 0:
        n_groups = -(-n // group) if n else 0
        empty = x.new_zeros((*x.shape[:-1], n_groups), dtype=meta_dtype)
        return Affine(torch.empty_like(x, dtype=torch.uint8), empty, empty.clone())
    whole = n - n % group
    parts = [_quantise_groups(torch.unflatten(x[..., :whole], -1, (-1, group)), bits, meta_dtype, clip)]
    if whole < n:
        parts.append(_quantise_groups(x[..., whole:].unsqueeze(-2), bits, meta_dtype, clip))
    out = parts[0] if len(parts) == 1 else Affine(*(torch.cat(field, dim=-1) for field in zip(*parts)))
    # One wait for the device: NaN and infinity in x always reach the stored numbers.
    if not (torch.isfinite(out.scale) & torch.isfinite(out.minimum)).all():
        if torch.isfinite(x).all():
            raise ValueError(f"x ranges beyond {meta_dtype}; use meta_dtype=torch.bfloat16 (or float32).")
        raise ValueError("x holds NaN or infinity; remove padding or masked positions before quantising.")
    return out


def dequantise(codes: Tensor, scale: Tensor, minimum: Tensor, group: int | None = None) -> Tensor:
    """Reconstruct ``codes * scale + minimum``.

    Parameters
    ----------
    codes : Tensor (..., n) uint8
    scale, minimum : Tensor (..., n_groups)
    group : int, optional
        As given to `quantise`.

    Returns
    -------
    Tensor (..., n) float32

    Raises
    ------
    ValueError
        If ``n_groups`` does not fit ``n`` and ``group``.
    """
    n = codes.shape[-1]
    group = min(n, group or n)
    n_groups = -(-n // group) if n else 0
    if scale.shape[-1] != n_groups or minimum.shape[-1] != n_groups:
        raise ValueError(
            f"{n} codes in groups of {group} have {n_groups} scales and minima, got {scale.shape[-1]} and "
            f"{minimum.shape[-1]}; pass the group that was quantised."
        )
    scale, minimum = scale.float(), minimum.float()
    if n_groups > 1:
        scale = scale.repeat_interleave(group, dim=-1)[..., :n]
        minimum = minimum.repeat_interleave(group, dim=-1)[..., :n]
    elif n_groups == 0:
        return codes.float()
    return torch.addcmul(minimum, codes.float(), scale)


def narrow_dtype(bits: int, *states: Tensor) -> torch.dtype:
    """float16, or bfloat16 where it is too narrow for the states, or for scales of their codes of that width."""
    largest = max((float(x.abs().max()) for x in states if x.numel()), default=0.0)
    # One bit has a single step, the whole range.
    return (
        torch.bfloat16
        if largest * max(1, 2 / (2**bits - 1)) > torch.finfo(torch.float16).max
        else torch.float16
    )


def nmse(x: Tensor, xhat: Tensor, centred: bool = True) -> Tensor:
    """Squared error of each vector over its variance (or its energy).

    Parameters
    ----------
    x, xhat : Tensor (..., n)
        The vectors and their reconstructions.
    centred : bool
        True: divide by ``sum((x - mean)^2)``, as RDKV's distortion tables do per channel and per token.
        False: divide by ``sum(x^2)``. The two scales differ for vectors with an offset; do not mix them.

    Returns
    -------
    Tensor (...) float32
        0 is perfect. A vector without energy gives 0 if reconstructed exactly, else infinity.
    """
    x, xhat = x.float(), xhat.float()
    error = (x - xhat).square().sum(-1)
    energy = (x - x.mean(-1, keepdim=True) if centred else x).square().sum(-1)
    return torch.where(error == 0, error, error / energy)


def _quantise_groups(x: Tensor, bits: int, meta_dtype: torch.dtype, clip: str) -> Affine:
    """`quantise` for x (..., n_groups, group), one scale for each group; codes come back as (..., n)."""
    x = x.float()
    low, high = x.amin(-1), x.amax(-1)
    scale, minimum = _meta(low, high, bits, meta_dtype)
    if clip == "mse":
        least = _squared_error(x, scale, minimum, bits)
        # The best range of a long Gaussian vector is 0.2 of its extremes at 1 bit, 0.37 at 2, 0.6 at 4 and
        # 0.93 at 8: the wider the code, the closer to 1 the search and the finer its steps.
        span = 0.85 * 2.0 ** (-(bits - 1) / 2.5)
        centre, half = (low + high) / 2, (high - low) / 2
        for step in range(1, 12):
            reach = half * (1 - span * step / 11)
            trial_scale, trial_minimum = _meta(centre - reach, centre + reach, bits, meta_dtype)
            error = _squared_error(x, trial_scale, trial_minimum, bits)
            better = error < least
            least = torch.where(better, error, least)
            scale = torch.where(better, trial_scale, scale)
            minimum = torch.where(better, trial_minimum, minimum)
    codes = _codes(x, scale, minimum, bits).to(torch.uint8)
    return Affine(codes.flatten(-2), scale, minimum)


def _meta(low: Tensor, high: Tensor, bits: int, meta_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale and minimum in the meta dtype that reach from ``low`` to within half a scale of ``high``."""
    levels = 2**bits - 1
    minimum = low.to(meta_dtype)
    # With a large offset, a minimum rounded up would clip the smallest elements by more than half a scale.
    minimum = torch.where(minimum.float() > low, _next(minimum, down=True), minimum)
    reach = high - minimum.float()
    scale = (reach / levels).to(meta_dtype)
    scale = torch.where(scale.float() * (levels + 0.5) < reach, _next(scale, down=False), scale)
    return scale, minimum


def _next(x: Tensor, down: bool) -> Tensor:
    """The neighbouring value in the dtype of x (torch.nextafter lacks float16)."""
    if x.dtype == torch.float32:
        return torch.nextafter(x, torch.full_like(x, -torch.inf if down else torch.inf))
    raw = x.view(torch.int16).int()
    # Order of sign-magnitude floats as integers, and back.
    order = torch.where(raw < 0, -(raw & 0x7FFF), raw) + (-1 if down else 1)
    return torch.where(order < 0, -order | -0x8000, order).to(torch.int16).view(x.dtype)


def _codes(x: Tensor, scale: Tensor, minimum: Tensor, bits: int) -> Tensor:
    scale, minimum = scale.float().unsqueeze(-1), minimum.float().unsqueeze(-1)
    # A constant group has scale 0 and x == minimum: 0 / 1 instead of 0 / 0.
    return ((x - minimum) / scale.masked_fill(scale == 0, 1)).round_().clamp_(0, 2**bits - 1)


def _squared_error(x: Tensor, scale: Tensor, minimum: Tensor, bits: int) -> Tensor:
    restored = torch.addcmul(
        minimum.float().unsqueeze(-1), _codes(x, scale, minimum, bits), scale.float().unsqueeze(-1)
    )
    return restored.sub_(x).square_().sum(-1)
