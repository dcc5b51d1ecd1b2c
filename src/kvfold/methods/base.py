"""What a method is, what it may look at, and what it must say it needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch

from kvfold.errors import KvfoldError, UnsupportedModelError
from kvfold.methods.finite import check_finite
from kvfold.methods.options import check_options
from kvfold.methods.work import Work
from kvfold.stores.base import Expand, Rotary, Store
from kvfold.stores.retained import Entries, Lot


class Gate(Protocol):
    """Reads what a layer's attention module is given."""

    def __call__(self, inputs: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """From (batch, tokens, hidden_size) to a number for each token, (batch, kv_heads, tokens) float32."""


Answer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer index, query (batch, heads, n, query_dim), key, value (batch, kv_heads, n, key_dim | value_dim)) -> attention
output (batch, heads, n, value_dim)."""


class Again(Protocol):
    """Reads tokens of the prompt once more through the model's layers, attention being left to the method."""

    def __call__(self, index: torch.Tensor, positions: torch.Tensor, answer: Answer) -> None:
        """The tokens at logical indices (n,) int64, at RoPE positions (batch, n); `answer` is asked layer by layer."""


@dataclass(frozen=True)
class Needs:
    """What prefill must hand to a method.

    Attributes
    ----------
    window : int
        Newest queries of the prompt.
    all_queries : bool
        Attention mass that every query of the prompt gave each token (column sums of the attention matrix).
    sampled : int
        At most this many queries, spread evenly over the prompt (0: none).
    rotary : bool
        The model's rotary embedding and key bias, when folding and when attending.
    gates : tuple of Gate
        Each reads every token, prompt and generated, as it passes a layer.
    again : bool
        To read the prompt a second time when folding.
    text : bool
        Which tokens of the prompt are text, and not image, video or sound.
    """

    window: int = 0
    all_queries: bool = False
    sampled: int = 0
    rotary: bool = False
    gates: tuple[Gate, ...] = ()
    again: bool = False
    text: bool = False

    def __or__(self, other: Needs) -> Needs:
        """What both need."""
        return Needs(
            window=max(self.window, other.window),
            all_queries=self.all_queries or other.all_queries,
            sampled=max(self.sampled, other.sampled),
            rotary=self.rotary or other.rotary,
            gates=(*self.gates, *other.gates),
            again=self.again or other.again,
            text=self.text or other.text,
        )


