"""Save and load folded caches: one safetensors file with a JSON manifest, at a local path or any fsspec URL."""

from kvfold.artifact.container import VERSION, read_manifest
from kvfold.artifact.state import load, load_stores, save
from kvfold.artifact.store import ArtifactStore
from kvfold.artifact.work import SavedWork

__all__ = ["VERSION", "ArtifactStore", "SavedWork", "load", "load_stores", "read_manifest", "save"]
