"""The rivals, with the defaults of their own code: same interface, same ledger."""

from kvfold.methods.baselines.adakv import AdaKV
from kvfold.methods.baselines.attention_matching import AttentionMatching
from kvfold.methods.baselines.expected_attention import ExpectedAttention
from kvfold.methods.baselines.keydiff import KeyDiff
from kvfold.methods.baselines.kivi import KIVI
from kvfold.methods.baselines.knorm import Knorm
from kvfold.methods.baselines.minicache import MiniCache
from kvfold.methods.baselines.pyramidkv import PyramidKV
from kvfold.methods.baselines.random import Random
from kvfold.methods.baselines.rkv import RKV
from kvfold.methods.baselines.select_fit import SelectFit
from kvfold.methods.baselines.shadowkv import ShadowKV
from kvfold.methods.baselines.snapkv import SnapKV
from kvfold.methods.baselines.streaming import StreamingLLM
from kvfold.methods.baselines.tova import TOVA
from kvfold.methods.baselines.turboquant import TurboQuant
from kvfold.methods.baselines.uniform import Uniform

__all__ = [
    "KIVI",
    "RKV",
    "TOVA",
    "AdaKV",
    "AttentionMatching",
    "ExpectedAttention",
    "KeyDiff",
    "Knorm",
    "MiniCache",
    "PyramidKV",
    "Random",
    "SelectFit",
    "ShadowKV",
    "SnapKV",
    "StreamingLLM",
    "TurboQuant",
    "Uniform",
]
