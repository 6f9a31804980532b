"""Where children learn: text that no other stage has read, and a run in a folder of its own for each child."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from transformers import AutoModelForCausalLM

from planish.compress.deliver import write_untaught
from planish.compress.eta import Note
from planish.compress.journal import Journal, key_of
from planish.compress.judge import Judge, Whole
from planish.compress.learn import learn, tokens_of
from planish.compress.library import Library
from planish.compress.order import Order
from planish.compress.settle import quality
from planish.compress.space import Architecture
from planish.compress.stack import Stack
from planish.compress.text import write_rest
from planish.compress.tournament import Entrant, compete, rounds_of
from planish.data.encode import Tokenizer
from planish.runfile import RunFile
from planish.sections import MemorySection, SaveSection


class School:
    """The lessons of one order; its text is written when it opens, so that too little is said at once.

    Args:
        order: The settings, lessons among them.
        lessons: How children learn.
        parent: The parent's folder.
        tokenizer: The parent's.
        note: Called with a sentence now and then.

    Raises:
        UsageError: No text is left for lessons.
    """

    def __init__(self, order: Order, lessons: RunFile, parent: Path, tokenizer: Tokenizer, note: Note) -> None:
        self._order, self._lessons, self._parent, self._note = order, lessons, parent, note
        self._text = order.out / "lessons.bin"
        self._read = write_rest(
            order.text,
            tokenizer,
            self._text,
            skip=sum(order.rows) * order.context,
            count=max(tokens_of(lessons), order.tournament_tokens),
            at_least=order.context,
        )

    @property
    def step_tokens(self) -> int:
        """Tokens of one step."""
        return tokens_of(self._lessons) // self._lessons.train.steps

    def taught(self, library: Library, child: Architecture, start: Path | None = None) -> tuple[Path, str]:
        """Return the folder of a child that had all lessons, and a hash of what it is made of.

        Args:
            library: Of its blocks.
            child: Its layers.
            start: What it has learned already, as `trained` returns it; default: nothing.
        """
        begun = "" if start is None else f"{start.parent.parent.name} {start.name}"
        name = self._name(library, child, self._lessons, begun)
        return self._learn(library, child, self._lessons, name, start), name

    def trained(self, library: Library, child: Architecture, *, steps: int, warmup: int) -> Path:
        """Return the folder of a child after `steps` steps at one rate, to which more may come."""
        lessons = replace(
            self._lessons,
            train=replace(self._lessons.train, steps=steps, warmup=warmup, schedule="constant"),
            save=replace(self._lessons.save, every=0),
        )
        endless = replace(lessons, train=replace(lessons.train, steps=2**40))
        return self._learn(library, child, lessons, self._name(library, child, endless, "tournament"), None)

    def tournament(
        self, library: Library, candidates: Mapping[str, Architecture], judge: Judge
    ) -> tuple[list[Entrant], Path]:
        """Return how candidates fared in `order.tournament_tokens`, the winner first, and the folder of the winner.

        Args:
            library: Of their blocks.
            candidates: By how they were found.
            judge: On text that ranks them.
        """
        steps = self._order.tournament_tokens // self.step_tokens
        warmup = rounds_of(len(candidates), steps)[0][1] // 2
        key = key_of(library.made_from, judge.rows.tolist(), judge.counted_per_row, self._read, self._lessons.to_toml())
        journal = Journal(self._order.out / "tournament.jsonl", key)

        def teach(child: Architecture, steps: int) -> float:
            name = key_of(child.to_tree(), steps, warmup)
            if name not in journal:
                reader = Stack(library, child) if steps == 0 else self._opened(library, child, steps, warmup)
                journal.put(name, quality(reader, judge).kl)
            return journal[name]

        entrants = compete(candidates, teach, steps)
        for each in entrants:
            self._note(
                f"tournament: {each.name}, KL {each.before:.4f} -> {each.after:.4f} after {each.steps} steps, place "
                f"{each.rank_before} -> {each.rank_after}"
            )
        winner = entrants[0]
        return entrants, self.trained(library, winner.architecture, steps=winner.steps, warmup=warmup)

    def _opened(self, library: Library, child: Architecture, steps: int, warmup: int) -> Whole:
        folder = self.trained(library, child, steps=steps, warmup=warmup)
        return Whole(AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval())

    def _name(self, library: Library, child: Architecture, lessons: RunFile, begun: str) -> str:
        """Return a hash of all that a lesson's result depends on; budget and checkpoints are not."""
        how = replace(lessons, memory=MemorySection(), save=SaveSection()).to_toml()
        return key_of(library.made_from, child.to_tree(), self._read, how, begun)

    def _learn(self, library: Library, child: Architecture, lessons: RunFile, name: str, start: Path | None) -> Path:
        if start is None:
            start = self._order.out / "searched"
            write_untaught(library, child, start, self._parent)
        return learn(start, self._text, lessons, self._order.out / "learned" / name, self._note)
