"""What every store must do, checked against float64 attention over its own decoded content."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvfold.stores import store_from_state
from kvfold.stores.base import AttendContext


class Turn:
    """A rotary embedding of two-dimensional turns, by complex numbers."""

    scale = 1.0

    def _turn(self, x, positions, sign):
        rates = 0.3 ** torch.arange(x.shape[-1] // 2, dtype=torch.float64, device=x.device)
        angles = positions.double()[:, None] * rates * sign
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2).float()

    def rotate(self, x, positions):
        return self._turn(x, positions, 1)

    def unrotate(self, x, positions):
        return self._turn(x, positions, -1)


class SharingTurn(Turn):
    """As the model's: what it makes is shared by the layers of a step. Its last channels stay, if `still`."""

    def __init__(self, still=0, scale=1.0):
        self.still, self.scale, self.made = still, scale, {}

    def _turn(self, x, positions, sign):
        stop = x.shape[-1] - self.still
        rest = x[..., stop:].float().expand(*torch.broadcast_shapes(x.shape[:-1], positions.shape), -1)
        turned = super()._turn(x[..., :stop].cpu(), positions.cpu(), sign).to(x.device)
        return torch.cat([turned, rest], -1) * self.scale

    def shared(self, name, make):
        return self.made.setdefault(name, make()) if name not in self.made else self.made[name]


def exact(store, query, rows=None, scaling=0.1, rotary=None, softcap=None):
    """float64 attention over the decoded content, query by query."""
    batch, heads, count, _ = query.shape
    output = torch.zeros(batch, heads, count, store.value_dim, dtype=torch.float64)
    lse = torch.full((batch, heads, count), -torch.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            kept = store.kept(b if rows is None else int(rows[b]), h * store.kv_heads // heads, rotary)
            if not len(kept.positions):
                continue
            scores = query[b, h].double() @ kept.keys.double().T * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if kept.bias is not None:
                scores = scores + kept.bias.double()
            output[b, h] = scores.softmax(-1) @ kept.values.double()
            lse[b, h] = scores.logsumexp(-1)
    return output, lse


def assert_attends(store, rotary=None, rows=None, queries=3, group=2, softcap=None):
    batch = store.rows if rows is None else len(rows)
    query = torch.randn(batch, store.kv_heads * group, queries, store.key_dim)
    output, lse = store.attend(query, rows, AttendContext(0.1, softcap, rotary=rotary))
    expected, expected_lse = exact(store, query, rows, 0.1, rotary, softcap)
    assert torch.allclose(output.double(), expected, atol=3e-5, rtol=1e-4)
    assert torch.allclose(lse.double(), expected_lse, atol=1e-4)


def assert_same(one, two, rotary=None, rows=None):
    """Both hold the same content; rows maps those of `one` to those of `two`."""
    for new in range(one.rows):
        for head in range(one.kv_heads):
            a, b = one.kept(new, head, rotary), two.kept(new if rows is None else rows[new], head, rotary)
            assert torch.equal(a.positions, b.positions)
            assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


def reached(thing, seen):
    """Every tensor that an object of kvfold's holds, in whatever it is made of, by the place of its storage."""
    if id(thing) in seen:
        return {}
    seen[id(thing)] = thing
    if isinstance(thing, torch.Tensor):
        return {thing.untyped_storage().data_ptr(): thing} if thing.numel() else {}
    if isinstance(thing, Mapping):
        parts = [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple | set | frozenset):
        parts = list(thing)
    elif type(thing).__module__.startswith("kvfold."):
        parts = list(vars(thing).values())
    else:
        return {}
    found = {}
    for part in parts:
        found |= reached(part, seen)
    return found


def assert_accounts(store, attend):
    """Whatever `attend` makes a store keep is its own, or derived, or the process's: then a second one has the very same."""
    moved = {name: tensor.clone() for name, tensor in store.tensors().items()}
    twin = store_from_state(store.kind, moved, store.meta())
    found = []
    for one in (store, twin):
        attend(one)
        found.append(reached(one, {}))
    of_process = found[0].keys() & found[1].keys()
    told = {x.untyped_storage().data_ptr() for x in [*store.tensors().values(), *store.derived] if x.numel()}
    missed = {tuple(found[0][place].shape) for place in found[0].keys() - of_process - told}
    assert not missed, f"{type(store).__name__} keeps tensors of {missed} that it does not tell"
    assert not of_process & told, "what belongs to the process belongs to no store"


def assert_behaves(store, rotary=None):
    """Attention, shared rows, selection, cropping, state and bytes."""
    assert_attends(store, rotary)
    assert_attends(store, rotary, softcap=1.5)
    assert_attends(store, rotary, rows=torch.tensor([store.rows - 1, 0, store.rows - 1]))
    chosen = store.select(torch.tensor([store.rows - 1, 0]))
    assert chosen.rows == 2
    assert_same(chosen, store, rotary, rows=[store.rows - 1, 0])
    assert_attends(chosen, rotary)
    shorter = store.crop(store.tokens - 7)
    assert shorter.tokens == store.tokens - 7 and shorter.nbytes <= store.nbytes
    assert list(shorter.real_tokens) == [max(count - 7, 0) for count in store.real_tokens]
    for row in range(store.rows):
        before, after = store.kept(row, 0, rotary), shorter.kept(row, 0, rotary)
        alive = before.positions < shorter.tokens
        assert torch.equal(before.positions[alive], after.positions)
        # Not bit by bit: some processors round products of fewer rows otherwise.
        torch.testing.assert_close(after.keys, before.keys[alive], atol=1e-5, rtol=1e-5)
    assert_attends(shorter, rotary)
    again = store_from_state(store.kind, store.tensors(), store.meta())
    assert_same(again, store, rotary)
    assert (again.tokens, again.real_tokens, again.nbytes) == (store.tokens, store.real_tokens, store.nbytes)
    again = store_from_state(store.kind, shorter.tensors(), shorter.meta())
    assert_same(again, shorter, rotary)
    query = torch.randn(store.rows, 2 * store.kv_heads, 1, store.key_dim)
    assert_accounts(store, lambda one: one.attend(query, None, AttendContext(0.1, rotary=rotary)))
    assert not store.derived, "plain attention needs no tables"
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in store.tensors().values()
    }
    assert sum(storages.values()) == store.nbytes
    assert set(store.ledger()) == {store.purposes[name] for name in store.tensors()}
