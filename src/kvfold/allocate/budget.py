"""How large a folded layer may be, in the terms that people and papers use."""

from dataclasses import dataclass
from fractions import Fraction

_FP16_BYTES = 2


@dataclass(frozen=True)
class Budget:
    """A size for the folded cache, in exactly one of three terms.

    Raises
    ------
    ValueError
        If not exactly one term is given, or it is out of range.
    """

    keep: float | None = None
    """Fraction of the bytes of the full fp16 cache, above 0 and up to 1; everything stored counts."""
    bits_per_element: float | None = None
    """Average bits for each key and value element of the prompt, above 0 and up to 16; everything counts."""
    tokens: int | None = None
    """As many bytes as this many fp16 tokens take in each KV head, payload alone: how the papers count."""

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            raise ValueError(
                f"Give exactly one of keep, bits_per_element and tokens, got {', '.join(given) or 'none'}; "
                "for example Budget(keep=0.25)."
            )
        # Written so that NaN fails too.
        if self.keep is not None and (isinstance(self.keep, bool) or not 0 < self.keep <= 1):
            raise ValueError(
                f"keep is the fraction of the fp16 cache to keep, above 0 and up to 1, got {self.keep}."
            )
        if self.bits_per_element is not None and not 0 < self.bits_per_element <= 16:
            raise ValueError(f"bits_per_element must be above 0 and up to 16, got {self.bits_per_element}.")
        if self.tokens is not None and (isinstance(self.tokens, bool) or not isinstance(self.tokens, int)):
            raise ValueError(
                f"tokens must be a whole number of tokens, got {self.tokens!r}; for a share use keep=."
            )
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {self.tokens}.")

    @property
    def counts_metadata(self) -> bool:
        """Whether scales, positions and the like come out of this budget; with ``tokens`` they do not."""
        return self.tokens is None

    def bytes(self, tokens: int, kv_heads: int, key_dim: int, value_dim: int) -> int:
        """Bytes that one layer may take.

        Parameters
        ----------
        tokens : int
            Real tokens of the layer, padding not counted. With a batch, the sum over its rows.
        kv_heads : int
            KV heads of the layer.
        key_dim, value_dim : int
            Elements of one key and of one value of one head.

        Returns
        -------
        int
            Rounded down. A budget in tokens is that many tokens in each head, whatever the number of real
            ones.

        Raises
        ------
        ValueError
            If a count is negative.
        """
        if min(tokens, kv_heads, key_dim, value_dim) < 0:
            raise ValueError(
                f"Counts must be >= 0, got tokens {tokens}, kv_heads {kv_heads}, key_dim {key_dim}, "
                f"value_dim {value_dim}."
            )
        elements_per_token = kv_heads * (key_dim + value_dim)
        if self.tokens is not None:
            return self.tokens * elements_per_token * _FP16_BYTES
        if self.keep is not None:
            share = _exact(self.keep) * _FP16_BYTES
        else:
            share = _exact(self.bits_per_element) / 8
        return int(share * tokens * elements_per_token)


def _exact(number: float | None) -> Fraction:
    """The number as written: 0.29 of 100 is 29, though the float product is below it."""
    return Fraction(str(number))
