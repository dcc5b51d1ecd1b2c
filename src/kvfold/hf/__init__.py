"""The only room that knows Hugging Face transformers."""

from kvfold.hf.cache import FoldedCache
from kvfold.hf.support import CACHE_KEYWORD, check_supported

__all__ = ["CACHE_KEYWORD", "FoldedCache", "check_supported"]