@dataclass
class LayerView:
    """All that a method may look at for one layer, taken from the attention call itself.

    Queries and keys are after q/k norm and RoPE, so nothing is ever recomputed.

    Attributes
    ----------
    keys, values : (batch, kv_heads, tokens, key_dim | value_dim)
        For multi-head latent attention the rotary part and the latent, one KV head each.
    valid : (batch, kv_heads, tokens) bool
        False for padding (and, when a folded prompt grows, for tokens that were evicted before).
    real_tokens : tuple of int
        Unpadded tokens of each row: what budgets are counted from.
    positions : (batch, tokens) int64
        RoPE positions.
    scaling : float
        Factor on the logits.
    softcap : float or None
    queries : (batch, heads, window, query_dim) or None
        The newest queries, oldest first; the last one is the segment's last token.
    mass : (batch, kv_heads, tokens) float32 or None
        Sum over queries (and the query heads of the group) of attention received.
    squares : (batch, kv_heads, tokens) float32 or None
        The same sum of squared attention (generated blocks only).
    seen_by : (batch, tokens) float32 or None
        How many queries could see each token.
    energy : (batch, kv_heads, key_dim) float32 or None
        Mean squared query channel, where queries themselves were not kept (generated tokens).
    sampled, sampled_index : (batch, heads, n, query_dim) and (n,) int64, or None
        Queries spread over the prompt and their logical index in the segment.
    gates : (batch, kv_heads, tokens, gates) float32 or None
        What each of `Needs.gates` said of each token.
    text : (batch, tokens) bool or None
        Which tokens of a prompt are text, and no padding, where the method needs it.
    layer_idx, num_layers : int
    rotary : Rotary or None
    key_bias : (kv_heads, key_dim) or None
        What the model's key projection adds to every key, before RoPE; None where it adds nothing or a norm follows.
    previous : (Store, (batch,) int64 or None) or None
        The layer's newest folded segment and which of its rows each batch row reads (None: its own): a block of
        generated tokens may share its constants.
    expand : callable or None
        For multi-head latent attention: latent and rotary part to per-head keys and values.
    folding_layers : int
        Layers of the model that fold.
    account : dict
        Shared by the layers of one prompt while they are folded one after the other: a method's own notes.
    generated : bool
        True for a block of generated tokens, False for a prompt.
    later : bool
        Whether the cache held tokens before these: a BudgetError of the method then leaves them exact, until there are more.
    work : Work
        For folds that take long: to tell how far they are, and to keep finished parts.
    again : Again or None
        None where it is not needed, or the prompt's tokens are not known.
    said : list of dict
        What a method has to say of the heads that it folds, as plain data: `FoldedCache.report` tells it.
    finite : bool
        Whether keys and values are known to hold neither NaN nor infinity. A view made from this one forgets it.
    """

    keys: torch.Tensor
    values: torch.Tensor
    valid: torch.Tensor
    real_tokens: tuple[int, ...]
    positions: torch.Tensor
    scaling: float
    softcap: float | None = None
    queries: torch.Tensor | None = None
    mass: torch.Tensor | None = None
    squares: torch.Tensor | None = None
    seen_by: torch.Tensor | None = None
    energy: torch.Tensor | None = None
    sampled: torch.Tensor | None = None
    sampled_index: torch.Tensor | None = None
    gates: torch.Tensor | None = None
    text: torch.Tensor | None = None
    layer_idx: int = 0
    num_layers: int = 1
    rotary: Rotary | None = None
    key_bias: torch.Tensor | None = None
    previous: tuple[Store, torch.Tensor | None] | None = None
    expand: Expand | None = None
    folding_layers: int = 1
    account: dict[int, dict[str, Any]] = field(default_factory=dict)
    generated: bool = False
    later: bool = False
    work: Work = field(default_factory=Work)
    again: Again | None = None
    said: list[dict[str, Any]] = field(default_factory=list)
    finite: bool = field(default=False, init=False)

    @property
    def tokens(self) -> int:
        """Logical tokens of the segment."""
        return self.keys.shape[2]


def cannot_read_again(name: str) -> KvfoldError:
    """What to say where a method needs `Needs.again`, and there is none."""
    return KvfoldError(
        f"{name} with these options (cascade=True or queries='repeat') reads what it folds a second time, and here the tokens"
        " are not known: fold a prompt with kvfold.fold(model, input_ids, method) or kvfold fold, or leave these options out;"
        " before a later turn of more than one token call cache.keep_exact(), so that it stays exact"
    )


