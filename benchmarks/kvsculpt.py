"""KVSculpt beside its controls and rivals, at equal bytes: KL over generated tokens, error of every layer, seconds of a fold.

    python benchmarks/kvsculpt.py MODEL OUT.jsonl TEXT... [--passages 8] [--keep .3 .5 .7] [--forms NAME...] [--seconds 300]

Of each text (.txt or .gz), the first --passages of eight spread evenly over it, in turn over the texts; each is read once and
folded by every form.
The 128 tokens after it are drawn from the full model (temperature 1, one seed a passage), which makes the mean KL(full || folded)
that of whole continuations; the text's own next 128 are beside it. A layer's error is the mean squared difference that folding
makes to its attention's output for the queries of the generated tokens, which no method has seen, with exact states before.
What OUT has already is not done again; after --seconds nothing new is begun.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.cli.models import load_model
from kvfold.evaluate.prefill import Prefill, continue_logits, kl_divergence
from kvfold.evaluate.runner import hardware, versions
from kvfold.kernels.reference import attend, merge
from kvfold.methods import RDKV, AttentionMatching, BlockGTQ, KVSculpt, LayerView, Method, SelectFit, SnapKV
from kvfold.stores.base import AttendContext, Store

NEXT = 128
PAPER: dict[str, Any] = {
    "queries": "synthetic",
    "sampled": 10**6,
    "ridge": 1e-3,
    "ridge_to": "zero",
    "layers": "even",
    "damping": 0.5,
    "every": 50,
}
FORMS: dict[str, Callable[[float], Method]] = {
    "kvsculpt": lambda keep: KVSculpt(keep=keep),
    "kvsculpt, cascade": lambda keep: KVSculpt(keep=keep, cascade=True),
    "kvsculpt, uniform": lambda keep: KVSculpt(keep=keep, heads="uniform"),
    "fixed keys": lambda keep: KVSculpt(keep=keep, steps=0),
    "fixed keys, uniform": lambda keep: KVSculpt(keep=keep, heads="uniform", steps=0),
    "adam, uniform": lambda keep: KVSculpt(keep=keep, heads="uniform", optimiser="adam"),
    "select-fit": lambda keep: SelectFit(keep=keep),
    "select-fit, our queries and ridge": lambda keep: SelectFit(
        keep=keep, sampled=2048, ridge=1e-2, ridge_to="own"
    ),
    "attention-matching": lambda keep: AttentionMatching(keep=keep),
    "snapkv": lambda keep: SnapKV(keep=keep),
    "rdkv": lambda keep: RDKV(keep=keep),
    "blockgtq": lambda keep: BlockGTQ(keep=keep),
    "paper's kvsculpt, uniform": lambda keep: KVSculpt(keep=keep, heads="uniform", steps=1000, **PAPER),
    "paper's kvsculpt": lambda keep: KVSculpt(keep=keep, steps=1000, pilot_steps=300, **PAPER),
}
CODES = (4, 3)


@dataclass(frozen=True, kw_only=True)
class Done(Method):
    """Stores that were made before, to be coded."""

    name = "done"
    paper = "internal"
    leaves_tokens = True
    stores: tuple[Store, ...]

    @property
    def granularity(self) -> Any:
        return "model"

    def fold(self, views: Any) -> list[Store]:
        return list(self.stores)


class Passage:
    """A prompt, what the full model goes on with and the text does, and the full model's logits of both."""

    def __init__(self, model: Any, ids: Tensor, tokens: int, seed: int, methods: list[Method]):
        self.model, self.tokens = model, tokens
        self.prompt = ids[:, :tokens]
        self.exact = Prefill(model, self.prompt, methods)
        self.following = {"generated": self._generate(seed), "text": ids[:, tokens : tokens + NEXT + 1]}
        self.logits = {}
        for name, following in self.following.items():
            with torch.no_grad():
                whole = model(
                    torch.cat([self.prompt, following], 1), logits_to_keep=NEXT + 1, use_cache=False
                )
            self.logits[name] = whole.logits[:, :NEXT].float()
        whole_ids = torch.cat([self.prompt, self.following["generated"]], 1)
        seen = RDKV(keep=0.5, window=NEXT + 1, queries="window")
        self.later = Prefill(model, whole_ids, [seen]).views

    @torch.no_grad()
    def _generate(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        found, state = [], self.model(self.prompt, use_cache=True, logits_to_keep=1)
        for _ in range(NEXT + 1):
            chance = state.logits[0, -1].float().softmax(-1).cpu()
            found.append(torch.multinomial(chance, 1, generator=generator)[None].to(self.prompt.device))
            state = self.model(found[-1], past_key_values=state.past_key_values, use_cache=True)
        return torch.cat(found, 1)

    def measure(self, method: Method) -> tuple[dict[str, Any], tuple[Store, ...]]:
        """A fold's KL, loss, layers' errors, bytes and seconds, and what it made."""
        wait(self.model)
        wall, cpu = time.perf_counter(), time.process_time()
        cache = self.exact.fold(method)
        wait(self.model)
        row: dict[str, Any] = {
            "seconds": round(time.perf_counter() - wall, 3),
            "cpu_seconds": round(time.process_time() - cpu, 2),
        }
        stores = tuple(layer.segments[0].store for layer in cache.folded_layers)
        row["bytes"] = round(sum(store.nbytes for store in stores) / sum(s.full_bytes for s in stores), 5)
        for name, following in self.following.items():
            logits = continue_logits(self.model, cache.fork(), following[:, :NEXT])
            row[f"kl_{name}"] = float(kl_divergence(self.logits[name], logits).mean())
            if name == "text":
                gold = following[:, 1:, None]
                both = (self.logits[name].log_softmax(-1), logits.log_softmax(-1))
                row["loss"] = float((both[0].gather(-1, gold) - both[1].gather(-1, gold)).mean())
        errors = torch.stack([self._errors(view, store) for view, store in zip(self.later, stores)])
        heads = errors.amax(1) / errors.amin(1).clamp_min(1e-30)
        row["mse"], row["heads_apart"] = float(errors.mean()), float(heads.max())
        row["layers"] = [float(f"{error:.3g}") for error in errors.mean(1).tolist()]
        return row, stores

    def _errors(self, view: LayerView, store: Store) -> Tensor:
        """Mean squared output error of each KV head for the generated tokens' queries."""
        query, tail = view.queries, slice(self.tokens, None)
        last = torch.arange(self.tokens, view.tokens, device=query.device)
        mask = (torch.arange(view.tokens, device=query.device) <= last[:, None])[None, None]
        exact, _ = attend(query, view.keys, view.values, view.scaling, mask)
        own = attend(query, view.keys[:, :, tail], view.values[:, :, tail], view.scaling, mask[..., tail])
        context = AttendContext(view.scaling, None, None, view.rotary)
        folded, _ = merge([store.attend(query, None, context), own])
        return (folded.float() - exact).square().view(view.keys.shape[1], -1).mean(1).cpu()


def wait(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def passages(tokenizer: Any, texts: list[Path], count: int, tokens: int) -> Iterator[tuple[str, int, Tensor]]:
    """(text, number, ids) in turn over the texts."""
    whole = []
    for path in texts:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
        whole.append(tokenizer(text, return_tensors="pt").input_ids)
    for number in range(count):
        for path, ids in zip(texts, whole, strict=True):
            start = (ids.shape[1] - tokens - NEXT - 1) * (2 * number + 1) // (2 * max(count, 8))
            yield path.name.split(".")[0], number, ids[:, start : start + tokens + NEXT + 1]


def write(out: Path, row: dict[str, Any]) -> None:
    shown = {name: row[name] for name in ("text", "passage", "keep", "form", "bytes", "seconds")}
    print(shown, f"KL {row['kl_generated']:.5f} {row['kl_text']:.5f} mse {row['mse']:.2e}", flush=True)
    with out.open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("texts", type=Path, nargs="+", metavar="TEXT")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--passages", type=int, default=8)
    parser.add_argument("--keep", type=float, nargs="+", default=[0.3, 0.5, 0.7])
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    model, tokenizer = load_model(args.model)
    done = set()
    if args.out.exists():
        for line in args.out.read_text().splitlines():
            row = json.loads(line)
            done.add((row["model"], row["text"], row["passage"], row["keep"], row["form"]))
    about = {
        "model": Path(args.model).name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "tokens": args.tokens,
    }
    about |= {"hardware": hardware(model.device.type), **versions()}
    for text, number, ids in passages(tokenizer, args.texts, args.passages, args.tokens):
        cells = [(keep, form) for keep in args.keep for form in args.forms]
        cells = [cell for cell in cells if (about["model"], text, number, *cell) not in done]
        if not cells or time.monotonic() > end:
            continue
        where = {"text": text, "passage": number}
        methods = [FORMS[form](keep) for keep, form in cells]
        passage = Passage(model, ids.to(model.device), args.tokens, number, methods)

        for (keep, form), method in zip(cells, methods, strict=True):
            if time.monotonic() > end:
                break
            found, stores = passage.measure(method)
            write(args.out, {**where, "keep": keep, "form": form, **found, **about})
            for bits in CODES if form == "kvsculpt" else ():
                coded, _ = passage.measure(Done(stores=stores) >> BlockGTQ(bits=bits))
                form = f"kvsculpt >> {bits} bits"
                write(args.out, {**where, "keep": keep, "form": form, **coded, **about})
        for bits in CODES:
            if time.monotonic() < end and not done & {(about["model"], text, number, 1.0, f"{bits} bits")}:
                found, _ = passage.measure(BlockGTQ(bits=bits))
                write(args.out, {**where, "keep": 1.0, "form": f"{bits} bits", **found, **about})


if __name__ == "__main__":
    main()
