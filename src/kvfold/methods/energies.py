"""Block energies: how large queries and keys are in each plane that RoPE turns. What Block-GTQ's widths follow from.

A plane's energy is the same before and after RoPE, so that positions do not matter to it. Measured once on any text
(`kvfold calibrate blockgtq`), it serves every prompt of a model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.kernels.position_bias import planes
from kvfold.kernels.transfer import OnHost, sent
from kvfold.methods.base import LayerView, Method, Needs
from kvfold.methods.full import Full
from kvfold.methods.keybias import KeyBias, key_constant
from kvfold.methods.scores import key_energy, sampled_energy
from kvfold.stores.base import Rotary, Store

Score = Literal["sum", "product"]
"""What a block's bits are worth: (E|q|^2 + E|k|^2) / 2 (paper), or E|q|^2 E|k|^2 (a logit's squared error)."""
KIND = "kvfold block energies 1"


@dataclass(frozen=True)
class Energy:
    """Of one layer.

    Attributes
    ----------
    query : (kv_heads, key_dim) float32
        Mean squared channel over tokens and the KV head's query heads: squared first, then averaged.
    key : (kv_heads, key_dim) float32
        Mean squared channel over tokens, of what is coded.
    partner : (key_dim,) int64
        The other channel of each channel's plane; its own where RoPE leaves it alone.
    """

    query: Tensor
    key: Tensor
    partner: Tensor

    @classmethod
    def of(cls, view: LayerView, constant: Tensor | None) -> Energy:
        """From a view with sampled queries, and what is taken from its keys before coding (see `key_energy`)."""
        partner = partner_of(view.rotary, view.keys.shape[-1], view.keys.device)
        return cls(sampled_energy(view).mean(0), key_energy(view, constant).mean(0), partner)

    def blocks(self, score: Score) -> Tensor:
        """The two channels of each block of a head, (kv_heads, blocks, 2) int64.

        Channels that RoPE leaves alone form blocks in order of what they are worth.
        """
        heads, dim = self.key.shape
        channel = torch.arange(dim, device=self.partner.device)
        first = channel[channel < self.partner]
        turned = torch.stack([first, self.partner[first]], -1).expand(heads, -1, -1)
        alone = channel[channel == self.partner]
        order = worth(self.query, self.key, score)[:, alone].argsort(dim=-1, descending=True, stable=True)
        return torch.cat([turned, alone[order].view(heads, -1, 2)], 1)

    def in_blocks(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Energy of queries and of keys in each block, (kv_heads, blocks) each."""
        query, key = (
            energy.gather(1, blocks.flatten(1)).view_as(blocks).sum(-1) for energy in (self.query, self.key)
        )
        return query, key

    def to(self, device: torch.device) -> Energy:
        """On another device."""
        return Energy(self.query.to(device), self.key.to(device), self.partner.to(device))

    def to_host(self) -> OnHost:
        """Its tensors on their way to the host: little numbers, and choices that it must know."""
        return OnHost(self.query, self.key, self.partner)


def worth(query: Tensor, key: Tensor, score: Score) -> Tensor:
    """What bits are worth where queries and keys have these energies."""
    query, key = query.double(), key.double()  # products of float32 may be none
    return query * key if score == "product" else (query + key) / 2


def partner_of(rotary: Rotary | None, dim: int, device: torch.device) -> Tensor:
    """`Energy.partner` of a rotary embedding; every channel alone where it cannot be told which planes it turns."""
    found = planes(rotary, dim, device) if rotary is not None else None
    return torch.arange(dim, device=device) if found is None else sent(torch.tensor(found), device)


def without_sinks(view: LayerView, sinks: int) -> LayerView:
    """The view with the first real tokens of each row marked invalid: their keys lie far from all others."""
    first = view.tokens - sent(torch.tensor(view.real_tokens), view.keys.device) + sinks
    index = torch.arange(view.tokens, device=view.keys.device)
    return replace(view, valid=view.valid & (index >= first[:, None])[:, None])


