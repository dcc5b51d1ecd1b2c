"""Graded tokens: each kept token belongs to a grade, and a grade sets the width of every channel.

A grade fixes a width for each key channel and one width for the value. Keys are coded relative to one vector turned by
RoPE to each position (the mean key before RoPE, which holds a key bias) and to each channel's mean and deviation; values
relative to their mean, rotated, with one 8-bit magnitude a token. Codes index a codebook of N(0, 1)
(`codecs.codebook.common_levels`), so no scale is stored for a group of tokens. Two more grades take sinks and outliers,
which no shared frame fits: "fine" tokens have 8 bits between their own extremes, "exact" ones stay as they are.
"""

from kvfold.stores.graded.frame import Frame, GradedLayout, normal_keys, normal_values
from kvfold.stores.graded.recorded import RecordedGradedStore
from kvfold.stores.graded.store import GradedStore

__all__ = ["Frame", "GradedLayout", "GradedStore", "RecordedGradedStore", "normal_keys", "normal_values"]
