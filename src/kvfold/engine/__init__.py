"""The decode loop: a step is one CUDA graph at fixed addresses where that is possible."""

from kvfold.engine.api import generate, stream
from kvfold.engine.loop import Decoding, Engine

__all__ = ["Decoding", "Engine", "generate", "stream"]
