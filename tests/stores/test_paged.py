"""Pages against lists of tokens: whatever is appended and evicted, each slot holds its own, and no memory is added."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvfold import DBTrimKV
from kvfold.ledger import tensor_bytes
from kvfold.stores.base import AttendContext
from kvfold.stores.paged import PAGE, Pages, Tokens
from kvfold.stores.retained import RetainedLayout, RetainedStore

LAYERS, ROWS, HEADS, KEY, VALUE = 2, 2, 3, 8, 6
SLOTS = LAYERS * ROWS * HEADS


class Lists:
    """The same as `Pages`, in Python lists of (position, log beta, key, value)."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.slots = [[] for _ in range(SLOTS)]
        self.new = []

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator).half().float()

    def stores(self, tokens, counts):
        """Stores that keep so many of `tokens` in each slot, and the lists filled with the same."""
        stores = []
        for layer in range(LAYERS):
            mine = counts[layer * ROWS * HEADS : (layer + 1) * ROWS * HEADS]
            kept = sum(mine)
            keys, values, log_beta = self.draw(kept, KEY), self.draw(kept, VALUE), -self.draw(kept).abs()
            positions = [
                torch.randperm(tokens, generator=self.generator)[:count].sort().values for count in mine
            ]
            buffers = {
                "counts": torch.tensor(mine, dtype=torch.int32).view(ROWS, HEADS),
                "keys": keys.half(), "values": values.half(), "log_beta": log_beta,
                "positions": torch.cat(positions).short(),
            }  # fmt: skip
            stores.append(RetainedStore(RetainedLayout(tokens, (tokens, tokens - 2)), buffers))
            at = 0
            for slot, where in enumerate(positions, layer * ROWS * HEADS):
                for position in where.tolist():
                    self.slots[slot].append((position, float(log_beta[at]), keys[at], values[at]))
                    at += 1
        return stores

    def token(self, position):
        """A new token for every slot, by layer; the log betas of those read since the last eviction are in `new`."""
        found = []
        for layer in range(LAYERS):
            key, value = self.draw(ROWS, HEADS, 1, KEY), self.draw(ROWS, HEADS, 1, VALUE)
            log_beta = -self.draw(ROWS, HEADS, 1).abs()
            for index in range(ROWS * HEADS):
                k, v = key.flatten(0, 2)[index], value.flatten(0, 2)[index]
                self.slots[layer * ROWS * HEADS + index].append(
                    (position, float(log_beta.flatten()[index]), k, v)
                )
            found.append((key, value, log_beta))
        self.new.append(torch.stack([states[2] for states in found]))
        return found

    def log_beta(self, ahead):
        """(layers, rows, kv_heads, ahead), NaN where no token was read."""
        new, self.new = torch.cat(self.new, 3), []
        return torch.nn.functional.pad(new, (0, ahead - new.shape[3]), value=torch.nan)


def contents(pages):
    """(slot, position, log beta, key, value) of every token, from what the attention sees."""
    found = set()
    for layer in pages.layers:
        for slot, count in enumerate(layer.counts.tolist()):
            places = layer.places(torch.tensor(slot), torch.arange(count))
            for place in places.tolist():
                states = tuple(layer.keys[place].tolist()), tuple(layer.values[place].tolist())
                found.add(
                    (
                        layer.first_slot + slot,
                        int(layer.positions[place]),
                        float(layer.log_beta[place]),
                        *states,
                    )
                )
    return found


