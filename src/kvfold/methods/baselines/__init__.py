"""The rivals, with the defaults of their own code: same interface, same ledger."""

from kvfold.methods.baselines.kivi import KIVI
from kvfold.methods.baselines.snapkv import SnapKV
from kvfold.methods.baselines.turboquant import TurboQuant
from kvfold.methods.baselines.uniform import Uniform

__all__ = ["KIVI", "SnapKV", "TurboQuant", "Uniform"]
