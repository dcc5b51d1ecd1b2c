"""How much cache memory folding a prompt takes at its peak.

    python benchmarks/memory.py MODEL TEXT results/memory.json [--tokens 6000] [--keep 0.1]

After every layer of a prefill, the bytes of all tensors that the cache keeps alive are summed (of a view, its whole storage):
folded segments, layers still exact, what was observed of their queries. That is the memory folding is responsible for;
resident memory also holds weights, activations and what the allocator has not given back. Prefills of the same prompt:
unfolded (`DynamicCache`), folded layer by layer (`scope="layer"` and `"stream"`), and folded with one price for the model
(`scope="model"`, which needs every layer's exact prompt first). The moment of the peak is when a layer's new store is whole
and its exact keys and values are still there. "observations" are what the method saw besides, mostly the queries that weigh
the tokens (at most `RDKV.sampled` of them a layer); they live until the layer is folded, and are counted apart. A method's
float32 scratch for the layer it works on is not counted: like activations, it does not grow with the number of layers.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
from dataclasses import fields
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kvfold
from kvfold import RDKV, FoldedCache
from kvfold.hf import CACHE_KEYWORD
from kvfold.hf.layer import FoldedLayer
from kvfold.ledger import storage_bytes, tensors_in


def owned(cache) -> list[torch.Tensor]:
    """Keys and values that a cache keeps alive, folded or not."""
    found: list[torch.Tensor] = []
    for layer in cache.layers:
        if isinstance(layer, FoldedLayer):
            found += [tensor for tensor in (layer.keys, layer.values) if tensor is not None]
            found += [tensor for segment in layer.segments for tensor in segment.store.tensors().values()]
        else:
            found += tensors_in(vars(layer))
    return found


def seen(views) -> list[torch.Tensor]:
    """All that views hold: the cache's own keys and values, and what was observed."""
    return [
        tensor
        for view in views
        for tensor in tensors_in([getattr(view, field.name) for field in fields(view)])
    ]


class Watch:
    """Sums a cache's tensors after every layer of the model, and as each layer is folded."""

    def __init__(self, model, cache):
        self.cache, self.after_layer, self.while_folding, self.with_observations = cache, [], [], []
        self.hooks = [layer.register_forward_hook(self._layer) for layer in model.model.layers]
        if isinstance(cache, FoldedCache):
            self.fold, watch = type(cache.method).fold, self

            def fold(method, views):
                # The new stores and the exact tokens are both there: the moment of the peak.
                stores = watch.fold(method, views)
                new = [tensor for store in stores for tensor in store.tensors().values()]
                watch.while_folding.append(storage_bytes([*owned(cache), *new]))
                watch.with_observations.append(storage_bytes([*owned(cache), *new, *seen(views)]))
                return stores

            type(cache.method).fold = fold

    def _layer(self, *_) -> None:
        self.after_layer.append(storage_bytes(owned(self.cache)))
        if isinstance(self.cache, FoldedCache):
            # Views wait here for the last layer where a method needs all of them.
            self.with_observations.append(
                storage_bytes([*owned(self.cache), *seen(self.cache._views.values())])
            )

    def close(self) -> None:
        """Stop watching."""
        for hook in self.hooks:
            hook.remove()
        if isinstance(self.cache, FoldedCache):
            type(self.cache.method).fold = self.fold


@torch.no_grad()
def measure(model, ids: torch.Tensor, method: RDKV | None) -> dict:
    """Peak bytes of one prefill."""
    gc.collect()
    if method is None:
        cache = DynamicCache(config=model.config)
    else:
        cache = FoldedCache(method, model.config, prompt_tokens=ids.shape[1])
    watch = Watch(model, cache)
    try:
        model(ids, use_cache=True, logits_to_keep=1, **{CACHE_KEYWORD: cache})
    finally:
        watch.close()
    final = storage_bytes(owned(cache))
    if method is not None:
        assert (
            final + sum(t.numel() * t.element_size() for t in cache.rotary_tables()) == cache.ledger().total
        )
    return {
        "peak_bytes": max(watch.after_layer + watch.while_folding),
        "peak_bytes_after_a_layer": max(watch.after_layer),
        "peak_bytes_while_folding": max(watch.while_folding, default=None),
        "peak_bytes_with_observations": max(watch.with_observations, default=None),
        "final_bytes": final,
        "after_each_layer": watch.after_layer,
        "while_folding": watch.while_folding,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("out")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--keep", type=float, default=0.1)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = tokenizer(Path(args.text).read_text()[: 16 * args.tokens])["input_ids"][: args.tokens]
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    tensor = torch.tensor([ids])
    runs = {}
    for name, method in (
        ("unfolded", None),
        ('scope="layer"', RDKV(keep=args.keep, scope="layer")),
        ('scope="stream"', RDKV(keep=args.keep, scope="stream")),
        ('scope="model"', RDKV(keep=args.keep, scope="model")),
    ):
        runs[name] = measure(model, tensor, method)
        print(
            name,
            {
                key: value
                for key, value in runs[name].items()
                if "after_each" not in key and key != "while_folding"
            },
            flush=True,
        )
    full = runs["unfolded"]["final_bytes"]
    one_layer = full // model.config.num_hidden_layers
    folded = runs['scope="layer"']["final_bytes"]
    bound = folded + one_layer
    result = {
        "model": Path(args.model).name,
        "dtype": "bfloat16",
        "tokens": len(ids),
        "keep": args.keep,
        "full_cache_bytes": full,
        "one_layer_16_bit_bytes": one_layer,
        "folded_bytes": folded,
        "folded_plus_one_layer_bytes": bound,
        "peak_over_folded_plus_one_layer": {
            name: round(run["peak_bytes"] / bound, 4) for name, run in runs.items()
        },
        "peak_with_observations_over_folded_plus_one_layer": {
            name: round(run["peak_bytes_with_observations"] / bound, 4)
            for name, run in runs.items()
            if name != "unfolded"
        },
        "peak_over_full_cache": {name: round(run["peak_bytes"] / full, 4) for name, run in runs.items()},
        "runs": runs,
        "hardware": platform.processor() or platform.machine(),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "kvfold": kvfold.__version__,
            "python": platform.python_version(),
        },
    }
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    print(
        json.dumps({key: value for key, value in result.items() if key not in ("runs", "versions")}, indent=1)
    )


if __name__ == "__main__":
    main()
