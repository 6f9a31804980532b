"""Random programs: after every operation the ledger agrees with a count of all storages that are in reach."""

import contextlib
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import _disable_current_modes

from planish.memory import book
from planish.memory.book import CATEGORIES, PHASES
from planish.memory.ledger import Ledger

DEFAULT_CATEGORIES = {
    "init": "other",
    "forward": "layer working set",
    "head": "head tiles",
    "backward": "layer working set",
    "optimizer": "staging",
    "eval": "layer working set",
    "save": "staging",
    "resume": "staging",
}
NEED_NOTHING = ["new", "listed", "foreach", "foreign"]
SIZE = st.integers(0, 40)
WHICH = st.integers(0, 10**6)
ACTION = st.one_of(
    st.tuples(st.sampled_from(NEED_NOTHING), SIZE),
    st.tuples(st.sampled_from(["double", "view", "split", "in place", "replace", "empty and refill"]), WHICH),
    st.tuples(st.sampled_from(["drop", "drop all views"]), WHICH),
    st.tuples(st.sampled_from(["out", "set"]), WHICH, WHICH),
    st.tuples(st.sampled_from(["resize", "grow"]), WHICH, SIZE),
    st.tuples(st.just("adopt"), WHICH, st.sampled_from(CATEGORIES)),
)
PROGRAM = st.lists(st.tuples(st.sampled_from(PHASES), st.sampled_from([None, *CATEGORIES]), ACTION), max_size=40)


@dataclass
class Life:
    """A storage at one size."""

    nbytes: int
    category: str


@dataclass
class Count:
    """Counts by looking at every tensor in reach, and knows nothing of how the ledger does it."""

    ledger: Ledger
    category: str | None = None
    pool: list = field(default_factory=list)
    foreign: set = field(default_factory=set)
    lives: dict = field(default_factory=dict)
    worst: dict = field(default_factory=dict)

    def pick(self, index):
        return self.pool[index % len(self.pool)]

    def look(self, *also):
        tensors = [*self.pool, *also]
        tensors += [each._base for each in tensors if each._base is not None]  # a view keeps it, even after `set_`
        storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
        self.foreign &= set(storages)
        self.lives = {key: life for key, life in self.lives.items() if key in storages}
        for key in storages.keys() - self.foreign:
            life = self.lives.get(key)
            if life is None:
                self.lives[key] = Life(storages[key], self.category or DEFAULT_CATEGORIES[self.ledger.current_phase])
            elif life.nbytes != storages[key]:
                self.lives[key] = Life(storages[key], life.category)
        live_bytes = sum(life.nbytes for life in self.lives.values())
        assert self.ledger.live_bytes == live_bytes
        assert self.ledger.live_by_category == by_category(self.lives.values())
        if live_bytes > self.worst.get(self.ledger.current_phase, (-1,))[0]:
            self.worst[self.ledger.current_phase] = live_bytes, list(self.lives.values())


def by_category(lives):
    sums = dict.fromkeys(CATEGORIES, 0)
    for life in lives:
        sums[life.category] += life.nbytes
    return sums


def make(count, action):
    """Return the tensors that `action` makes; what it drops on the way is looked at first."""
    match action:
        case "new", size:
            return [torch.ones(size)]
        case "listed", size:
            return [torch.tensor([1.0] * size)]
        case "foreach", size:
            inputs = [torch.ones(size), torch.ones(size + 1)]
            outputs = torch._foreach_add(inputs, 1.0)
            count.look(*inputs, *outputs)
            return outputs
        case "foreign", size:
            with _disable_current_modes():
                made = torch.ones(size)
            count.foreign.add(made.untyped_storage()._cdata)
            return [made]
        case "double", i:
            return [count.pick(i) * 2]
        case "view", i:
            return [count.pick(i)[1:]]
        case "split", i:
            return list(count.pick(i).split(3))
    return []


def change(count, action):
    """Do what `action` does to the tensors that are there."""
    match action:
        case "in place", i:
            count.pick(i).mul_(2)
        case "out", i, j:
            source, out = count.pick(i), count.pick(j)
            apart = source.untyped_storage()._cdata != out.untyped_storage()._cdata
            if apart and (source.shape == out.shape or not out.numel()):
                torch.mul(source, 2, out=out)
        case "set", i, j:
            count.pick(i).set_(count.pick(j))
        case "resize", i, size:
            count.pick(i).resize_(size)
        case "grow", i, size:
            storage = count.pick(i).untyped_storage()
            storage.resize_(storage.nbytes() + 4 * size)
        case "empty and refill", i:
            storage = count.pick(i).untyped_storage()
            nbytes = storage.nbytes()
            storage.resize_(0)
            count.look()
            storage.resize_(nbytes)
        case "adopt", i, category:
            storage = count.pick(i).untyped_storage()
            count.foreign.discard(storage._cdata)
            count.ledger.adopt(count.pick(i), category)
            count.lives.setdefault(storage._cdata, Life(storage.nbytes(), category)).category = category


def drop(count, action):
    """Let go of the tensors that `action` names."""
    pool = count.pool
    match action:
        case "drop", i:
            del pool[i % len(pool)]
        case "drop all views", i:
            key = count.pick(i).untyped_storage()._cdata
            pool[:] = [each for each in pool if each.untyped_storage()._cdata != key]
        case "replace", i:
            made = count.pick(i) + 1
            count.look(made)
            pool[i % len(pool)] = made


@pytest.mark.parametrize("prune_at", [1, 4096])
@settings(deadline=None, max_examples=150)
@given(program=PROGRAM)
def test_the_ledger_counts_what_is_in_reach(prune_at, program):
    ledger = Ledger()
    count = Count(ledger)
    with pytest.MonkeyPatch.context() as patch, ledger:
        patch.setattr(book, "_PRUNE_AT", prune_at)
        for phase, category, action in program:
            with ledger.phase(phase), ledger.category(category) if category else contextlib.nullcontext():
                count.category = category
                count.look()
                if count.pool or action[0] in NEED_NOTHING:
                    made = make(count, action)
                    count.look(*made)
                    count.pool += made
                    del made
                    change(count, action)
                    count.look()
                    drop(count, action)
                    count.look()
        memory = ledger.end_step()
    assert ledger.peak_bytes == {phase: live_bytes for phase, (live_bytes, _) in count.worst.items()}
    for phase, (live_bytes, lives) in count.worst.items():
        peak = memory.phases[phase]
        assert peak.peak_bytes == live_bytes == sum(peak.categories.values())
        assert peak.categories == {name: nbytes for name, nbytes in by_category(lives).items() if nbytes}
    assert max((nbytes for _, nbytes, _ in memory.timeline), default=0) == memory.peak_bytes
    count.pool.clear()
    assert ledger.live_bytes == 0
    assert not any(ledger.live_by_category.values())
