"""Text and images in one budget, on small Qwen2.5-VL and Qwen3-VL models."""

from __future__ import annotations

import pytest
import torch

from kvfold import (
    METHODS,
    RDKV,
    XKV,
    BlockGTQ,
    DBTrimKV,
    Engine,
    Full,
    KVSculpt,
    SnapKV,
    attach,
    fold,
    generate,
    kept_shares,
    load,
)
from kvfold.errors import KvfoldError
from kvfold.hf import CACHE_KEYWORD, FoldedCache
from tests.methods.test_dbtrimkv import Account, gates_file, kept_by  # noqa: F401
from tests.tiny import IMAGE, pictures, prompt, tiny_model, tiny_vlm

models = pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
LOOP = {"do_sample": False, "max_new_tokens": 20}


def split(prompt):
    """Ids, mask, and what else the model takes."""
    others = {name: value for name, value in prompt.items() if name not in ("input_ids", "attention_mask")}
    return prompt["input_ids"], prompt["attention_mask"], others


def two_rows():
    """Two prompts with images, the shorter one padded on the left."""
    short, long = pictures((11, 9, 4)), pictures(seed=1)
    pads = long["input_ids"].shape[1] - short["input_ids"].shape[1]
    both = {
        name: torch.cat([torch.nn.functional.pad(short[name], (pads, 0)), long[name]])
        for name in ("input_ids", "attention_mask", "mm_token_type_ids")
    }
    both |= {name: torch.cat([short[name], long[name]]) for name in ("pixel_values", "image_grid_thw")}
    return both, [pads, 0]


@models
def test_nothing_folded_changes_nothing(name):
    model, inputs = tiny_vlm(name), pictures()
    expected = model.generate(**inputs, **LOOP)
    with attach(model, Full()):
        assert torch.equal(model.generate(**inputs, **LOOP), expected)
    ids, mask, others = split(inputs)
    assert torch.equal(generate(model, ids, Full(), attention_mask=mask, **others, **LOOP), expected)
    cache = fold(
        model,
        ids[:, :-1],
        Full(),
        mask[:, :-1],
        inputs={**others, "mm_token_type_ids": (ids == IMAGE)[:, :-1].int()},
    )
    found = model.generate(ids, attention_mask=mask, **{CACHE_KEYWORD: cache}, **LOOP)
    assert torch.equal(found, expected)


@models
def test_text_and_images_compete(name, gates_file):  # noqa: F811
    """A padded batch against worth worked out one by one; and the share that is kept of each modality."""
    model, (inputs, pads) = tiny_vlm(name), two_rows()
    path = gates_file(model)
    method, heads = DBTrimKV(tokens=15, gates=path, buffer=7, sinks=0, least=0), 3 * 2
    account = Account(model, path, method, pads)
    try:
        ids, mask, others = split(inputs)
        cache = fold(model, ids, method, mask, inputs=others)
        account.evict(15 * heads)
    finally:
        account.close()
    found = [kept_by(cache, row) for row in range(2)]
    assert found == account.kept
    image = ids == IMAGE
    kept = [bool(image[row, position]) for row in range(2) for _, _, position in found[row]]
    assert 0 < sum(kept) < len(kept)
    shares = kept_shares(model, cache, ids)
    assert shares["image"] == pytest.approx(sum(kept) / (heads * int(image.sum())))
    assert shares["text"] == pytest.approx((len(kept) - sum(kept)) / (heads * int((~image).sum())))


@models
def test_all_text_is_kept_beside_a_budget_for_images(name, gates_file):  # noqa: F811
    model, (inputs, pads) = tiny_vlm(name), two_rows()
    ids, mask, others = split(inputs)
    path = gates_file(model)
    method = DBTrimKV(tokens=5, gates=path, buffer=7, least=0, text="kept")
    account = Account(model, path, method, pads)
    try:
        cache = fold(model, ids, method, mask, inputs=others)
        account.evict(10**9)  # everything, best first
    finally:
        account.close()
    text = (ids != IMAGE) & mask.bool()
    for row in range(2):
        found = kept_by(cache, row)
        everything = {
            (layer, head, int(t)) for layer in range(3) for head in range(2) for t in text[row].nonzero()
        }
        assert everything <= found and len(found - everything) == 5 * 3 * 2
        assert all(ids[row, token] == IMAGE for _, _, token in found - everything)
    # Which images: those of most worth.
    beta = torch.stack([account.gates(torch.cat(x, 1), layer) for layer, x in sorted(account.given.items())])
    for row in range(2):
        worth = {
            (layer, head, int(t)): (ids.shape[1] - int(t)) * float(beta[layer, row, head, t])
            for layer in range(3) for head in range(2) for t in (ids[row] == IMAGE).nonzero()
        }  # fmt: skip
        best = sorted(worth, key=lambda entry: (-worth[entry], -entry[2]))[: 5 * 3 * 2]
        assert set(best) == {entry for entry in kept_by(cache, row) if ids[row, entry[2]] == IMAGE}


