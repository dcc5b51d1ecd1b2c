"""What one folded layer is in memory; every store attends, counts its bytes and saves its state."""

from kvfold.stores.base import Store, store_from_state
from kvfold.stores.dense import DenseStore
from kvfold.stores.graded import GradedStore
from kvfold.stores.trizone import TriZoneStore

__all__ = ["DenseStore", "GradedStore", "Store", "TriZoneStore", "store_from_state"]
