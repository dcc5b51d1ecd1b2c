"""KVSculpt beside its controls and rivals, at equal bytes: KL over generated tokens, error of every layer, seconds of a fold.

    python benchmarks/kvsculpt.py MODEL OUT.jsonl TEXT... [--passages 8] [--keep .3 .5 .7] [--forms NAME...] [--together 8]
    python benchmarks/kvsculpt_table.py OUT.jsonl

Of each text (.txt or .gz), the first --passages of eight spread evenly over it; each is read once and folded by every form.
The 128 tokens after it are drawn from the full model (temperature 1, one seed a passage), which makes the mean KL(full || folded)
that of whole continuations; the text's own next 128 are beside it. A layer's error is the mean squared difference that folding
makes to its attention's output for the queries of the generated tokens, which no method has seen, with exact states before.
With --together so many passages of a text are the rows of one batch, which takes a GPU a fraction of the time; only the whole
batch is timed then. Cells that tell most come first: every form for the first passages of each text at the first keep, then the others'
keeps and passages for all but the forms in FIRST_ONLY. What OUT has already is not done again; after --seconds nothing new is begun.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.cli.models import load_model
from kvfold.evaluate.prefill import Prefill, continue_logits, kl_divergence
from kvfold.evaluate.runner import hardware, versions
from kvfold.kernels.reference import attend, merge
from kvfold.methods import (
    RDKV,
    AttentionMatching,
    BlockGTQ,
    KVSculpt,
    LayerView,
    Method,
    SelectFit,
    SnapKV,
    distil,
    kvsculpt,
)
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
    "fixed keys": lambda keep: KVSculpt(keep=keep, steps=0),
    "select-fit": lambda keep: SelectFit(keep=keep),
    "select-fit, our queries and ridge": lambda keep: SelectFit(
        keep=keep, sampled=2048, ridge=1e-2, ridge_to="own"
    ),
    "attention-matching": lambda keep: AttentionMatching(keep=keep),
    "snapkv": lambda keep: SnapKV(keep=keep),
    "rdkv": lambda keep: RDKV(keep=keep),
    "blockgtq": lambda keep: BlockGTQ(keep=keep),
    "kvsculpt, uniform": lambda keep: KVSculpt(keep=keep, heads="uniform"),
    "fixed keys, uniform": lambda keep: KVSculpt(keep=keep, heads="uniform", steps=0),
    "adam, uniform": lambda keep: KVSculpt(keep=keep, heads="uniform", optimiser="adam"),
    "kvsculpt, cascade": lambda keep: KVSculpt(keep=keep, cascade=True),
    "kvsculpt, 5 steps": lambda keep: KVSculpt(keep=keep, steps=5),
    "kvsculpt, 40 steps": lambda keep: KVSculpt(keep=keep, steps=40),
    "paper's kvsculpt, uniform": lambda keep: KVSculpt(keep=keep, heads="uniform", steps=1000, **PAPER),
    "paper's kvsculpt": lambda keep: KVSculpt(keep=keep, steps=1000, pilot_steps=300, **PAPER),
}
FIRST_ONLY = (
    "adam, uniform",
    "kvsculpt, 5 steps",
    "kvsculpt, 40 steps",
    "paper's kvsculpt, uniform",
    "paper's kvsculpt",
)
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


@torch.no_grad()
def continuations(model: Any, prompts: Tensor, seeds: Sequence[int]) -> Tensor:
    """What the full model goes on with after each of (n, tokens), drawn with a seed each: (n, NEXT + 1)."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    found, state = [], model(prompts, use_cache=True, logits_to_keep=1)
    for _ in range(NEXT + 1):
        chances = state.logits[:, -1].float().softmax(-1).cpu()
        drawn = [torch.multinomial(each, 1, generator=g) for each, g in zip(chances, generators, strict=True)]
        found.append(torch.stack(drawn).to(prompts.device))
        state = model(found[-1], past_key_values=state.past_key_values, use_cache=True)
    return torch.cat(found, 1)