def test_text_stays_while_generating(gates_file, tmp_path):  # noqa: F811
    """In transformers' loop and in pages: the same tokens, the same kept, never more than text and budget."""
    model, (inputs, _) = tiny_vlm("qwen2_5_vl"), two_rows()
    ids, mask, others = split(inputs)
    method = DBTrimKV(tokens=5, gates=gates_file(model), buffer=7, text="kept")
    reference = FoldedCache(method, model.config)
    with attach(model, method) as folding:
        expected = model.generate(**inputs, **LOOP)
        reference = folding.cache
    assert reference.ledger().by_purpose["text mask"] == ids.numel()
    cache = FoldedCache(method, model.config, prompt_tokens=ids.shape[1])
    cache.watch(model)
    found = generate(model, ids, cache, engine=Engine(graph="dry"), attention_mask=mask, **others, **LOOP)
    assert torch.equal(found, expected)
    text = ((ids != IMAGE) & mask.bool()).sum(1).tolist()
    cache.save(tmp_path / "a.kvf")
    for one in (reference, cache, load(tmp_path / "a.kvf", model)):
        assert one.folded_layers[0].segments[0].store.layout.text == tuple(text)
        for row in range(2):
            assert kept_by(one, row) == kept_by(reference, row)
            assert len(kept_by(one, row)) == (5 + text[row]) * 6
    one = cache.fork()
    one.batch_select_indices(torch.tensor([1]))
    assert one.folded_layers[0].segments[0].store.layout.text == (text[1],)


def test_placeholders_without_images(gates_file):  # noqa: F811
    model, inputs = tiny_vlm("qwen2_5_vl"), pictures()
    ids, mask, others = split(inputs)
    without = {"image_grid_thw": others["image_grid_thw"], "mm_token_type_ids": others["mm_token_type_ids"]}
    calls = [
        lambda: fold(model, ids, SnapKV(tokens=20), mask),
        lambda: fold(model, ids, SnapKV(tokens=20), mask, inputs=without),
        lambda: generate(model, ids, SnapKV(tokens=20), attention_mask=mask, **without, **LOOP),
    ]
    with attach(model, SnapKV(tokens=20)):
        calls.append(lambda: model.generate(ids, attention_mask=mask, **LOOP))
        for call in calls:
            with pytest.raises(
                KvfoldError, match="24 image tokens and no images: give what the processor returned"
            ):
                call()
    with pytest.raises(KvfoldError, match="leave chunk_size out"):
        fold(model, ids, SnapKV(tokens=20), mask, chunk_size=8, inputs=others)
    with pytest.raises(KvfoldError, match="a second time, which images do not allow"):
        fold(model, ids, KVSculpt(tokens=20, cascade=True), mask, inputs=others)


def test_a_prompt_of_text_alone(gates_file):  # noqa: F811
    model, ids = tiny_vlm("qwen2_5_vl"), prompt(60).clamp_max(119)
    cache = fold(model, ids, DBTrimKV(tokens=9, gates=gates_file(model)))
    assert kept_shares(model, cache, ids) == {"text": pytest.approx(9 / 60)}
    for seeing in (model, tiny_model("llama")):
        method = DBTrimKV(tokens=9, gates=gates_file(seeing), text="kept")
        with pytest.raises(KvfoldError, match="no image tokens: give images, or leave the option text out"):
            fold(seeing, ids, method)


def test_a_cache_that_was_not_told(gates_file):  # noqa: F811
    model, inputs = tiny_vlm("qwen2_5_vl"), pictures()
    cache = FoldedCache(DBTrimKV(tokens=9, gates=gates_file(model), text="kept"))
    cache.watch(model)
    with pytest.raises(KvfoldError, match="not which tokens are images"):
        model.generate(**inputs, **{CACHE_KEYWORD: cache}, **LOOP)
    ids = prompt(60).clamp_max(119)
    with pytest.raises(KvfoldError, match="input_ids must be the 60 tokens"):
        kept_shares(model, fold(model, ids, SnapKV(tokens=9)), ids[:, 1:])


@pytest.mark.parametrize(
    "options", [dict(text="both"), dict(keep=0.1, text="kept"), dict(memory=9, text="kept")]
)
def test_bad_options(options):
    with pytest.raises(ValueError, match="text"):
        DBTrimKV(**options)


@models
@pytest.mark.parametrize(
    "method",
    [
        RDKV(keep=0.5, window=8),
        BlockGTQ(bits=4),
        METHODS["turboquant"](bits=4),
        KVSculpt(keep=0.5, window=8, sinks=2, steps=1),
        XKV(keep=0.5),
    ],
    ids=lambda method: method.name,
)
def test_methods_that_turn_keys(name, method):
    """Images have positions on three axes, which no plain rotation undoes: keys are taken as they lie."""
    model, inputs = tiny_vlm(name), pictures()
    ids, mask, others = split(inputs)
    cache = fold(model, ids, method, mask, inputs=others)
    shares = kept_shares(model, cache, ids)
    assert 0 < shares["image"] <= 1 and 0 < shares["text"] <= 1
    text = {"input_ids": prompt(100).clamp_max(115), "attention_mask": torch.ones(1, 100, dtype=torch.long)}
    for asked in (inputs, text):
        with attach(model, method):
            found = model.generate(**asked, **LOOP)
        assert found.shape[1] == asked["input_ids"].shape[1] + LOOP["max_new_tokens"]


def test_shares_of_stores_that_turn_keys(tmp_path):
    model, ids = tiny_model("llama"), prompt(150)
    cache = fold(model, ids, RDKV(keep=0.1, window=8))
    shares = kept_shares(model, cache, ids)
    assert 0 < shares["text"] <= 1
    cache.save(tmp_path / "a.kvf")
    assert kept_shares(model, load(tmp_path / "a.kvf", model), ids) == shares


def test_arguments_of_fold_are_no_further_inputs():
    model, inputs = tiny_vlm("qwen2_5_vl"), pictures()
    with pytest.raises(KvfoldError, match="leave attention_mask, input_ids out"):
        fold(model, inputs["input_ids"], Full(), inputs=inputs)


def test_inputs_that_the_model_does_not_take():
    with pytest.raises(KvfoldError, match=r"LlamaForCausalLM does not take these inputs.*pixel_values"):
        fold(tiny_model("llama"), prompt(40), Full(), inputs={"pixel_values": torch.zeros(1, 3, 8, 8)})
