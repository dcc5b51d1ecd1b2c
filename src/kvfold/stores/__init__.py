"""What one folded layer is in memory; every store attends, counts its bytes and saves its state."""

from kvfold.stores.affine import AffineStore
from kvfold.stores.base import Store, store_from_state
from kvfold.stores.coded import CodedStore
from kvfold.stores.dense import DenseStore
from kvfold.stores.graded import GradedStore
from kvfold.stores.lowrank import LowRankStore
from kvfold.stores.merged import MergedStore
from kvfold.stores.recorded import RecordedStore
from kvfold.stores.retained import RetainedStore
from kvfold.stores.rotated import RotatedStore
from kvfold.stores.shadow import ShadowStore
from kvfold.stores.trizone import TriZoneStore
from kvfold.stores.weighted import WeightedStore

__all__ = [
    "AffineStore",
    "CodedStore",
    "DenseStore",
    "GradedStore",
    "LowRankStore",
    "MergedStore",
    "RecordedStore",
    "RetainedStore",
    "RotatedStore",
    "ShadowStore",
    "Store",
    "TriZoneStore",
    "WeightedStore",
    "store_from_state",
]