class Passages:
    """Prompts of a batch, what the full model goes on with and the texts do, and the full model's logits of both."""

    def __init__(self, model: Any, ids: Tensor, tokens: int, generated: Tensor, methods: Sequence[Method]):
        self.model, self.tokens = model, tokens
        self.prompt = ids[:, :tokens]
        self.exact = Prefill(model, self.prompt, methods)
        self.following = {"generated": generated, "text": ids[:, tokens : tokens + NEXT + 1]}
        self.logits = {}
        for name, following in self.following.items():
            with torch.no_grad():
                whole = model(
                    torch.cat([self.prompt, following], 1), logits_to_keep=NEXT + 1, use_cache=False
                )
            self.logits[name] = whole.logits[:, :NEXT].float()
        whole_ids = torch.cat([self.prompt, generated], 1)
        seen = RDKV(keep=0.5, window=NEXT + 1, queries="window")
        self.later = Prefill(model, whole_ids, [seen]).views

    def measure(self, method: Method) -> tuple[list[dict[str, Any]], tuple[Store, ...]]:
        """Of each passage a fold's KL, loss, layers' errors, the batch's bytes and, of one alone, seconds; and what it made."""
        wait(self.model)
        wall, cpu = time.perf_counter(), time.process_time()
        cache = self.exact.fold(method)
        wait(self.model)
        seconds = {
            "seconds": round(time.perf_counter() - wall, 3),
            "cpu_seconds": round(time.process_time() - cpu, 2),
        }
        stores = tuple(layer.segments[0].store for layer in cache.folded_layers)
        share = sum(store.nbytes for store in stores) / sum(store.full_bytes for store in stores)
        told = cache.report[0].get("heads", ())
        rows: list[dict[str, Any]] = []
        for number in range(len(self.prompt)):
            alone = seconds
            if len(self.prompt) > 1:
                alone = {"together": len(self.prompt), "batch_seconds": seconds["seconds"]}
            heads = of_heads([head for head in told if head["row"] == number])
            rows.append({**alone, **heads, "bytes": round(share, 5)})
        for name, following in self.following.items():
            logits = continue_logits(self.model, cache.fork(), following[:, :NEXT])
            kl = kl_divergence(self.logits[name], logits).mean(1)
            for row, each in zip(rows, kl.tolist(), strict=True):
                row[f"kl_{name}"] = each
            if name == "text":
                gold = following[:, 1:, None]
                both = (self.logits[name].log_softmax(-1), logits.log_softmax(-1))
                loss = (both[0].gather(-1, gold) - both[1].gather(-1, gold)).flatten(1).mean(1)
                for row, each in zip(rows, loss.tolist(), strict=True):
                    row["loss"] = each
        # (layers, passages, KV heads)
        errors = torch.stack([self._errors(view, store) for view, store in zip(self.later, stores)])
        for number, row in enumerate(rows):
            own = errors[:, number]
            heads_apart = own.amax(1) / own.amin(1).clamp_min(1e-30)
            row["mse"], row["heads_apart"] = float(own.mean()), float(heads_apart.max())
            row["layers"] = [float(f"{error:.3g}") for error in own.mean(1).tolist()]
        return rows, stores

    def _errors(self, view: LayerView, store: Store) -> Tensor:
        """Mean squared output error of each passage's KV heads for the generated tokens' queries, (passages, kv_heads)."""
        query, tail = view.queries, slice(self.tokens, None)
        last = torch.arange(self.tokens, view.tokens, device=query.device)
        mask = (torch.arange(view.tokens, device=query.device) <= last[:, None])[None, None]
        exact, _ = attend(query, view.keys, view.values, view.scaling, mask)
        own = attend(query, view.keys[:, :, tail], view.values[:, :, tail], view.scaling, mask[..., tail])
        context = AttendContext(view.scaling, None, None, view.rotary)
        folded, _ = merge([store.attend(query, None, context), own])
        return (folded.float() - exact).square().view(*view.keys.shape[:2], -1).mean(2).cpu()


