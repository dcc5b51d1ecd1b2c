"""What one folded layer is in memory; every store attends, counts its bytes and saves its state."""

from kvfold.stores.base import Store, store_from_state
from kvfold.stores.dense import DenseStore

__all__ = ["DenseStore", "Store", "store_from_state"]
