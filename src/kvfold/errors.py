"""The errors kvfold raises, each a ValueError whose message says what to do."""


class KvfoldError(ValueError):
    """Base of every error that kvfold raises on purpose."""


class UnsupportedModelError(KvfoldError):
    """The model, or its attention implementation, cannot read a folded cache."""


class BudgetError(KvfoldError):
    """The byte budget is impossible; the message names the smallest possible one."""


class NonFiniteError(KvfoldError):
    """Keys or values hold NaN or Inf; the message names the layer."""


class CacheMismatchError(KvfoldError):
    """A folded cache meets a model, dtype, device or batch it was not made for."""


class ArtifactError(KvfoldError):
    """A saved cache is missing, truncated, altered, too new, or belongs to another model."""