@dataclass(frozen=True)
class Energies:
    """Of a whole model.

    Attributes
    ----------
    layers : mapping of int to Energy
        By layer index: those that fold.
    fingerprint : str
        Of the model (`kvfold.hf.fingerprint`).
    bias : "out", "mean", "in" or "none"
        What was taken from the keys (see `kvfold.methods.keybias`); "none" where the model has no key bias, so that
        "out" and "in" are the same.
    text : str
        Name of the text.
    tokens : int
    kvfold : str
        Version that measured.
    """

    layers: Mapping[int, Energy]
    fingerprint: str
    bias: str
    text: str
    tokens: int
    kvfold: str

    def to_bytes(self) -> bytes:
        """The content of a safetensors file."""
        tensors = {
            f"{index}.{name}": tensor.cpu().contiguous()
            for index, energy in self.layers.items()
            for name, tensor in vars(energy).items()
        }
        facts = ("fingerprint", "bias", "text", "tokens", "kvfold")
        return save(tensors, {"kind": KIND, **{name: str(getattr(self, name)) for name in facts}})

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Energies:
        """Read a file that `kvfold calibrate blockgtq` wrote.

        Raises
        ------
        KvfoldError
            It cannot be read, or is not such a file.
        """
        make = "make one with: kvfold calibrate blockgtq MODEL --text FILE -o energies.safetensors"
        try:
            with safe_open(Path(path).expanduser(), "pt") as file:
                facts = file.metadata() or {}
                if facts.get("kind") != KIND:
                    raise KvfoldError(f"{path} holds no block energies; {make}")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return Energies(
                _layers(tensors),
                facts["fingerprint"],
                facts["bias"],
                facts["text"],
                int(facts["tokens"]),
                facts["kvfold"],
            )
        except KvfoldError:
            raise
        except OSError as error:
            raise KvfoldError(f"the calibration {path} cannot be read ({error}); {make}") from error
        except (SafetensorError, KeyError, ValueError) as error:
            raise KvfoldError(f"{path} is no file of block energies ({error}); {make}") from error

    def layer(self, view: LayerView) -> Energy:
        """Of a view's layer, on its device.

        Raises
        ------
        KvfoldError
            The layer is missing, or has other heads.
        """
        found, (_, heads, _, dim) = self.layers.get(view.layer_idx), view.keys.shape
        if found is None or found.key.shape != (heads, dim):
            held = "no such layer" if found is None else f"{tuple(found.key.shape)}"
            raise KvfoldError(
                f"the calibration is another model's: layer {view.layer_idx} has (kv_heads, key_dim) = {(heads, dim)},"
                f" the calibration {held}; run kvfold calibrate blockgtq on this model"
            )
        return found.to(view.keys.device)


def _layers(tensors: Mapping[str, Tensor]) -> dict[int, Energy]:
    """By layer; ValueError or KeyError where they are not energies."""
    layers = {}
    for index in sorted({int(name.partition(".")[0]) for name in tensors}):
        query, key, partner = (tensors[f"{index}.{name}"] for name in ("query", "key", "partner"))
        if query.dim() != 2 or query.shape != key.shape or partner.shape != key.shape[1:]:
            raise ValueError(f"layer {index} has wrong shapes")
        if (query.dtype, key.dtype, partner.dtype) != (torch.float32, torch.float32, torch.int64):
            raise ValueError(f"layer {index} has wrong types")
        channel = torch.arange(len(partner))
        if not all(bool((torch.isfinite(x) & (x >= 0)).all()) for x in (query, key)):
            raise ValueError(f"layer {index} has an energy that is negative or not finite")
        if bool((partner < 0).any()) or not torch.equal(partner[partner % len(channel)], channel):
            raise ValueError(f"layer {index} has planes of other than two channels")
        layers[index] = Energy(query, key, partner)
    if not layers:
        raise ValueError("it has no layers")
    return layers


@dataclass(frozen=True)
class Found:
    """A layer's running means.

    Attributes
    ----------
    mean : Energy
    tokens : int
        How many the means are over.
    biased : bool
        Whether the model adds a bias to its keys.
    """

    mean: Energy
    tokens: int
    biased: bool

    def after(self, before: Found) -> Found:
        """Both together."""
        tokens = before.tokens + self.tokens
        share, old, new = self.tokens / tokens, before.mean, self.mean
        mean = Energy(old.query.lerp(new.query, share), old.key.lerp(new.key, share), new.partner)
        return Found(mean, tokens, before.biased or self.biased)


@dataclass(frozen=True, kw_only=True)
class EnergyObserver(Method):
    """Measures instead of folding: every query of each prompt, layer by layer, into running sums.

    Parameters
    ----------
    bias : "out", "mean" or "in"
        What to take from the keys.
    sinks : int
        First tokens of a prompt that do not count.
    window : int
        Longest prompt that it will see.
    """

    name = "energies"
    paper = "internal"

    bias: KeyBias = "out"
    sinks: int = 4
    window: int = 2048
    found: dict[int, Found] = field(default_factory=dict, compare=False)

    @property
    def needs(self) -> Needs:
        return Needs(sampled=self.window, rotary=True)

    @property
    def shortest(self) -> int:
        return self.sinks

    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        for view in (without_sinks(view, self.sinks) for view in views):
            energy = Energy.of(view, key_constant(view, self.bias))
            new = Found(energy, int(view.valid[:, 0].sum()), view.key_bias is not None)
            before = self.found.get(view.layer_idx)
            self.found[view.layer_idx] = new if before is None else new.after(before)
        return Full().fold(views)
