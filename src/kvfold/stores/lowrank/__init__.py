"""Keys before RoPE and values as factors: one row a token, which the layers of a window share, times each layer's basis."""

from kvfold.stores.lowrank.layout import Factor, LowRankLayout, LowRankRow, landmark_code, vector_code
from kvfold.stores.lowrank.store import LowRankStore

__all__ = ["Factor", "LowRankLayout", "LowRankRow", "LowRankStore", "landmark_code", "vector_code"]
