"""Models whose cache also holds stock layers: sliding windows and linear attention."""

from __future__ import annotations

import gc
from functools import cache

import pytest
import torch
from transformers import DynamicCache

from kvfold import RDKV, BlockGTQ, Full, PublishedRDKV, fold
from kvfold.errors import KvfoldError, UnsupportedModelError
from kvfold.hf import CACHE_KEYWORD, FoldedCache, check_supported
from kvfold.hf.layer import FoldedLayer
from kvfold.ledger import tensors_in
from tests.tiny import left_pad, prompt, tiny_model

NEW = 8
LAYER_TYPES = ["linear_attention"] * 3 + ["full_attention"] * 2


@cache
def hybrid():
    """A tiny qwen3_next: three layers of gated delta net, then two of attention."""
    return tiny_model.__wrapped__(
        "qwen3_next",
        num_hidden_layers=5,
        layer_types=LAYER_TYPES,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
    )


def generate(model, ids, folded, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    return model.generate(ids, **{CACHE_KEYWORD: folded}, **options)


def test_linear_layers_give_the_same_tokens():
    model, ids = hybrid(), prompt(24)
    check_supported(model)
    expected = generate(model, ids, DynamicCache(config=model.config))
    folded = FoldedCache(Full(), model.config)
    assert torch.equal(expected, generate(model, ids, folded))
    assert [isinstance(layer, FoldedLayer) for layer in folded.layers] == [False] * 3 + [True] * 2
    assert all(layer.segments for layer in folded.folded_layers)


def test_linear_layers_after_fold():
    model = hybrid()
    ids, mask = left_pad(prompt(24, 2), [5, 0])
    folded = fold(model, ids, Full(), mask)
    ids, mask = torch.cat([ids, prompt(4, 2, seed=3)], 1), torch.cat([mask, mask.new_ones(2, 4)], 1)
    reference = DynamicCache(config=model.config)
    positions = (mask[:, :24].cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        model(
            ids[:, :24],
            attention_mask=mask[:, :24],
            position_ids=positions,
            use_cache=True,
            **{CACHE_KEYWORD: reference},
        )
    twin = folded.fork()
    expected = generate(model, ids, reference, attention_mask=mask)
    assert torch.equal(expected, generate(model, ids, folded, attention_mask=mask))
    assert torch.equal(expected, generate(model, ids, twin, attention_mask=mask))


@pytest.mark.parametrize(
    "method", [RDKV(keep=1.0), BlockGTQ(bits=8, norm_bits=16), Full()], ids=lambda m: m.name
)
@pytest.mark.parametrize("wide", [32, 512])
def test_heads_of_two_sizes(method, wide):
    """Gemma 4: full layers have wider heads than sliding ones, and only full layers fold."""
    model = tiny_model.__wrapped__(
        "gemma4_text",
        head_dim=16,
        global_head_dim=wide,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=128,
        num_kv_shared_layers=0,
    )
    ids, more = prompt(80), prompt(5, seed=1)
    cache = fold(model, ids, method)
    assert {layer.segments[0].store.key_dim for layer in cache.folded_layers} == {wide}
    with torch.no_grad():
        full = model(torch.cat([ids, more], 1)).logits[:, 80:]
        folded = model(more, **{CACHE_KEYWORD: cache}).logits
    assert (folded - full).norm() < 0.06 * full.norm()


@pytest.mark.parametrize("configured", [True, False])
def test_a_cache_without_a_layer_to_fold(configured):
    model = tiny_model("mistral", sliding_window=8)
    with pytest.raises(UnsupportedModelError, match="no full-attention layer, so there is nothing to fold"):
        generate(model, prompt(24), FoldedCache(Full(), model.config if configured else None))
    with pytest.raises(UnsupportedModelError, match="no full-attention layer, so there is nothing to fold"):
        fold(model, prompt(24), Full())


def test_linear_layers_need_the_config_beforehand():
    with pytest.raises(KvfoldError, match="give the cache config"):
        generate(hybrid(), prompt(24), FoldedCache(Full()))


@pytest.mark.parametrize("method", [RDKV(keep=0.5), PublishedRDKV(keep=0.5), Full()], ids=lambda m: m.name)
@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
def test_the_ledger_counts_stock_layers_too(name, method):
    """All tensors that appear with the cache, found apart from it; none keeps more memory than it shows."""
    model = hybrid() if name == "qwen3_next" else tiny_model(name)
    ids = prompt(90)

    def live():
        gc.collect()
        tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}

    # Once for the tables that kvfold makes once a process.
    longer = torch.cat([ids, prompt(1, seed=1)], 1)
    generate(model, longer, fold(model, ids, method), max_new_tokens=20)
    before = live()
    folded = fold(model, ids, method)
    after = live()
    assert sum(count for pointer, count in after.items() if pointer not in before) == folded.ledger().total
    stock = [layer for layer in folded.layers if not isinstance(layer, FoldedLayer)]
    states = list(tensors_in([vars(layer) for layer in stock]))
    assert len(states) >= 2 * len(stock)
    assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in states)
    del states
    generate(model, longer, folded, max_new_tokens=20)
    appeared = sum(count for pointer, count in live().items() if pointer not in before)
    assert appeared == folded.ledger().total
