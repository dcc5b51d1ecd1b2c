"""What to keep and how precisely: one file a method, each reading like its paper."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kvfold.methods.base import LayerView, Method, Needs
from kvfold.methods.baselines import (
    KIVI,
    RKV,
    TOVA,
    AdaKV,
    AttentionMatching,
    ExpectedAttention,
    KeyDiff,
    Knorm,
    MiniCache,
    PyramidKV,
    Random,
    SelectFit,
    ShadowKV,
    SnapKV,
    StreamingLLM,
    TurboQuant,
    Uniform,
)
from kvfold.methods.blockgtq import BlockGTQ
from kvfold.methods.chain import Chain
from kvfold.methods.dbtrimkv import DBTrimKV
from kvfold.methods.full import Full
from kvfold.methods.kvsculpt import KVSculpt
from kvfold.methods.rdkv import RDKV
from kvfold.methods.rdkv_published import PublishedRDKV
from kvfold.methods.xkv import XKV

METHODS: dict[str, type[Method]] = {
    cls.name: cls
    for cls in (
        AdaKV,
        AttentionMatching,
        BlockGTQ,
        DBTrimKV,
        ExpectedAttention,
        Full,
        KeyDiff,
        KIVI,
        Knorm,
        KVSculpt,
        MiniCache,
        PublishedRDKV,
        PyramidKV,
        Random,
        RDKV,
        RKV,
        SelectFit,
        ShadowKV,
        SnapKV,
        StreamingLLM,
        TOVA,
        TurboQuant,
        Uniform,
        XKV,
    )
}
"""Every method by its command-line name."""


def make_method(name: str, **options: Any) -> Method:
    """Build a method from its name and hyper-parameters.

    Raises
    ------
    ValueError
        Unknown name, or an option the method does not have (the message lists those it has).
    """
    if name == Chain.name:
        parts = {key: dict(part) for key, part in options.items()}
        return Chain(**{key: make_method(part.pop("method"), **part) for key, part in parts.items()})
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}: choose from {', '.join(sorted(METHODS))}")
    known = [field.name for field in fields(METHODS[name])]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"method {name!r} has no option {', '.join(unknown)}: it has {', '.join(known) or 'none'}"
        )
    return METHODS[name](**options)


__all__ = [
    "KIVI",
    "METHODS",
    "RDKV",
    "RKV",
    "TOVA",
    "XKV",
    "AdaKV",
    "AttentionMatching",
    "BlockGTQ",
    "Chain",
    "DBTrimKV",
    "ExpectedAttention",
    "Full",
    "KVSculpt",
    "KeyDiff",
    "Knorm",
    "LayerView",
    "Method",
    "MiniCache",
    "Needs",
    "PublishedRDKV",
    "PyramidKV",
    "Random",
    "SelectFit",
    "ShadowKV",
    "SnapKV",
    "StreamingLLM",
    "TurboQuant",
    "Uniform",
    "make_method",
]