def check_block(name: str, tokens: int) -> None:
    """Raise ValueError unless an option can be `Method.block`."""
    if tokens < 0:
        raise ValueError(f"{name} must be at least 0 tokens, got {tokens}")


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A way to fold a cache; its fields are the paper's hyper-parameters.

    Class attributes
    ----------------
    name : str
        Name on the command line and in saved caches.
    paper : str
        Where it comes from.
    granularity : "layer", "window" or "model"
        "layer": folded as soon as a layer's attention has run. "window": several layers at once, as `complete` says, so
        that the peak is theirs. "model": needs every layer first, so that the peak is the full cache. A property where
        an option decides.
    budgets : tuple of str
        Options of which each is a budget, so that only one is given; a method may lack some.
    leaves_tokens, recodes : bool
        What it leaves of a head are tokens in 16 bits, so that it may come first in a chain; it can code them (`recode`), so
        that it may come second.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    budgets: ClassVar[tuple[str, ...]] = ("keep", "bits_per_element", "tokens")
    leaves_tokens: ClassVar[bool] = False
    recodes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def granularity(self) -> Literal["layer", "window", "model"]:
        """How many layers `fold` must see at once."""
        return "layer"

    def complete(self, number: int, layers: int) -> bool:
        """Whether `fold` is due once the layer of that number, of all `layers` that fold, has been seen."""
        return self.granularity == "layer" or number == layers - 1

    @property
    def needs(self) -> Needs:
        """What prefill must collect."""
        return Needs()

    @property
    def shortest(self) -> int:
        """Prompts of at most this many real tokens pass through unfolded."""
        return 1

    @property
    def block(self) -> int:
        """Generated tokens folded at a time, one block late; 0 keeps them all exact."""
        return 0

    @property
    def refolds(self) -> bool:
        """Whether new tokens are folded together with all before them (`LayerView.previous`), into one store.

        A block of generated tokens is then folded as soon as it is complete, and prompts in pieces are not reopened.
        """
        return False

    @property
    def folds_chunks(self) -> bool:
        """Whether a prompt that is read in chunks is folded after each of them, so that its whole is never held."""
        return False

    @property
    def pages(self) -> bool:
        """Whether what it keeps can be decoded in pages: its stores are `RetainedStore`, and `choose` says what stays."""
        return False

    def choose(self, entries: Entries) -> torch.Tensor:
        """Which of all tokens are kept, (n,) bool: device work only, so that a CUDA graph can hold it."""
        raise NotImplementedError(f"{self.name} does not choose among kept tokens")

    def limits(self, lot: Lot) -> list[int]:
        """Entries of each row that `choose` leaves at most."""
        raise NotImplementedError(f"{self.name} does not choose among kept tokens")

    def most(self, lot: Lot, ahead: int) -> int | None:
        """Entries that `choose` leaves at most, all rows together, until `ahead` more tokens are read; None: no bound."""
        return None

    @property
    def parts(self) -> tuple[Method, ...]:
        """The methods that it consists of."""
        return (self,)

    @property
    def calibrated_for(self) -> str | None:
        """Fingerprint of the only model it may fold; None: any. KvfoldError where its calibration cannot be read."""
        return None

    @property
    def calibrated_by(self) -> str:
        """Command that calibrates it for another model."""
        return f"kvfold calibrate {self.name}"

    @property
    def refuses_latent(self) -> str | None:
        """Why it cannot fold latent attention (MLA), and what to do instead; None: it can."""
        return None

    def check_latent(self) -> None:
        """Raise UnsupportedModelError unless it can fold latent attention (MLA)."""
        for part in self.parts:
            if part.refuses_latent is not None:
                raise UnsupportedModelError(part.refuses_latent)

    def check_views(self, views: Sequence[LayerView]) -> None:
        """Refuse what cannot be folded at all; for `fold` to call first.

        Raises
        ------
        UnsupportedModelError
            Latents, which the method does not fold.
        NonFiniteError
            Keys or values hold NaN or infinity.
        """
        if any(view.expand is not None for view in views):
            self.check_latent()
        for view in views:
            if not view.finite:
                check_finite([("keys", view.keys), ("values", view.values)], view.layer_idx)

    def check(self, tokens: int, kv_heads: int, key_dim: int, value_dim: int) -> None:
        """Raise BudgetError if a prompt of that size cannot be folded within the budget."""

    @abstractmethod
    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        """Fold one segment: one view for granularity "layer", a window's for "window", every layer's for "model".

        Raises
        ------
        BudgetError
            The budget does not pay for it, although `check` may have passed.
        """

    def recode(self, store: Store, view: LayerView) -> Store:
        """Code what another method left of a layer in 16 bits."""
        raise NotImplementedError(f"{self.name} does not recode")

    def __rshift__(self, then: Method) -> Method:
        """Tokens of one method in the code of another: `SnapKV(keep=0.2) >> BlockGTQ(bits=4)`."""
        from kvfold.methods.chain import Chain

        return Chain(first=self, then=then)

    def to_dict(self) -> dict[str, Any]:
        """Name and hyper-parameters as plain data."""
        return {"method": self.name, **asdict(self)}


def check_method(method: Any) -> None:
    """Raise KvfoldError for anything but a Method (a name, a class, options)."""
    if not isinstance(method, Method):
        found = method.__name__ if isinstance(method, type) else type(method).__name__
        raise KvfoldError(f"method must be a kvfold Method, such as RDKV(keep=0.1), not {found}")
