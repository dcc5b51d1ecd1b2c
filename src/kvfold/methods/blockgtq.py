"""Block-GTQ: TurboQuant's codes, with more bits for the RoPE planes in which queries and keys are large."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvfold.allocate.blocks import allocate_blocks
from kvfold.allocate.budget import Budget
from kvfold.codecs.fragments import TILE, WIDTHS
from kvfold.codecs.rotated import RotatedCode
from kvfold.errors import BudgetError, KvfoldError
from kvfold.kernels.transfer import sent
from kvfold.methods.base import LayerView, Method, Needs, check_block
from kvfold.methods.energies import Energies, Energy, Score, without_sinks, worth
from kvfold.methods.keybias import KeyBias, key_constant
from kvfold.stores.base import Store
from kvfold.stores.coded import CodedStore
from kvfold.stores.ragged import channel_dtype
from kvfold.stores.reading import reads_records
from kvfold.stores.recorded import recordable
from kvfold.stores.rotated import RotatedLayout, RotatedStore, coded
from kvfold.stores.tokenwise import padding_of, shifts_of


@dataclass(frozen=True, kw_only=True)
class BlockGTQ(Method):
    """Widths per RoPE block of keys, one width for values; nothing evicted.

    Parameters
    ----------
    bits : float, optional
        Average width of key codes, 1 to 8, metadata not counted: how the paper counts. 3 if no budget is given.
    keep, bits_per_element : float, optional
        Instead of `bits`: share of the prompt's 16-bit bytes, or bits for each element, every byte counted.
    value_bits : int, optional
        Width of value codes; by default `bits`, rounded, or the whole bits of the budget's average.
    norms : "token" or "group"
        One norm for a key, of which each group of equally wide blocks has a fixed share, or one for each group as in the
        paper: more exact, and worth its bytes where norms have 8 bits and groups are few.
    norm_bits : 8 or 16
        Norms as logarithms, in sixteenths of an octave, or as float16 (paper).
    score : "sum" or "product"
        What a block's bits are worth: mean squared query plus mean squared key, halved (paper), or their product, which
        is what the squared error of a logit is proportional to.
    share : "head", "layer" or "model"
        Heads get equal bits (paper), or share a layer's, or the whole model's, which takes `bits` and a `calibration`: its
        energies of every layer are known beforehand.
    widths : tuple of int
        What the width of a key's code may be. (2, 3, 4, 8) and the like suit GPU kernels.
    most_widths : int, optional
        Distinct widths of a head at most, 1 to 4; None: as many as `widths` has (paper).
    tile : int, optional
        Channels, in order of their score, that have one width; at least 2, a block. None: 16, with `widths` of 1, 2, 3, 4 and 8,
        where a GPU decodes such folds from records (docs/performance.md), 2 elsewhere.
    bias : "out", "mean" or "in"
        Take the bias of the model's key projection out of keys before coding, their mean before RoPE, or nothing (paper).
    sinks : int
        First tokens of a sequence kept exact (paper, with buffer: 4). They are far from the mean and draw the most attention.
    recent : int
        Newest tokens of a prompt kept exact (paper, with buffer: 128).
    sampled : int
        Queries, spread evenly over the prompt, that tell the energies.
    calibration : str, optional
        File of energies (`kvfold calibrate blockgtq`) to take instead of the prompt's own.
    rotation : "hadamard" or "haar"
        Randomised Hadamard, or uniformly random as in the paper.
    block_tokens : int
        Generated tokens coded at a time, one block late, by the widths of the prompt before them: while decoding the newest
        `block_tokens` or more, fewer than twice that, are exact. 1 codes each token as soon as the next one has come
        (paper, no buffer), 0 none.

    Notes
    -----
    The rows of a batch share their widths. Channels that RoPE leaves alone, or all where it cannot be told which ones it
    turns, form blocks of two in order of their energy.

    References
    ----------
    Block-GTQ, algorithm 1 and its released allocator; TurboQuant (arXiv 2504.19874).
    """

    name = "blockgtq"
    paper = "after Block-GTQ"
    budgets = ("keep", "bits_per_element", "bits")
    recodes = True

    bits: float | None = None
    keep: float | None = None
    bits_per_element: float | None = None
    value_bits: int | None = None
    norms: Literal["token", "group"] = "group"
    norm_bits: Literal[8, 16] = 8
    score: Score = "product"
    share: Literal["head", "layer", "model"] = "head"
    widths: tuple[int, ...] = tuple(range(1, 9))
    most_widths: int | None = 3
    tile: int | None = None
    bias: KeyBias = "mean"
    sinks: int = 4
    recent: int = 0
    sampled: int = 512
    calibration: str | None = None
    rotation: Literal["hadamard", "haar"] = "hadamard"
    block_tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("bits", "keep", "bits_per_element") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of bits, keep and bits_per_element, got {', '.join(given)}")
        self.budget  # noqa: B018 (raises on a bad budget)
        if self.bits is not None and not 1 <= self.bits <= 8:
            raise ValueError(f"bits must be an average from 1 to 8, got {self.bits!r}")
        if self.value_bits is not None and self.value_bits not in range(1, 9):
            raise ValueError(f"value_bits must be an integer from 1 to 8, got {self.value_bits!r}")
        if not self.widths or any(width not in range(1, 9) for width in self.widths):
            raise ValueError(f"widths must be chosen from 1 to 8, got {self.widths!r}")
        if self.bits is not None and not min(self.widths) <= self.bits <= max(self.widths):
            raise ValueError(f"bits must lie within widths {self.widths}, got {self.bits!r}")
        if self.most_widths is not None and self.most_widths not in range(1, 5):
            raise ValueError(f"most_widths must be from 1 to 4, got {self.most_widths!r}")
        if self.share == "model" and (self.calibration is None or self.budget is not None):
            raise ValueError(
                "share='model' spends one sum of bits over energies of all layers: give bits and calibration"
                " (kvfold calibrate blockgtq), not keep"
            )
        if self.norm_bits not in (8, 16):
            raise ValueError(f"norm_bits must be 8 or 16, got {self.norm_bits!r}")
        if self.tile is not None and (self.tile < 2 or self.tile % 2):
            raise ValueError(f"tile must be an even number of channels, got {self.tile!r}")
        if min(self.recent, self.sinks) < 0 or self.sampled < 1:
            raise ValueError("recent and sinks must not be negative, and sampled at least 1")
        check_block("block_tokens", self.block_tokens)

    @property
    def budget(self) -> Budget | None:
        """The byte budget, if there is one."""
        if self.keep is None and self.bits_per_element is None:
            return None
        return Budget(keep=self.keep, bits_per_element=self.bits_per_element)

    @property
    def needs(self) -> Needs:
        return Needs(sampled=0 if self.calibration else self.sampled, rotary=True)

    @property
    def calibrated_for(self) -> str | None:
        return None if self.calibration is None else self._calibration().fingerprint

    def _calibration(self) -> Energies:
        """Its energies, which must be of keys as they are coded here."""
        assert self.calibration is not None
        energies = Energies.load(self.calibration)
        if energies.bias != self.bias and not (energies.bias == "none" and self.bias != "mean"):
            other = "in" if energies.bias == "none" else energies.bias
            raise KvfoldError(
                f"{self.calibration} is of keys with bias={other!r}, not {self.bias!r}: calibrate with --bias {self.bias},"
                f" or fold with bias={other!r}"
            )
        return energies

    @property
    def shortest(self) -> int:
        return 32 + self.sinks + self.recent

    @property
    def block(self) -> int:
        return self.block_tokens

    def check(self, tokens: int, kv_heads: int, key_dim: int, value_dim: int) -> None:
        if key_dim % self._tile:
            raise KvfoldError(
                f"keys of {key_dim} channels do not divide into tiles of {self._tile}: choose another tile"
            )
        tokens = max(tokens - self.recent, 1)
        narrowest = ((min(self.widths), key_dim),)
        least = tokens * self._token_bytes([narrowest] * kv_heads, self.value_bits or 1, value_dim)
        least += self._constant_bytes(kv_heads, key_dim, value_dim)
        full = 2 * tokens * kv_heads * (key_dim + value_dim)
        if self.budget and self.budget.bytes(tokens, kv_heads, key_dim, value_dim) < least:
            what = (
                f"the budget is smaller than the metadata and the narrowest codes of a {tokens}-token prompt"
            )
            raise BudgetError.of(what, least, full)

    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        self.check_views(views)
        return [self._folded(view) for view in views]

    @property
    def _tile(self) -> int:
        return self.tile or 2

    def _folded(self, view: LayerView) -> Store:
        """With a tile for the layer's device, if none was chosen."""
        widths = tuple(width for width in self.widths if width in WIDTHS)
        if self.tile is None and widths and reads_records(view):
            try:
                store = replace(self, tile=TILE, widths=widths)._encode(view)
            except (KvfoldError, ValueError):  # bits or a budget that finer tiles alone can have
                return self._encode(view)
            if recordable(store.layout):
                return store
        return self._encode(view)

    def _encode(self, view: LayerView) -> RotatedStore:
        tokens = view.tokens if view.generated else view.tokens - self.recent
        lost = view.tokens - tokens
        keys, values = view.keys[:, :, :tokens], view.values[:, :, :tokens]
        shifts, valid = shifts_of(view.positions[:, :tokens]), view.valid[:, :, :tokens]
        sinks = 0 if view.previous is not None else self.sinks
        ordinary = without_sinks(view, sinks)
        constant = key_constant(ordinary, self.bias)
        extra = padding_of(valid)
        if constant is not None:
            extra["key_mean"] = constant
        before = _previous(view)
        if before is None:
            energy = self._energy(ordinary, constant).to_host()
            room = self._room(view, tokens, valid)
            value_code = self._value_code(room, values.shape[-1])
            # While the host chooses the widths of keys.
            extra |= coded("value", values, (value_code,) * values.shape[1], self.norm_bits, extra)
            key_codes, constants = self._calibrate(Energy(*energy.get()), view, room)
        else:
            key_codes, value_code, constants = before
        layout = RotatedLayout(
            tokens=tokens,
            real_tokens=tuple(max(count - lost, 0) for count in view.real_tokens),
            shifts=shifts,
            kv_heads=keys.shape[1],
            key_dim=keys.shape[-1],
            value_dim=values.shape[-1],
            keys=key_codes,
            values=(value_code,) * keys.shape[1],
            turned=constant is not None and view.rotary is not None,
            sinks=sinks,
            norm_bits=self.norm_bits,
        )
        return RotatedStore.encode(keys, values, layout, {**extra, **constants}, view.rotary)

    def recode(self, store: Store, view: LayerView) -> Store:
        # No token is kept exact there, and sinks lie far from the mean.
        bias: KeyBias = "out" if self.bias == "mean" else self.bias
        view = without_sinks(view, 0 if view.previous is not None else self.sinks)
        constant = key_constant(view, bias)
        energy, room = self._energy(view, constant).to_host(), self._room(view, view.tokens, view.valid)
        keys, constants = self._calibrate(Energy(*energy.get()), view, room)
        if constant is not None:
            constants["key_mean"] = constant
        values = (self._value_code(room, view.values.shape[-1]),) * len(keys)
        return CodedStore.of(store, shifts_of(view.positions), keys, values, constants, view.rotary)

    # ---- calibration and allocation ----

    def _energy(self, view: LayerView, constant: Tensor | None) -> Energy:
        """Of the calibration, or of the prompt itself."""
        if self.calibration is not None:
            return self._calibration().layer(view)
        return Energy.of(view, constant)

    def _scores(self, energy: Energy) -> tuple[Tensor, Tensor, Tensor]:
        """A layer's blocks, the energy of keys in them, and what their bits are worth."""
        blocks = energy.blocks(self.score)
        query, key = energy.in_blocks(blocks)
        scores = worth(query, key, self.score)
        # Of nothing but zeros no block is worth more than another.
        return blocks, key, torch.where(scores.amax(1, keepdim=True) > 0, scores, 1)

    def _calibrate(
        self, energy: Energy, view: LayerView, room: _Room
    ) -> tuple[tuple[RotatedCode, ...], dict[str, Tensor]]:
        """Codes of each head's keys, and the constants that go with them; the energy is the host's."""
        rows, heads = view.keys.shape[:2]
        blocks, key, scores = self._scores(energy)
        widths = self._allocate(scores, view, room)
        order = (widths * -1).argsort(dim=-1, stable=True)
        channels = blocks.gather(1, order[..., None].expand_as(blocks)).flatten(1)
        groups = [groups_of(one) for one in widths]
        codes = tuple(RotatedCode(one, norms=self.norms, rotation=self.rotation) for one in groups)
        constants = {
            "key_order": channels.to(channel_dtype(channels.shape[1])).expand(rows, -1, -1).contiguous()
        }
        if self.norms == "token":
            sizes = key.gather(1, order)
            shares = key.new_zeros(heads, max(map(len, groups)))
            for head, one in enumerate(groups):
                parts = sizes[head].split([size // 2 for _, size in one])
                shares[head, : len(one)] = torch.stack([part.sum() for part in parts])
            shares = (shares / shares.sum(-1, keepdim=True).clamp_min(1e-30)).sqrt()
            constants["key_shares"] = shares.half().expand(rows, -1, -1).contiguous()
        return codes, {name: sent(tensor, view.keys.device) for name, tensor in constants.items()}

    def _room(self, view: LayerView, tokens: int, valid: Tensor) -> _Room:
        """What there is for codes: a width for values, and bytes of a token where they are given."""
        heads, key_dim, value_dim = view.keys.shape[1], view.keys.shape[-1], view.values.shape[-1]
        if self.budget is None:
            bits = self.bits if self.bits is not None else 3.0
            return _Room(self.value_bits or max(1, min(8, int(bits + 0.5))), int(bits * (key_dim // 2)))
        real = valid.any(1).sum(1).tolist()
        have = sum(self.budget.bytes(count, heads, key_dim, value_dim) for count in real)
        have -= len(real) * self._constant_bytes(heads, key_dim, value_dim)
        have -= sum(tensor.numel() for tensor in padding_of(valid).values())
        a_token = have // (len(real) * tokens)
        # Of the payload, beside a norm of each key and value.
        average = (8 * a_token / heads - 2 * self.norm_bits) / (key_dim + value_dim)
        value_bits = self.value_bits or max(1, min(8, int(average + 0.5)))
        a_head = 8 * (a_token - self._token_bytes([], value_bits, value_dim, heads)) // heads
        if self.value_bits is None and value_bits > 1 and a_head < 2 * self._least(key_dim // 2):
            value_bits, a_head = value_bits - 1, a_head + value_dim
        return _Room(value_bits, a_head // 2, a_token)

    def _value_code(self, room: _Room, value_dim: int) -> RotatedCode:
        return RotatedCode(((room.value_bits, value_dim),), rotation=self.rotation)

    @property
    def _norm_cost(self) -> int:
        """Of a group's norm, in bits of a block, which are two of the code's."""
        return self.norm_bits // 2 if self.norms == "group" else 0

    def _least(self, blocks: int) -> int:
        """Bits that the blocks of a head need."""
        pairs = self._tile // 2
        return min(self.widths) * blocks + -(-self._norm_cost // pairs) * pairs

    def _allocate(self, scores: Tensor, view: LayerView, room: _Room) -> Tensor:
        """Widths of each head's blocks (kv_heads, blocks)."""
        blocks, value_dim = scores.shape[1], view.values.shape[-1]
        if room.a_token is None:
            if self.share == "model":
                scores, own = self._all_scores(view)
                return self._widths(scores, room.a_head, 0)[own]
            return self._widths(scores, room.a_head, 0)
        norm, least = self._norm_cost, self._least(blocks)
        most = max(self.widths) * blocks + norm * (self.most_widths or 8)
        for total in range(max(min(room.a_head, most), least), least - 1, -1):
            widths = self._widths(scores, total, norm)
            # Groups end at whole bytes, so that a total may be a little too much.
            groups = [groups_of(one) for one in widths]
            if self._token_bytes(groups, room.value_bits, value_dim) <= room.a_token:
                return widths
        if not view.generated:
            raise BudgetError(
                "the budget is smaller than the metadata, 1-bit keys and the values of this prompt, whose padding is"
                " stored too: raise keep, lower value_bits, or fold prompts of one length together"
            )
        return self._widths(scores, least, norm)

    def _all_scores(self, view: LayerView) -> tuple[Tensor, slice]:
        """What bits are worth in all heads of the model, and which of these heads are the view's."""
        layers = self._calibration().layers
        scores = {index: self._scores(energy)[2] for index, energy in layers.items()}
        if len({one.shape[1] for one in scores.values()}) > 1:
            raise KvfoldError("heads of this model differ in width between layers: use share='layer'")
        start = sum(len(one) for index, one in scores.items() if index < view.layer_idx)
        return torch.cat(list(scores.values())), slice(start, start + len(scores[view.layer_idx]))

    def _widths(self, scores: Tensor, total: int, norm: int) -> Tensor:
        return allocate_blocks(
            scores,
            torch.full(scores.shape[:1], total),
            widths=self.widths,
            shared=self.share != "head",
            most_widths=self.most_widths,
            width_cost=norm,
            tile=self._tile // 2,
        )

    # ---- bytes ----

    def _token_bytes(
        self,
        groups: Sequence[tuple[tuple[int, int], ...]],
        value_bits: int,
        value_dim: int,
        heads: int | None = None,
    ) -> int:
        """Bytes of one token: keys with the groups of each head, and as many values (or `heads`)."""
        value = RotatedCode(((value_bits, value_dim),))
        keys = [RotatedCode(one, norms=self.norms) for one in groups]
        count = len(groups) if heads is None else heads
        norm = self.norm_bits // 8
        return sum(code.nbytes + norm * code.scales for code in keys) + count * (value.nbytes + norm)

    def _constant_bytes(self, heads: int, key_dim: int, value_dim: int) -> int:
        """Bytes of a row's constants and sinks, at most."""
        groups = min(self.most_widths or 8, key_dim // self._tile)
        shares, norms = (2 * groups, 1) if self.norms == "token" else (0, groups)
        units = 4 * (norms + 1) if self.norm_bits == 8 else 0
        exact = 2 * self.sinks * (key_dim + value_dim)
        order = key_dim * channel_dtype(key_dim).itemsize
        return heads * (order + 2 * key_dim * (self.bias != "in") + shares + units + exact)


class _Room(NamedTuple):
    value_bits: int
    a_head: int
    """Bits of a head's blocks"""
    a_token: int | None = None
    """Bytes of a token, if there is a budget"""


def groups_of(widths: Tensor) -> tuple[tuple[int, int], ...]:
    """(width, channels) from the widest on, of blocks of two channels."""
    ordered = sorted(widths.tolist(), reverse=True)
    return tuple((width, 2 * len(list(same))) for width, same in groupby(ordered))


def _previous(view: LayerView) -> tuple[tuple[RotatedCode, ...], RotatedCode, dict[str, Tensor]] | None:
    """Codes and constants of the segment before, for a block of generated tokens."""
    if not view.generated or view.previous is None:
        return None
    store, rows = view.previous
    if not isinstance(store, RotatedStore):
        return None
    shared = ("key_order", "key_shares", "key_units", "value_units")
    names: list[str] = [name for name in shared if name in store.buffers]
    constants = {name: store.buffers[name] if rows is None else store.buffers[name][rows] for name in names}
    return store.layout.keys, store.layout.values[0], constants
