"""TriZone: tokens and key channels of mixed widths, packed, one ragged segment for each row and KV head.

RDKV, section on the packed layout: zone A holds tokens whose values have 1 to 8 bits, zone B those at 16, and zone C, the
exact tail, is the cache layer's own. A segment's tokens are sorted by value width and then by position, its key
channels by key width, so that every width is one contiguous block of codes. Keys share the order of the values.
"""

from kvfold.stores.ragged import position_dtype
from kvfold.stores.trizone.layout import Layout
from kvfold.stores.trizone.store import TriZoneStore

__all__ = ["Layout", "TriZoneStore", "position_dtype"]
