"""The rivals, with the defaults of their own code: same interface, same ledger."""

from kvfold.methods.baselines.kivi import KIVI
from kvfold.methods.baselines.snapkv import SnapKV

__all__ = ["KIVI", "SnapKV"]
