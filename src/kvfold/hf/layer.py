"""One full-attention layer of a folded cache: folded segments, an exact tail, and attention over both."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kvfold.errors import BudgetError, CacheMismatchError
from kvfold.hf import bridge, inputs
from kvfold.hf.call import AttentionCall, visible_columns
from kvfold.hf.fingerprint import Identity, identity_of
from kvfold.hf.observe import BlockObserver, PromptObserver
from kvfold.hf.segment import Segment
from kvfold.hf.view import view_of
from kvfold.kernels.reference import Part, attend, merge
from kvfold.ledger import KERNEL_TABLES, Ledger, storage_bytes, tensor_bytes
from kvfold.stores.base import AttendContext, Rotary, Store

if TYPE_CHECKING:
    from kvfold.hf.cache import FoldedCache


class FoldedLayer(CacheLayerMixin):
    """Cache of one full-attention layer.

    Attributes
    ----------
    segments : list of Segment
        Folded prompts and blocks, oldest first.
    keys, values : (batch, kv_heads, tail, dim)
        Exact tokens after the last segment.
    gates : (batch, kv_heads, tail, gates) float32 or None
        What the method's gates said of them.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: FoldedCache, layer_idx: int):
        super().__init__()
        self._cache = weakref.ref(cache)
        self.layer_idx = layer_idx
        self.segments: list[Segment] = []
        self.folded_tokens = 0
        self.gates: torch.Tensor | None = None
        self.prompt_observer: PromptObserver | None = None
        self.block_observer = BlockObserver()
        self.recording = False
        self.reopen = False
        self._patience = 0
        self._reopened: Segment | None = None
        self._recorded: AttentionCall | None = None
        self.module: weakref.ref[torch.nn.Module] | None = None
        self.identity: Identity | None = None

    @property
    def cache(self) -> FoldedCache:
        """The cache this layer belongs to."""
        cache = self._cache()
        if cache is None:
            raise RuntimeError("this layer's FoldedCache no longer exists")
        return cache

    # ---- the transformers cache layer interface ----

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Start an empty tail of the states' batch, heads, dtype and device."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new states to the tail, announce the layer, return the whole tail."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._close()
        assert self.keys is not None and self.values is not None
        self._check_states(key_states, value_states)
        # Nothing may fail between the announcement and the attention call it is for.
        keys, values = torch.cat([self.keys, key_states], 2), torch.cat([self.values, value_states], 2)
        bridge.announce(self)
        self.keys, self.values = keys, values
        return self.keys, self.values

    def _check_states(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        assert self.keys is not None and self.values is not None
        expected = (self.keys.shape[0], self.keys.shape[1], self.keys.shape[3], self.values.shape[3])
        found = (keys.shape[0], keys.shape[1], keys.shape[3], values.shape[3])
        if expected != found:
            hint = (
                "repeat the cache with batch_repeat_interleave or batch_select_indices"
                if expected[1:] == found[1:]
                else "the cache belongs to another model"
            )
            raise CacheMismatchError(
                f"layer {self.layer_idx}: the folded cache holds (batch, kv_heads, key_dim, value_dim) = {expected},"
                f" the model brings {found}: {hint}"
            )
        if keys.dtype != self.dtype or keys.device != self.keys.device:
            raise CacheMismatchError(
                f"layer {self.layer_idx}: the folded cache was made in {self.dtype} on {self.keys.device}, the model"
                f" runs in {keys.dtype} on {keys.device}; load the model as it was when folding, or fold again"
            )

    @property
    def attending_module(self) -> torch.nn.Module | None:
        """The attention module that last read the layer; None before any has, and when it is gone."""
        return None if self.module is None else self.module()

    @property
    def tail(self) -> int:
        """Exact tokens after the last segment."""
        return 0 if self.keys is None else self.keys.shape[2]

    def get_seq_length(self) -> int:
        """Logical tokens seen, never the number of entries kept."""
        return self.folded_tokens + self.tail

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks cover every logical token; the layer takes the tail's columns."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        cache = self.cache
        self.__init__(cache, self.layer_idx)  # type: ignore[misc]

    def _select(self, index: torch.Tensor) -> None:
        self._close()
        if self.keys is None or self.values is None:
            return
        index = index.to(self.keys.device)
        self.keys, self.values = self.keys[index], self.values[index]
        self.gates = None if self.gates is None else self.gates[index]
        self.segments = [segment.select(index) for segment in self.segments]
        self.block_observer.select(index)
        if self.prompt_observer is not None:
            self.prompt_observer.select(index)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Beam search: choose batch rows. Folded segments are shared, not copied."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row; the folded segments stay in memory once."""
        if self.keys is not None:
            self._select(torch.arange(self.keys.shape[0], device=self.keys.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some batch rows and free what no row reads any more."""
        if self.keys is not None:
            rows = torch.arange(self.keys.shape[0], device=self.keys.device)[indices.to(self.keys.device)]
            self._select(rows)
            self.segments = [segment.compact() for segment in self.segments]

    def activate_past_recording(self) -> None:
        """Speculative decoding begins: calls may be cropped again, so nothing is folded before a `crop`."""
        self.recording = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens: a negative number that many, a positive one all beyond that length."""
        self._close()
        length = self.get_seq_length()
        remove = -tokens_to_remove if tokens_to_remove <= 0 else max(length - tokens_to_remove, 0)
        if remove > length:
            raise ValueError(f"cannot crop {remove} tokens from a cache of {length}")
        if self.keys is not None and self.values is not None and remove:
            from_tail = min(remove, self.tail)
            if from_tail:
                # Copies: a view would keep the cropped tokens' bytes alive.
                self.keys = self.keys[:, :, : self.tail - from_tail].clone()
                self.values = self.values[:, :, : self.values.shape[2] - from_tail].clone()
                self.gates = None if self.gates is None else self.gates[:, :, : self.tail].clone()
                remove -= from_tail
                if self.prompt_observer is not None:
                    self.prompt_observer.shorten(from_tail, self.tail)
            while remove:
                last = self.segments.pop()
                self.folded_tokens -= last.store.tokens
                if last.store.tokens > remove:
                    shorter = last.store.crop(last.store.tokens - remove)
                    self.segments.append(replace(last, store=shorter))
                    self.folded_tokens += shorter.tokens
                    remove = 0
                else:
                    remove -= last.store.tokens
            self.block_observer = BlockObserver()
            self.reopen = False
        if self._recorded is not None:
            self._finish_recorded_prompt()

    # ---- attention ----

    def attention(
        self,
        base: Callable[..., Any],
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Attention for the states that `update` was just given, then whatever folding is due.

        Without folded segments the model's own attention function runs on the tail, unchanged.
        """
        call = AttentionCall.of(self.get_seq_length(), module, query, key, attention_mask, kwargs)
        self.cache.admit(module, self, call)
        if self.cache.layers[self.layer_idx] is not self:
            # The config has just told that this layer is not one to fold: its stock layer has taken over.
            return base(module, query, key, value, attention_mask, *args, **kwargs)
        self._recognise(module, query.shape[2])
        if self.cache.method.needs.gates:
            self._read_gates(module)
        if not self.segments:
            result = base(module, query, key, value, attention_mask, *args, **kwargs)
            parts: list[Part] = []
        else:
            parts = self._parts(call, query, key, value)
            output, _ = parts[0] if len(parts) == 1 else merge(parts)
            result = output.transpose(1, 2).contiguous().to(query.dtype), None
        try:
            with torch.no_grad():
                self.cache.fold_late(self)
                self._after_attention(call, query, key, parts)
        except BudgetError:
            if call.first:
                self.cache.empty()
            raise
        if self.segments and self._is_last():
            self.cache.forget_angles()
        return result

    def _is_last(self) -> bool:
        """Whether no folded layer comes after this one."""
        folded = (layer for layer in reversed(self.cache.layers) if isinstance(layer, FoldedLayer))
        return next(folded) is self

    def _recognise(self, module: torch.nn.Module, new: int) -> None:
        """Remember whose states these are, and refuse those of a module with other weights."""
        if self.module is not None and self.module() is module:
            return
        identity = identity_of(module)
        if self.identity is not None and identity != self.identity:
            assert self.keys is not None and self.values is not None
            kept = self.tail - new
            self.keys, self.values = self.keys[:, :, :kept].clone(), self.values[:, :, :kept].clone()
            raise CacheMismatchError(
                f"layer {self.layer_idx}: the folded cache belongs to a model with other weights"
                f" ({self.identity.dtype}; this one is {identity.dtype}); use that model, or fold again with this one"
            )
        self.identity, self.module = identity, weakref.ref(module)

    def _read_gates(self, module: torch.nn.Module) -> None:
        """Let the method's gates read the tokens of this call."""
        assert self.keys is not None
        with torch.no_grad():
            given = inputs.given_to(module)
            found = [gate(given, self.layer_idx) for gate in self.cache.method.needs.gates]
            new = torch.stack(found, -1).to(self.keys.device)
            self.gates = new if self.gates is None else torch.cat([self.gates, new], 2)

    def _parts(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> list[Part]:
        """Attention over each segment, then over the tail, then the model's sinks if it has them; or all in one."""
        context = AttendContext(call.scaling, call.softcap, call.expand, self.rotary_of(call.module))
        *others, last = self.segments
        parts = [segment.store.attend(query, segment.rows, context) for segment in others]
        alone = call.new == 1 and call.sinks is None and last.rows is None and not self._in_prompt(call)
        if alone and call.tail_mask is None:
            before = merge(parts) if parts else None
            whole = last.store.attend_with_tail(query, key, value, context, before)
            if whole is not None:
                return [whole]
        parts.append(last.store.attend(query, last.rows, context))
        parts.append(attend(query, key, value, call.scaling, call.tail_mask, call.softcap))
        if call.sinks is not None:
            lse = call.sinks.float().view(1, -1, 1).expand(query.shape[:3])
            parts.append((torch.zeros_like(parts[-1][0]), lse))
        return parts

    # ---- folding ----

    def _after_attention(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, parts: list[Part]
    ) -> None:
        end = self.cache.prompt_end
        start = self.folded_tokens
        if self._in_prompt(call):
            assert end is not None
            in_prompt = min(end - start, self.tail)
            ahead = self.tail - in_prompt
            part = query if not ahead else query[:, :, : query.shape[2] - ahead]
            self._observe_prompt(call, part, key[:, :, :in_prompt], parts, end - start)
            method = self.cache.method
            if self.get_seq_length() >= end or (method.folds_chunks and in_prompt > method.shortest):
                self._fold_prompt(call, in_prompt)
        elif self.recording:
            if call.new > 1 and not self.segments and self.prompt_observer is None:
                self._observe_prompt(call, query, key, parts, None)
                self._recorded = call
        elif call.new > 1:
            reopen = self.reopen and not self.cache.method.refolds
            if reopen and self.segments:
                key = self._reopen(key, call)
            self._observe_prompt(call, query, key, parts[:-1] if reopen else parts, None)
            self.reopen = self._fold_prompt(call, self.tail)
            return
        else:
            self._observe_block(call, query, key, parts)
        self.reopen = False

    def _in_prompt(self, call: AttentionCall) -> bool:
        """Whether the call has tokens of a prompt whose length was told."""
        end = self.cache.prompt_end
        return end is not None and self.folded_tokens < end and self.get_seq_length() - call.new < end

    def _observe_prompt(
        self,
        call: AttentionCall,
        query: torch.Tensor,
        key: torch.Tensor,
        parts: list[Part],
        total: int | None,
    ) -> None:
        if self.prompt_observer is None:
            self.prompt_observer = PromptObserver(self.cache.method.needs, total, later=not call.first)
        others = [part[1] for part in parts[: len(self.segments)]]
        other_lse = torch.logsumexp(torch.stack(others), 0)[:, :, : query.shape[2]] if others else None
        if call.sinks is not None:
            sinks = call.sinks.float().view(1, -1, 1).expand(query.shape[:3])
            other_lse = sinks if other_lse is None else torch.logaddexp(other_lse, sinks)
        valid = call.valid[:, :, : key.shape[2]]
        self.prompt_observer.observe(query, key, valid, call.scaling, call.softcap, other_lse, self.kv_heads)

    @property
    def kv_heads(self) -> int:
        """KV heads as cached (one for latents)."""
        assert self.keys is not None
        return self.keys.shape[1]

    def _reopen(self, key: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """Put the last segment back in front of the tail: a prompt that came in untold pieces is one prompt.

        Evicted tokens come back as invalid zeros, so that positions stay logical.
        """
        assert self.keys is not None and self.values is not None
        self._reopened = segment = self.segments.pop()
        store = segment.store
        self.folded_tokens -= store.tokens
        first, second = (self.values, self.keys) if call.expand else (self.keys, self.values)
        keys, values, valid = segment.laid_out(first, second, self.rotary_of(call.module))
        positions = call.positions
        call.real_tokens = tuple(
            map(sum, zip(segment.real_tokens(call.batch), call.real_tokens, strict=True))
        )
        call.valid = torch.cat([valid, call.valid.expand(-1, self.kv_heads, -1)], 2)
        before = positions[:, :1] - torch.arange(store.tokens, 0, -1, device=keys.device)
        call.positions = torch.cat([before, positions], 1)
        seen = call.expand(keys, values)[0] if call.expand else keys
        keys, values = torch.cat([keys, first], 2), torch.cat([values, second], 2)
        self.keys, self.values = (values, keys) if call.expand else (keys, values)
        return torch.cat([seen, key], 2)

    def _close(self) -> None:
        """Put back a segment that was reopened for a fold which never came (the forward pass was interrupted)."""
        if self._reopened is None:
            return
        assert self.keys is not None and self.values is not None
        segment, self._reopened = self._reopened, None
        tokens = segment.store.tokens
        self.keys, self.values = self.keys[:, :, tokens:].clone(), self.values[:, :, tokens:].clone()
        self.folded_tokens += tokens
        self.segments.append(segment)

    def _fold_prompt(self, call: AttentionCall, tokens: int) -> bool:
        """Fold the first `tokens` of the tail, now or with other layers; False where they are too few and stay as they are."""
        observer, self.prompt_observer = self.prompt_observer, None
        assert observer is not None and self.keys is not None
        real = call.count_real(tokens) if tokens < call.valid.shape[2] else call.real_tokens
        if max(real) <= self.cache.method.shortest:
            self.cache.note(self.layer_idx, tokens, max(real), folded=False, generated=False)
            return False
        sampled = torch.cat(observer.sampled, 2) if observer.sampled else None
        view = view_of(self, call, tokens, real, observer.queries, sampled)
        view.queries, view.sampled = observer.queries, sampled
        view.mass, view.seen_by = observer.mass, observer.seen_by
        view.later = observer.later
        if observer.sampled:
            view.sampled_index = torch.cat(observer.sampled_index)
        return self.cache.fold_layer(self, view)

    def _observe_block(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, parts: list[Part]
    ) -> None:
        block = self.cache.method.block
        if block and self.cache.method.refolds:
            if self.tail >= max(block, self._patience):
                view = view_of(self, call, self.tail, call.real_tokens)
                view.generated = view.later = True
                self.cache.fold_layer(self, view)
            return
        if not block or self.tail <= block:
            return
        lse = (
            merge(parts)[1]
            if parts
            else attend(query, key, key, call.scaling, call.tail_mask, call.softcap)[1]
        )
        mask = call.tail_mask
        visible = None if mask is None else visible_columns(mask)[..., :block]
        self.block_observer.observe(
            query,
            key[:, :, :block],
            visible,
            lse,
            call.scaling,
            call.softcap,
            self.kv_heads,
            self.key_dim(call),
        )
        if self.tail < max(2 * block, self._patience):
            return
        observer, self.block_observer = self.block_observer, BlockObserver()
        assert observer.energy is not None
        view = view_of(self, call, block, call.count_real(block))
        view.mass, view.squares = observer.mass, observer.squares
        view.energy = observer.energy / observer.count
        view.seen_by = torch.full_like(view.positions, observer.count, dtype=torch.float32)
        view.generated = view.later = True
        self.cache.fold_layer(self, view)

    def extend(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        call: AttentionCall | None = None,
        queries: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Take over tokens that were decoded elsewhere, and fold the block that they fill.

        Parameters
        ----------
        keys, values : (batch, kv_heads, new, key_dim | value_dim)
        call : AttentionCall, optional
            The last token's.
        queries, lse : (batch, heads, n, query_dim) and (batch, heads, n) float32, optional
            Of those of the new tokens that come after the tail's first block, and over all that they saw.
        """
        assert self.keys is not None and self.values is not None
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        self.reopen = False
        if call is not None and queries is not None and lse is not None:
            seen = self.keys if call.expand is None else call.expand(self.values, self.keys)[0]
            with torch.no_grad():
                self._observe_block(call, queries, seen, [(queries, lse)])

    def key_dim(self, call: AttentionCall) -> int:
        """Channels of a key as cached (of the latent, where attention reads latents)."""
        assert self.keys is not None and self.values is not None
        return (self.values if call.expand else self.keys).shape[-1]

    def _finish_recorded_prompt(self) -> None:
        """The first crop of speculative decoding tells which tokens are there to stay: fold them."""
        call, self._recorded = self._recorded, None
        assert call is not None
        self._fold_prompt(call, self.tail)

    def rotary_of(self, module: torch.nn.Module) -> Rotary | None:
        """The model's rotary embedding, where the method works with it."""
        if not self.cache.method.needs.rotary:
            return None
        assert self.keys is not None
        return self.cache.rotary(module, self.keys.device)

    def take(self, store: Store, generated: bool) -> None:
        """Replace the first tokens of the tail by their folded form.

        Blocks of generated tokens are joined: each segment costs every later step some work. Prompts are not, since
        forks share them.
        """
        assert self.keys is not None and self.values is not None
        self._reopened, self._patience = None, 0
        again = self.folded_tokens if self.cache.method.refolds else 0
        new = store.tokens - again
        self.keys = self.keys[:, :, new:].clone()
        self.values = self.values[:, :, new:].clone()
        self.gates = None if self.gates is None else self.gates[:, :, new:].clone()
        self.folded_tokens += new
        if again:
            self.segments = []
        last = self.segments[-1] if self.segments else None
        if generated and last is not None and last.generated and last.rows is None:
            joined = last.store.join(store)
            if joined is not None:
                self.segments[-1] = replace(last, store=joined)
                return
        self.segments.append(Segment(store, generated=generated))

    def leave(self, generated: bool) -> None:
        """Keep exact, in the tail, what was to be folded; a block of generated tokens waits until another is complete."""
        self._close()
        self.reopen = False
        if generated:
            self._patience = self.tail + self.cache.method.block

    # ---- bytes ----

    def tail_tensors(self) -> list[torch.Tensor]:
        """Everything live that is not in a store."""
        named = [self.keys, self.values, self.gates] + [segment.rows for segment in self.segments]
        named += self.block_observer.tensors()
        named += self.prompt_observer.tensors() if self.prompt_observer is not None else []
        return [tensor for tensor in named if tensor is not None]

    def _derived(self) -> list[torch.Tensor]:
        """What attention derived from the stores and keeps in memory of its own."""
        stores = [segment.store for segment in self.segments]
        own = {x.untyped_storage().data_ptr() for store in stores for x in store.tensors().values()}
        derived = [tensor for store in stores for tensor in store.derived]
        return [tensor for tensor in derived if tensor.untyped_storage().data_ptr() not in own]

    def ledger(self) -> Ledger:
        """Bytes of this layer by purpose."""
        purposes: dict[str, int] = {}
        full = folded = 0
        seen: set[int] = set()
        for segment in self.segments:
            full += segment.store.full_bytes
            for name, tensor in segment.store.tensors().items():
                # Segments may share a frame.
                if tensor.numel() and tensor.data_ptr() not in seen:
                    seen.add(tensor.data_ptr())
                    purpose = segment.store.purposes[name]
                    purposes[purpose] = purposes.get(purpose, 0) + tensor_bytes(tensor)
                    folded += tensor_bytes(tensor)
        purposes[KERNEL_TABLES] = storage_bytes(self._derived())
        if self.keys is not None and self.values is not None:
            states = tensor_bytes(self.keys) + tensor_bytes(self.values)
            purposes["tail"] = states
            purposes["observations"] = sum(tensor_bytes(tensor) for tensor in self.tail_tensors()) - states
            exact = 2 * (self.keys.numel() + self.values.numel())
        else:
            exact = 0
        purposes = {purpose: count for purpose, count in purposes.items() if count}
        return Ledger(purposes, full + exact, folded, full, self.get_seq_length())
