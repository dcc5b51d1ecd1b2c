"""How large a model's own queries and keys are in each RoPE plane: the calibration of Block-GTQ."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvfold import __version__
from kvfold.api import fold
from kvfold.errors import KvfoldError
from kvfold.hf.fingerprint import fingerprint
from kvfold.methods.blockgtq import BlockGTQ
from kvfold.methods.energies import Energies, EnergyObserver
from kvfold.methods.keybias import KeyBias


def block_energies(
    model: Any,
    input_ids: Tensor,
    *,
    bias: KeyBias = BlockGTQ.bias,
    sinks: int = 4,
    text: str = "",
    window: int = 2048,
) -> Energies:
    """Mean squared query and key channels of every folding layer on a text.

    Taken from the attention calls, after q/k norm. Longer texts are read in equal pieces, so that memory does not grow.

    Parameters
    ----------
    model : transformers causal language model
    input_ids : (1, tokens) int64
    bias : "out", "mean" or "in"
        What to take from the keys, as the method that is to use it: the bias of the key projection, their mean before
        RoPE, or nothing.
    sinks : int
        First tokens of each piece that do not count: their keys lie far from all others.
    text : str
        Its name, for the record.
    window : int
        Tokens read at a time, at most.

    Raises
    ------
    KvfoldError
        Fewer than 32 tokens: no statistics.
    UnsupportedModelError
        As for `kvfold.fold`.
    """
    tokens = input_ids.shape[1]
    if tokens < 32:
        raise KvfoldError(f"{tokens} tokens are too few to calibrate with: give a text of at least 32")
    observer = EnergyObserver(bias=bias, sinks=sinks, window=window)
    for piece in input_ids.tensor_split(-(-tokens // window), 1):
        fold(model, piece, observer)
    biased = any(found.biased for found in observer.found.values())
    return Energies(
        layers={index: found.mean for index, found in sorted(observer.found.items())},
        fingerprint=fingerprint(model),
        bias=bias if biased or bias == "mean" else "none",
        text=text,
        tokens=tokens,
        kvfold=__version__,
    )
