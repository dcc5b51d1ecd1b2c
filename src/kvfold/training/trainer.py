"""Train a model's retention gates: the model stays as it is, and is its own teacher."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.hf.fingerprint import fingerprint
from kvfold.hf.support import cache_shape, check_supported, folds, stock_layers, text_config
from kvfold.methods.gates import GateConfig, RetentionGates, Tie, TrainedGates
from kvfold.training.attention import Backend, best_backend, forgetting
from kvfold.training.checkpoint import load_state, save_state
from kvfold.training.data import batch_of, digest_of
from kvfold.training.loss import capacity_loss, next_token_losses, soft_size

EPS = 1e-15
"""AdamW's. A beta of 1 - 1e-8, where gates begin, has gradients that torch's 1e-8 would drown."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train.

    Attributes
    ----------
    budget : int
        Tokens a head that the soft cache should fit (the paper's M).
    scope : "model" or "head"
        One budget for all heads of all layers (DBTrimKV), or one for each (TrimKV).
    steps, batch, accumulate : int
        Updates of the weights; rows at a time on each device; times that many before an update.
    lr, weight_decay : float
        Of AdamW. The rate rises over the first `warmup` steps, and falls to a tenth by half a cosine.
    warmup : int
    kl, ntp, capacity : float
        Weights of the three losses.
    width, depth, features : int
    tie : "all", "layers" or "none"
    bias : float
        Of the gates: see `kvfold.methods.gates.GateConfig`.
    seed : int
        Of the first weights and the order of rows.
    """

    budget: int = 128
    scope: Literal["model", "head"] = "model"
    steps: int = 300
    batch: int = 1
    accumulate: int = 4
    lr: float = 2e-4
    weight_decay: float = 0.01
    warmup: int = 10
    kl: float = 1.0
    ntp: float = 1.0
    capacity: float = 1.0
    width: int = 512
    depth: int = 2
    features: int = 32
    tie: Tie = "all"
    bias: float = 18.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("budget", "steps", "batch", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("kl", "ntp", "capacity", "weight_decay", "warmup"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not self.lr > 0:
            raise ValueError(f"lr must be above 0, got {self.lr}")
        if self.scope not in ("model", "head"):
            raise ValueError(f"scope must be model or head, got {self.scope!r}")

    def rate(self, step: int) -> float:
        """Learning rate of a step, from 0 on."""
        rise = min((step + 1) / (self.warmup + 1), 1.0)
        return self.lr * rise * (0.55 + 0.45 * math.cos(math.pi * step / self.steps))


@dataclass(frozen=True)
class Figures:
    """What a step found, averaged over its rows.

    Attributes
    ----------
    step : int
        From 1 on.
    kl, ntp, capacity : float
        The three losses, unweighted, in nats (capacity: a share of the cache).
    beta : float
        Mean beta.
    size : float
        Soft cache size after a row's last token, in tokens a head.
    largest, smallest : float
        The same of the heads that keep most and least.
    seconds : float
        Since training began or was resumed.
    """

    step: int
    kl: float
    ntp: float
    capacity: float
    beta: float
    size: float
    largest: float
    smallest: float
    seconds: float


@dataclass
class Trainer:
    """Trains gates on rows of tokens.

    Parameters
    ----------
    model : transformers causal language model
        Its parameters are frozen while it trains, and as they were afterwards.
    rows : (n, tokens) int64
        Rows of text, no padding: see `kvfold.training.data.pack`.
    config : TrainConfig
    folder : path, optional
        Where the state is saved, and found again when a run was stopped: the same weights come out.
    save_every : int
        Steps between two saves.
    checkpointing : bool
        Work activations of decoder layers out again in the backward pass, which takes less memory.
    backend : "blocks" or "flex", optional
        See `kvfold.training.attention`; by default the best that works here.

    Raises
    ------
    KvfoldError
        The folder holds a run of other settings, texts or model; a model that cannot be trained.
    """

    model: Any
    rows: Tensor
    config: TrainConfig
    folder: Path | None = None
    save_every: int = 50
    checkpointing: bool = False
    backend: Backend | None = None
    history: list[Figures] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_supported(self.model)
        config = self.config
        self.fingerprint = fingerprint(self.model)
        self.backend = self.backend or best_backend(self.model)
        layers = tuple(index for index, layer in enumerate(stock_layers(self.model.config)) if folds(layer))
        shape = GateConfig(
            layers=layers,
            hidden_size=int(text_config(self.model.config).hidden_size),
            kv_heads=cache_shape(self.model.config).kv_heads,
            width=config.width,
            depth=config.depth,
            features=config.features,
            tie=config.tie,
            bias=config.bias,
        )
        self.gates = RetentionGates(shape, torch.Generator().manual_seed(config.seed)).to(self.model.device)
        self.optimizer = torch.optim.AdamW(
            self.gates.parameters(), lr=config.lr, eps=EPS, weight_decay=config.weight_decay
        )
        self.ranks = _Ranks()
        self.step = 0
        if self.folder is not None:
            self._resume()

    # ---- the loop ----

    def train(
        self, report: Callable[[Figures], None] | None = None, until: int | None = None
    ) -> TrainedGates:
        """Train to the end, or to step `until`, and return the gates; `report` is told of each step."""
        start = time.perf_counter()
        last = min(until or self.config.steps, self.config.steps)
        with _frozen(self.model, self.checkpointing):
            while self.step < last:
                figures = self._update(start)
                self.history.append(figures)
                self.step += 1
                if report is not None:
                    report(figures)
                if self.folder is not None and (self.step % self.save_every == 0 or self.step == last):
                    self._save()
        return self.trained()

    def _update(self, start: float) -> Figures:
        """One update of the weights."""
        config, ranks = self.config, self.ranks
        for group in self.optimizer.param_groups:
            group["lr"] = config.rate(self.step)
        self.optimizer.zero_grad(set_to_none=True)
        found = []
        for turn in range(config.accumulate):
            number = (self.step * config.accumulate + turn) * ranks.count + ranks.index
            ids = batch_of(self.rows, number, config.batch, config.seed)
            found.append(self._backward(ids.to(self.model.device)))
        means = ranks.mean(torch.stack(found).mean(0))
        ranks.average_gradients(self.gates)
        if not bool(torch.isfinite(means).all()):
            raise KvfoldError(
                f"a loss is not finite at step {self.step + 1}: lower lr, or load the model in bfloat16 or float32"
            )
        self.optimizer.step()
        kl, ntp, capacity, beta, size, largest, smallest = means.tolist()
        seconds = time.perf_counter() - start
        return Figures(self.step + 1, kl, ntp, capacity, beta, size, largest, smallest, seconds)

    def _backward(self, ids: Tensor) -> Tensor:
        """Add a batch's gradients; returns its figures from `kl` to `smallest`."""
        config = self.config
        with torch.no_grad():
            teacher = self.model(ids, use_cache=False).logits
        assert self.backend is not None
        # The backward pass too: checkpointed layers attend again in it.
        with forgetting(self.model, self.gates, self.backend) as seen:
            student = self.model(ids, use_cache=False).logits
            log_beta = torch.cat([seen[layer].to(ids.device) for layer in self.gates.config.layers], 1)
            kl, ntp = next_token_losses(teacher, student, ids)
            size = soft_size(log_beta)
            over = capacity_loss(size, config.budget, config.scope)
            loss = config.kl * kl + config.ntp * ntp + config.capacity * over
            (loss / config.accumulate).backward()
        with torch.no_grad():
            end = size[..., -1].mean(0)
            figures = (kl, ntp, over, log_beta.exp().mean(), end.mean(), end.max(), end.min())
            return torch.stack([figure.float() for figure in figures])

    def trained(self) -> TrainedGates:
        """The gates as they are now."""
        facts = {
            "model": getattr(self.model.config, "name_or_path", None),
            "train": asdict(self.config),
            "tokens": self.rows.shape[1],
            "rows": len(self.rows),
            "digest": digest_of(self.rows),
            "step": self.step,
            "last": asdict(self.history[-1]) if self.history else None,
        }
        return TrainedGates(self.gates, self.fingerprint, facts)

    # ---- stopping and going on ----

    def _about(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        return {
            "train": asdict(self.config),
            "fingerprint": self.fingerprint,
            "digest": digest_of(self.rows),
            "ranks": self.ranks.count,
        }

    @property
    def _file(self) -> Path:
        assert self.folder is not None
        return self.folder / "state.safetensors"

    def _save(self) -> None:
        if self.ranks.index == 0:
            history = [asdict(figures) for figures in self.history]
            save_state(self._file, self.gates, self.optimizer, {**self._about(), "history": history})

    def _resume(self) -> None:
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._file.exists():
            return
        about = load_state(self._file, self.gates, self.optimizer)
        history = about.pop("history")
        mine = json.loads(json.dumps(self._about()))
        different = [name for name in mine if mine[name] != about.get(name)]
        if different:
            raise KvfoldError(
                f"{self.folder} holds a run with other {' and '.join(_WORDS[name] for name in different)}: go on with"
                " the same, or choose another folder"
            )
        self.history = [Figures(**figures) for figures in history]
        self.step = len(self.history)


_WORDS = {"train": "settings", "fingerprint": "model", "digest": "texts", "ranks": "number of processes"}


class _Ranks:
    """The processes of an `accelerate launch`, or this one alone."""

    def __init__(self) -> None:
        self.count, self.index = 1, 0
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.count, self.index = torch.distributed.get_world_size(), torch.distributed.get_rank()

    def mean(self, x: Tensor) -> Tensor:
        """Average over processes."""
        if self.count > 1:
            torch.distributed.all_reduce(x)
            x /= self.count
        return x

    def average_gradients(self, gates: RetentionGates) -> None:
        """Gates are called once a layer, outside any wrapper's forward: their gradients are averaged here."""
        if self.count == 1:
            return
        gradients = [parameter.grad for parameter in gates.parameters() if parameter.grad is not None]
        flat = self.mean(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
            gradient.copy_(part.view_as(gradient))


@contextmanager
def _frozen(model: Any, checkpointing: bool) -> Iterator[None]:
    """No gradients for the model's own weights and no dropout; all as before afterwards."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    modes = {module: module.training for module in model.modules()}
    model.requires_grad_(False).eval()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in model.modules():
            # Only what checkpoints: dropout stays off.
            module.training = hasattr(module, "gradient_checkpointing")
    try:
        yield
    finally:
        if checkpointing:
            model.gradient_checkpointing_disable()
        for module, mode in modes.items():
            module.training = mode
        for parameter in wanted:
            parameter.requires_grad_(True)