def of_heads(heads: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many heads went back to the fit and how many diverged, and errors summed over heads, (of the fit, of what was kept)."""
    heads = [head for head in heads if "held_out" in head]
    if not heads:
        return {}
    return {
        "heads": len(heads),
        "keys_of_tokens": sum(head["keys_of_tokens"] == head["pieces"] for head in heads),
        "diverged": sum(head["diverged"] for head in heads),
        "trained": [float(f"{sum(head['trained'][i] for head in heads):.4g}") for i in (0, 1)],
        "held_out": [float(f"{sum(head['held_out'][i] for head in heads):.4g}") for i in (0, 1)],
    }


def wait(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def passages(tokenizer: Any, texts: list[Path], count: int, tokens: int) -> dict[tuple[int, str], Tensor]:
    """Ids (1, tokens + NEXT + 1) of passage (number, text), by number."""
    found = {}
    for path in texts:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
        ids = tokenizer(text, return_tensors="pt").input_ids
        for number in range(count):
            start = (ids.shape[1] - tokens - NEXT - 1) * (2 * number + 1) // (2 * max(count, 8))
            found[number, path.name.split(".")[0]] = ids[:, start : start + tokens + NEXT + 1]
    return dict(sorted(found.items(), key=lambda item: item[0][0]))


def write(out: Path, row: dict[str, Any]) -> None:
    shown = {name: row.get(name) for name in ("text", "passage", "keep", "form", "bytes", "seconds")}
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
    parser.add_argument("--together", type=int, default=1, help="passages of a text in one batch")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    # A batch has as much more room as it has more rows, so that its heads still go together.
    for of, name in ((kvsculpt, "SLICE_BYTES"), (distil, "WEIGHTS_BYTES")):
        setattr(of, name, tuple(size * args.together for size in getattr(of, name)))
    model, tokenizer = load_model(args.model)
    done = set()
    if args.out.exists():
        for line in args.out.read_text().splitlines():
            row = json.loads(line)
            if row["tokens"] == args.tokens:
                done.add((row["model"], row["text"], row["passage"], row["keep"], row["form"]))
    about = {
        "model": Path(args.model).name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "tokens": args.tokens,
    }
    about |= {"hardware": hardware(model.device.type), **versions()}
    # Every form's, in any case: a passage is read for all at once.
    methods = [make(keep) for keep in args.keep for make in FORMS.values()]
    ids = passages(tokenizer, args.texts, args.passages, args.tokens)
    ids = {where: each.to(model.device) for where, each in ids.items()}
    at_once = len(ids) if model.device.type == "cuda" else 1
    generated: dict[tuple[int, str], Tensor] = {}
    read: dict[tuple[int, str], Passages] = {}

    def passage(first: int, text: str) -> Passages:
        """Those of a text from the first on that go together."""
        own = [where for where in ids if where[1] == text][first : first + args.together]
        if own[0] not in generated:
            some = own if at_once == 1 else list(ids)
            prompts = torch.cat([ids[each][:, : args.tokens] for each in some])
            for part in range(0, len(some), at_once):
                each = slice(part, part + at_once)
                found = continuations(model, prompts[each], [number for number, _ in some[each]]).split(1)
                generated.update(zip(some[each], found, strict=True))
        if own[0] not in read:
            if len(read) == len(args.texts):
                del read[next(iter(read))]
            whole, after = (torch.cat([of[where] for where in own]) for of in (ids, generated))
            read[own[0]] = Passages(model, whole, args.tokens, after, methods)
        return read[own[0]]

    def told(first: int, text: str, keep: float, form: str, method: Method) -> tuple[Store, ...]:
        found, stores = passage(first, text).measure(method)
        for number, row in enumerate(found, first):
            done.add((about["model"], text, number, keep, form))
            write(args.out, {"text": text, "passage": number, "keep": keep, "form": form, **row, **about})
        return stores

    def missing(first: int, keep: float, form: str) -> Iterator[str]:
        """Texts whose passages do not all have a row, while there is time."""
        numbers = range(first, min(first + args.together, args.passages))
        cells = {text: [(about["model"], text, n, keep, form) for n in numbers] for _, text in ids}
        return (text for text, own in cells.items() if time.monotonic() < end and not done.issuperset(own))

    for first in range(0, args.passages, args.together):
        for keep in args.keep:
            for form in args.forms:
                if (first or keep != args.keep[0]) and form in FIRST_ONLY:
                    continue
                for text in missing(first, keep, form):
                    stores = told(first, text, keep, form, FORMS[form](keep))
                    for bits in CODES if form == "kvsculpt" else ():
                        coded = Done(stores=stores) >> BlockGTQ(bits=bits)
                        told(first, text, keep, f"kvsculpt >> {bits} bits", coded)
        for bits in CODES:
            for text in missing(first, 1.0, f"{bits} bits"):
                told(first, text, 1.0, f"{bits} bits", BlockGTQ(bits=bits))


if __name__ == "__main__":
    main()