def expected(lists):
    return {
        (slot, position, log_beta, tuple(key.tolist()), tuple(value.tolist()))
        for slot, tokens in enumerate(lists.slots)
        for position, log_beta, key, value in tokens
    }


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_to_tokens(seed):
    lists = Lists(seed)
    draw = lists.generator
    counts = torch.randint(0, 40, (SLOTS,), generator=draw).tolist()
    stores = lists.stores(50, counts)
    tails = [
        Tokens(*(torch.cat(part, 2) for part in zip(*tokens)))
        for tokens in zip(*(lists.token(position) for position in (50, 51, 52)))
    ]
    ahead, bound = 7, sum(counts) + 20
    pages = Pages(stores, tails, bound, ahead)
    size, addresses = sum(map(tensor_bytes, pages.tensors())), [x.data_ptr() for x in pages.tensors()]
    assert contents(pages) == expected(lists)
    step, seen = torch.zeros(1, dtype=torch.long), 53
    for _ in range(6):
        for _ in range(ahead - pages.newer):
            for number, (key, value, _) in enumerate(lists.token(seen)):
                pages.append(number, key, value, step, 53)
            step += 1
            seen += 1
            pages.read()
        log_beta = lists.log_beta(ahead)
        if seen == 57:  # those of the tails are known
            log_beta[..., :3] = torch.nan
        pages.judge(log_beta)
        assert contents(pages) == expected(lists)
        # Some slots win all and others lose all: what is kept is drawn with a chance of its own for each slot.
        chance = torch.rand(SLOTS, generator=draw).round(decimals=1) * 1.3

        def choose(entries, chance=chance, seen=seen):
            found = entries.alive.nonzero()[:, 0].tolist()
            assert len(found) == sum(map(len, lists.slots)) and int(entries.tokens) == seen
            assert entries.padding.tolist() == [0, 2] and entries.limits.tolist() == [5, 6]
            slots, positions = entries.slots.tolist(), entries.positions.tolist()
            kept = [i for i in found if float(torch.rand(1, generator=draw)) < float(chance[slots[i]])]
            names = {(slots[i], positions[i]) for i in kept[:bound]}
            for slot, tokens in enumerate(lists.slots):
                lists.slots[slot] = [token for token in tokens if (slot, token[0]) in names]
            chosen = torch.zeros_like(entries.alive)
            chosen[kept[:bound]] = True
            return chosen

        pages.begin_eviction([5, 6])
        pages.evict(choose)
        pages.end_eviction()
        assert contents(pages) == expected(lists)
    assert [x.data_ptr() for x in pages.tensors()] == addresses
    assert sum(map(tensor_bytes, pages.tensors())) == size
    # The pool is what was asked for, with less than a page to spare in each slot.
    entry = 4 * (KEY + VALUE + 2)
    tables = 4 * (3 * SLOTS + 2 + SLOTS * 3) + 8 * (2 * ROWS + 2)
    most = (bound + SLOTS * (ahead + PAGE - 1)) // PAGE
    assert size <= most * PAGE * entry + tables + 4 * (most + most // 4)
    for new in (0, 2):
        for _ in range(new):
            for number, (key, value, _) in enumerate(lists.token(seen)):
                pages.append(number, key, value, step, 53)
            step, seen = step + 1, seen + 1
            pages.read()
        if new:
            pages.judge(lists.log_beta(ahead))
        back = pages.give_back()
        for layer, (store, tail) in enumerate(back):
            assert store.tokens == seen - new and store.real_tokens == (seen - new, seen - new - 2)
            assert tail.keys.shape == (ROWS, HEADS, new, KEY) and tail.log_beta.shape == (ROWS, HEADS, new)
            for row in range(ROWS):
                for head in range(HEADS):
                    tokens = sorted(
                        lists.slots[(layer * ROWS + row) * HEADS + head], key=lambda token: token[0]
                    )
                    old = [token for token in tokens if token[0] < seen - new]
                    kept = store.kept(row, head)
                    assert kept.positions.tolist() == [token[0] for token in old]
                    for index, token in enumerate(old):
                        assert torch.equal(kept.keys[index], token[2])
                        assert torch.equal(kept.values[index], token[3])
                    for index, token in enumerate(tokens[len(old) :]):
                        assert torch.equal(tail.keys[row, head, index], token[2])
                        assert float(tail.log_beta[row, head, index]) == token[1]


def test_a_store_in_pages_attends_as_the_store():
    lists = Lists(5)
    stores = lists.stores(60, torch.randint(0, 60, (SLOTS,), generator=lists.generator).tolist())
    none = torch.zeros(ROWS, HEADS, 0, KEY)
    tail = Tokens(none, none[..., :VALUE], none[..., 0])
    pages = Pages(stores, [tail] * LAYERS, 0, 16)
    query = lists.draw(ROWS, HEADS * 2, 1, KEY)
    context = AttendContext(0.3, 4.0)
    for number, store in enumerate(stores):
        one, two = store.attend(query, None, context), pages.attend(number, query, context)
        assert torch.allclose(one[0], two[0], atol=1e-5) and torch.allclose(one[1], two[1], atol=1e-5)


def test_more_than_the_pool_holds():
    lists = Lists(0)
    tail = Tokens(*lists.token(40)[0])
    pages = Pages(lists.stores(40, [5] * SLOTS), [tail] * LAYERS, 5 * SLOTS + 1, 3)
    pages.evict(lambda entries: entries.alive)
    with pytest.raises(ValueError, match="room for"):
        pages.end_eviction()


def test_evicting_waits_for_no_device():
    """Nothing that a step or an eviction does asks the device for a number, so that CUDA graphs can hold both."""
    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.add(str(function))
            return function(*args, **(kwargs or {}))

    lists = Lists(1)
    tails = [Tokens(*states) for states in lists.token(40)]
    pages = Pages(lists.stores(40, [9] * SLOTS), tails, 9 * SLOTS, 3)
    new = lists.token(41)
    for method in (
        DBTrimKV(tokens=9, sinks=2, recent=3, lookahead=4), DBTrimKV(threshold=0.5), DBTrimKV(tokens=9, scope="head"),
    ):  # fmt: skip
        pages.begin_eviction([9 * SLOTS // ROWS] * ROWS)
        with Watch():
            for number, (key, value, _) in enumerate(new):
                pages.append(number, key, value, torch.zeros(1), 41)
            pages.judge(-torch.rand(LAYERS, ROWS, HEADS, 3))
            pages.evict(method.choose)
    assert "aten.sort.stable" in seen
    assert not seen & {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.is_nonzero.default"}
