"""FoldedCache: a transformers cache whose prompts are folded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvfold.errors import BudgetError, CacheMismatchError, KvfoldError, UnsupportedModelError
from kvfold.hf import bridge, inputs
from kvfold.hf.layer import FoldedLayer
from kvfold.hf.refuse import check_latent, check_lengths
from kvfold.hf.rotary import ModelRotary, rotary_of, uses_rotary
from kvfold.hf.support import check_version, folds, stock_layers, text_config
from kvfold.kernels.streams import aside, joined, reached
from kvfold.ledger import Ledger, storage_bytes, tensor_bytes, tensors_in
from kvfold.methods.base import Again, LayerView, Method, cannot_read_again, check_method
from kvfold.methods.work import Work

if TYPE_CHECKING:
    import os

    from kvfold.hf.call import AttentionCall
    from kvfold.stores.base import Store

LATE = 1 << 28
"""Most bytes of a layer that waits for the next before it is folded, so that a prompt's peak grows by no more than that."""
_FOLDING = -1
"""Number of the stream that folds late layers."""


class FoldedCache(Cache):
    """A cache for `model.generate(..., past_key_values=cache)` (`cache=cache` from transformers 5.24).

    A prompt runs through exact attention; as soon as it is complete each layer's keys and values are folded.
    New tokens stay exact in a tail, and blocks of them are folded later if the method says so.

    Parameters
    ----------
    method : Method
        How to fold.
    config : PretrainedConfig, optional
        The model's config. Needed beforehand only for models whose first layers are not attention.
    prompt_tokens : int, optional
        Logical length of the prompt, so that a prompt that arrives in chunks is folded once, when complete, and one that
        the method cannot fold within its budget is refused before any layer attends.
        Not told, every call of more than one token is folded, and a call that directly continues another is
        folded together with it, within the same total budget. A later prompt of too few tokens for the method, or for its
        budget, stays exact until more have come; `report` says so.
    progress : callable, optional
        Called with (layer index, number of layers) when a layer has been folded.

    Raises
    ------
    UnsupportedModelError
        transformers is too old, no layer of the config is full attention, or the method folds no latents and the model
        caches them.
    """

    def __init__(
        self,
        method: Method,
        config: Any = None,
        *,
        prompt_tokens: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ):
        check_version()
        check_method(method)
        if prompt_tokens is not None and prompt_tokens < 1:
            raise KvfoldError(f"prompt_tokens must be at least 1, not {prompt_tokens}")
        self.layers: list[CacheLayerMixin]
        super().__init__(layers=[])
        self.method = method
        self.config: Any = None
        self.prompt_end = prompt_tokens
        self.progress = progress
        self.prompt_hash: str | None = None
        self.text: torch.Tensor | None = None
        """Which tokens of the prompts seen are text, (rows, tokens) bool, where that was told (`hf.modality.see_prompt`)."""
        self.report: list[dict[str, Any]] = []
        """One entry a segment: tokens, real tokens of the longest row, whether it was folded, generated or prompt; why it, or
        some of its layers, stayed exact; of heads what the method says."""
        self.reserved: list[torch.Tensor] = []
        """What an engine that is decoding has reserved for new tokens."""
        self._views: dict[int, LayerView] = {}
        self._late: tuple[list[LayerView], torch.cuda.Event | None] | None = None
        self._account: dict[int, dict[str, Any]] = {}
        self._unpaid: str | None = None
        self.work = Work()
        """What the next prompt's fold tells and keeps while it works."""
        self.again: Again | None = None
        """Reads the next prompt a second time, for methods that need it."""
        self._recording = False
        self._watch: inputs.Watch | None = None
        self._rotaries: dict[tuple[type, torch.device, bool], ModelRotary | None] = {}
        if config is not None:
            self._build_layers(config)
        bridge.install(self)

    def expect(self, length: int) -> None:
        """Tell that the current prompt is complete when the cache has seen `length` logical tokens."""
        self.prompt_end = length

    def watch(self, model: torch.nn.Module) -> None:
        """See what the model's attention modules are given, if the method's gates read that; until this cache is gone.

        `fold`, `attach` and `load` do this.
        """
        if self.method.needs.gates:
            self._watch = inputs.watch(model)

    def keep_exact(self, exact: bool = True) -> None:
        """Keep tokens from here on exact in the tail, or (False) fold them as the method's `block` says."""
        self._recording = exact
        for layer in self.folded_layers:
            layer.recording = exact

    # ---- layers ----

    def _build_layers(self, config: Any) -> None:
        stock = stock_layers(config)
        if not any(folds(layer) for layer in stock):
            raise UnsupportedModelError(
                "the model has no full-attention layer, so there is nothing to fold: use transformers' own cache"
            )
        check_latent(self.method, config)
        self.config = text_config(config)
        for layer_idx in range(len(self.layers), len(stock)):
            own = stock[layer_idx]
            self.layers.append(FoldedLayer(self, layer_idx) if folds(own) else own)
        if self._recording:
            super().activate_past_recording()

    def activate_past_recording(self) -> None:
        """Speculative decoding begins (see `transformers.Cache`); layers made later are told too."""
        self._recording = True
        super().activate_past_recording()

    def admit(self, module: torch.nn.Module, layer: FoldedLayer, call: AttentionCall) -> None:
        """Before a layer attends: learn the model's layer types, and refuse a first prompt, if told, that cannot be folded.

        Raises
        ------
        UnsupportedModelError, BudgetError
            The cache is as it was before the prompt.
        """
        try:
            self.adopt(module, layer)
            end = self.prompt_end
            if call.first and end is not None and self.config is not None and layer is self._first:
                check_lengths(self.method, self.config, _lengths(call, end))
        except KvfoldError:
            self.empty()
            raise

    def empty(self) -> None:
        """Forget a first prompt that was not folded, so that the cache is as before it."""
        self._views, self._late, self._account, self._rotaries = {}, None, {}, {}
        self.report, self.layers = [], []
        if self.config is not None:
            self._build_layers(self.config)

    def adopt(self, module: torch.nn.Module, layer: FoldedLayer) -> None:
        """Learn the model's layer types from the first attention module, when no config was given."""
        config = getattr(module, "config", None)
        if self.config is not None or config is None:
            return
        first = layer.layer_idx
        self.layers = self.layers[:first]
        if len(self.layers) != first:
            raise KvfoldError("the first attention layer is not layer 0: give the cache config=model.config")
        self._build_layers(config)
        if isinstance(self.layers[first], FoldedLayer):
            self.layers[first] = layer
        else:
            assert layer.keys is not None and layer.values is not None
            self.layers[first].update(layer.keys, layer.values)

    @property
    def folded_layers(self) -> list[FoldedLayer]:
        """The layers that fold; the others are transformers' own."""
        return [layer for layer in self.layers if isinstance(layer, FoldedLayer)]

    @property
    def num_layers(self) -> int:
        """Layers of the model that have a cache."""
        return len(self.layers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand new states to a layer (see `transformers.Cache.update`)."""
        while len(self.layers) <= layer_idx:
            new = FoldedLayer(self, len(self.layers))
            new.recording = self._recording
            self.layers.append(new)
        if self._first is self.layers[layer_idx]:
            self._check_complete()
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        _let_go(self.layers[layer_idx])
        return states

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the mask for new tokens (see `transformers.Cache.get_mask_sizes`).

        Raises
        ------
        KvfoldError
            There are none: `generate` was given no more than the cache holds. Or they would be folded by a method that
            reads them twice, and cannot.
        """
        if query_length == 0:
            raise KvfoldError(
                f"no new tokens: the cache holds {self.get_seq_length()} already, so input_ids must be those tokens"
                " followed by at least one more"
            )
        if query_length > 1 and self.method.needs.again and self.again is None and not self._recording:
            waiting = self._first.tail if self._first is not None else 0
            if waiting + query_length > self.method.shortest:
                raise cannot_read_again(self.method.name)
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    @property
    def _first(self) -> FoldedLayer | None:
        return next((layer for layer in self.layers if isinstance(layer, FoldedLayer)), None)

    def _check_complete(self) -> None:
        """Refuse to go on after a forward pass that failed midway: some layers have its tokens, others do not."""
        lengths = {layer.get_seq_length() for layer in self.folded_layers}
        if len(lengths) > 1:
            least = min(lengths)
            # Other layers have forgotten what they would need.
            mends = least and len(self.folded_layers) == len(self.layers)
            raise CacheMismatchError(
                f"a forward pass on this cache was interrupted: its layers hold {least} to {max(lengths)} tokens;"
                f" call {f'cache.crop({least})' if mends else 'cache.reset()'} first, or fold again"
            )

    def get_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """A linear layer's state (see `transformers.Cache.get_conv_state`)."""
        self._need_layers()
        return super().get_conv_state(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Hand a linear layer its new state (see `transformers.Cache.update_conv_state`)."""
        self._need_layers()
        return super().update_conv_state(*args, **kwargs)

    def _need_layers(self) -> None:
        if not self.layers:
            raise KvfoldError("the model's first layer is not attention: give the cache config=model.config")

    def reset(self) -> None:
        """Forget everything: the cache is as new, told no prompt length."""
        self.prompt_end, self.prompt_hash, self._recording, self.text = None, None, False, None
        self.empty()  # transformers' own layers would keep their tokens, as zeros

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens from every layer (see `transformers.Cache.crop`)."""
        seen = min((layer.get_seq_length() for layer in self.folded_layers), default=0)
        self._views, self._late = {}, None  # of a round that was interrupted
        # Sliding layers may refuse: they come first, so that nothing has changed then.
        for layer in sorted(self.layers, key=lambda layer: isinstance(layer, FoldedLayer)):
            layer.crop(tokens_to_remove)
            _let_go(layer)
        if self.prompt_end is not None and self.get_seq_length() < self.prompt_end <= seen:
            # A complete prompt that is cut is a shorter prompt: what comes next is none of it.
            self.prompt_end, self.prompt_hash = self.get_seq_length() or None, None

    # ---- folding ----

    def fold_layer(self, layer: FoldedLayer, view: LayerView) -> bool:
        """Fold one layer, or all of them once the last has been seen, as the method's granularity says.

        Now, or (`LATE`) while the device is busy with the next layer, so that the prompt does not wait for the host.

        Returns
        -------
        bool
            False if its tokens are beyond the budget and stay exact (see `_fold`).
        """
        layers = self.folded_layers
        self.fold_late(layer)
        if layer is layers[0]:
            # A round that was interrupted leaves nothing to the next.
            self._views, self._account, self._unpaid = {}, {}, None
        view.account, view.folding_layers, view.work = self._account, len(layers), self.work
        view.again, view.said = self.again, []
        self._views[layer.layer_idx] = view
        if not self.method.complete(layers.index(layer), len(layers)):
            return True
        views, self._views = [self._views[index] for index in sorted(self._views)], {}
        if layer is not layers[-1] and len(views) == 1 and folds_late(view):
            self._late = views, reached(view.keys.device)
            return True
        folded = self._fold(views)
        if layer is layers[-1]:
            self._account, self._unpaid = {}, None
        return folded

    def fold_late(self, layer: FoldedLayer) -> None:
        """Fold the layer before, if it still is to be, now that the device has this one's attention to do."""
        if self._late is None:
            return
        (views, after), self._late = self._late, None
        if layer is self._first:
            return  # of a round that was interrupted
        device = views[0].keys.device
        with aside(device, _FOLDING, after):
            self._fold(views)
            del views
        # What has been freed here may be used again only when that work is done.
        joined(device, _FOLDING)

    def _fold(self, views: list[LayerView]) -> bool:
        """Put stores in the place of the views' tokens; False if the budget does not pay for these, and they stay exact.

        Only a cache's first prompt is refused. A later one has been read, in the middle of a conversation: it stays exact in
        this layer and those after it, and is folded together with what follows.
        """
        if self._unpaid is None:
            try:
                stores = self.method.fold(views)
            except BudgetError as error:
                if not views[0].later:
                    raise
                self._unpaid = str(error)
        if self._unpaid is not None:
            self._leave(views, self._unpaid)
            return False
        said = [entry for view in views for entry in view.said]
        for view, store in zip(views, stores, strict=True):
            target = self.layers[view.layer_idx]
            assert isinstance(target, FoldedLayer)
            target.take(self.placed(store), view.generated)
            self.note(
                view.layer_idx, store.tokens, max(view.real_tokens), folded=True, generated=view.generated
            )
            if self.progress is not None and not view.generated:
                self.progress(view.layer_idx, self.num_layers)
        if said:
            self.report[-1].setdefault("heads", []).extend(said)
        return True

    def _leave(self, views: list[LayerView], why: str) -> None:
        """Keep the views' tokens exact, and report why."""
        for view in views:
            target = self.layers[view.layer_idx]
            assert isinstance(target, FoldedLayer)
            target.leave(view.generated)
            real = max(view.real_tokens)
            self.note(view.layer_idx, view.tokens, real, folded=False, generated=view.generated, why=why)
            told = self.report[-1]
            if told["folded"]:  # the layers before cost less
                told.setdefault("exact_layers", []).append(view.layer_idx)
                told["why"] = why

    def placed(self, store: Store) -> Store:
        """A store in the form that decodes fastest here; the forms for GPUs know no capped logits."""
        capped = getattr(self.config, "attn_logit_softcapping", None)
        return store if capped else store.for_decoding()

    def note(
        self,
        layer_idx: int,
        tokens: int,
        real_tokens: int,
        *,
        folded: bool,
        generated: bool,
        why: str | None = None,
    ) -> None:
        """Report a segment once, when its first layer is done; `why` it was not folded (None: it is too short)."""
        if layer_idx != self.folded_layers[0].layer_idx:
            return
        entry: dict[str, Any] = {
            "tokens": tokens,
            "real_tokens": real_tokens,
            "folded": folded,
            "generated": generated,
        }
        if not folded:
            short = f"at most {self.method.shortest} tokens: too short to fold with {self.method.name}"
            entry["why"] = why or short
        self.report.append(entry)

    def fork(self) -> FoldedCache:
        """A cache that continues from here on its own; the folded segments are shared, not copied."""
        other = FoldedCache(self.method, prompt_tokens=self.prompt_end)
        other.config, other.prompt_hash, other.text = self.config, self.prompt_hash, self.text
        other._recording, other._watch = self._recording, self._watch
        other.report = list(self.report)
        for layer in self.layers:
            twin = copy.copy(layer)
            if isinstance(layer, FoldedLayer):
                twin = copy.copy(layer)
                twin._cache = FoldedLayer(other, layer.layer_idx)._cache
                twin.segments = list(layer.segments)
                twin.block_observer = copy.copy(layer.block_observer)
                twin.prompt_observer = copy.deepcopy(layer.prompt_observer)
            else:
                # Stock layers replace their tensors but may also write in place.
                twin = copy.deepcopy(layer)
            other.layers.append(twin)
        return other

    def __copy__(self) -> FoldedCache:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> FoldedCache:
        """`copy.deepcopy(cache)` is a fork: stores never change, so sharing them is safe."""
        memo[id(self)] = other = self.fork()
        return other

    def __reduce__(self) -> Any:
        raise KvfoldError(
            "a FoldedCache cannot be pickled: use cache.save(path) and kvfold.load(path, model)"
        )

    def rotary(self, module: torch.nn.Module, device: torch.device) -> ModelRotary | None:
        """The rotary embedding of an attention module; layers of a kind on one device share it.

        `device` is that of the states: the parameters of an offloaded module may be nowhere.
        """
        key = type(module), device, uses_rotary(module)
        if key not in self._rotaries:
            self._rotaries[key] = rotary_of(module, device)
        return self._rotaries[key]

    def forget_angles(self) -> None:
        """Drop the rotary angles that the layers of one step shared."""
        for rotary in self._rotaries.values():
            if rotary is not None:
                rotary.forget()

    # ---- bytes ----

    def ledger(self) -> Ledger:
        """Bytes by purpose; their sum is the storage of every live tensor of the cache (see `kvfold.Ledger`)."""
        ledgers = []
        for layer in self.layers:
            if isinstance(layer, FoldedLayer):
                ledgers.append(layer.ledger())
            else:
                count = storage_bytes(tensors_in(vars(layer)))
                ledgers.append(Ledger({"stock layers": count} if count else {}, count))
        others = {"rotary": self.rotary_tables(), "reserved": self.reserved}
        others["text mask"] = [] if self.text is None else [self.text]
        shared = {purpose: sum(tensor_bytes(tensor) for tensor in found) for purpose, found in others.items()}
        shared = {purpose: count for purpose, count in shared.items() if count}
        return Ledger.merge([*ledgers, self._counted_again(), Ledger(shared)])

    def _counted_again(self) -> Ledger:
        """What takes off the tensors that several layers share, for all but the first of them."""
        owners: dict[int, int] = {}
        repeats: dict[str, int] = {}
        for layer in self.folded_layers:
            for store in {id(segment.store): segment.store for segment in layer.segments}.values():
                for name, tensor in store.tensors().items():
                    if (
                        tensor.numel()
                        and owners.setdefault(tensor.data_ptr(), layer.layer_idx) != layer.layer_idx
                    ):
                        purpose = store.purposes[name]
                        repeats[purpose] = repeats.get(purpose, 0) - tensor_bytes(tensor)
        return Ledger(repeats, folded_bytes=sum(repeats.values()))

    def rotary_tables(self) -> list[torch.Tensor]:
        """Frequencies of the rotary embeddings in use, and angles while a step runs."""
        found = [rotary for rotary in self._rotaries.values() if rotary is not None]
        return [table for rotary in found for table in rotary.tables()]

    def widths(self) -> list[list[dict[str, dict[int, int]]]]:
        """Bits by layer and KV head of the folded segments: see `Store.widths`."""
        result = []
        for layer in self.folded_layers:
            heads: list[dict[str, dict[int, int]]] = []
            for segment in layer.segments:
                for head, widths in enumerate(segment.store.widths()):
                    if len(heads) <= head:
                        heads.append({"values": {}, "keys": {}})
                    for part, counts in widths.items():
                        for bits, count in counts.items():
                            heads[head][part][bits] = heads[head][part].get(bits, 0) + count
            result.append(heads)
        return result

    def save(self, path: str | os.PathLike[str], extra: dict[str, Any] | None = None) -> None:
        """Write the folded cache to a local path or any fsspec URL; see `kvfold.artifact.save`."""
        from kvfold.artifact import save

        save(self, path, extra)


def _lengths(call: AttentionCall, end: int) -> tuple[int, ...]:
    """Real tokens of each row of a prompt of `end` tokens that begins with a call, where they are known."""
    if call.new >= end:
        return call.count_real(end)
    # Padding comes first: of a row that is nothing else so far the length is not known.
    return tuple(end - call.new + real for real in call.real_tokens if real)


def folds_late(view: LayerView) -> bool:
    """Whether a layer of a prompt is folded while its device works on the next: small ones of a GPU's."""
    return (
        view.keys.is_cuda
        and not view.generated
        and view.previous is None
        and view.keys.nbytes + view.values.nbytes <= LATE
    )


def _let_go(layer: Any) -> None:
    """Copy what a stock sliding layer keeps: a view would keep the whole prompt in memory."""
    if isinstance(layer, FoldedLayer):
        return
    for name in ("keys", "values"):
        states = getattr(layer, name, None)
        if isinstance(states, torch.Tensor) and tensor_bytes(states) < states.untyped_storage().nbytes():
            setattr(layer, name, states.clone())
