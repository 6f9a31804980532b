"""Documents in, tokens with their targets out: the one place that calls the tokenizer."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import numpy as np
from jinja2 import TemplateError

from planish.data.batch import IGNORED, Piece
from planish.data.document import Document, Message
from planish.errors import UsageError

LossOn = Literal["all", "assistant"]

PART_CHARACTERS = 2**15
_BEFORE_SPACE = re.compile(r"(?<=\S)(?= [^\W_])|(?<=[^\W_])(?=\n)")
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# What a tokenizer that never joins what stands before and after a space tokenises alike, together and one by one.
_PROBES = (("one", "\nTwo"), ("x1", "\n\n  }"), ("é", "\n\t日本"), ("of", " the"), ("(12,", " 345"), (".", " A"))


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    is_fast: bool
    backend_tokenizer: Any
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None

    def __len__(self) -> int:
        """Ids that are known."""

    def __call__(self, text: str, **options: Any) -> Any:
        """Tokenise `text`."""

    def apply_chat_template(self, conversation: list[Message], **options: Any) -> Any:
        """Write `conversation` as text, and tokenise it if asked to."""

    def get_chat_template(self) -> str:
        """Return the default chat template."""


class Encoder:
    """Turns a document into its tokens and targets.

    A text begins with BOS where the tokenizer itself would put one (Gemma, Llama 3) and ends with EOS where it has one,
    with no other special tokens; an empty text gives no token at all. A conversation is exactly what the chat template
    makes of it. Ids of a token file stay as they are.

    Memory: the tokens of the document, and a tokenizer's 200 to 400 bytes for each token of one part: a text is
    tokenised in parts of about `PART_CHARACTERS` that are cut before a space.
    Exactness: equal to tokenising the whole text at once, for tokenizers that never join what stands before a space
    and after it (byte-level BPE does not); one that does is found out when it is given, and then gets each text whole.
    """

    def __init__(self, tokenizer: Tokenizer, *, loss_on: LossOn = "all", count_bytes: bool = False) -> None:
        """Check that `tokenizer` can do what is asked.

        Args:
            tokenizer: A transformers tokenizer.
            loss_on: Count every token, or only what the assistant says.
            count_bytes: Also tell how many bytes of text each target brings.

        Raises:
            UsageError: No fast tokenizer where offsets are needed, or a chat template without generation marks.
        """
        self._tokenizer = tokenizer
        self._assistant = loss_on == "assistant"
        self._count_bytes = count_bytes
        if (self._assistant or count_bytes) and not tokenizer.is_fast:
            need = '`data.loss_on = "assistant"`' if self._assistant else "counting bits per byte"
            raise UsageError(f"{need} needs a fast tokenizer (one with a tokenizer.json), this one gives no offsets.")
        if self._assistant and not _GENERATION_MARK.search(self._template()):
            raise UsageError(
                '`data.loss_on = "assistant"` needs a chat template that marks what the assistant says with '
                '{% generation %} ... {% endgeneration %}; add the marks to the template or use `data.loss_on = "all"`.'
            )
        self._options = {
            "return_attention_mask": False,
            "return_token_type_ids": False,
            "return_offsets_mapping": count_bytes,
            "verbose": False,
        }
        self.vocab_size = len(tokenizer)
        self.eos_id = tokenizer.eos_token_id
        self._opening = [
            each for each in tokenizer("", verbose=False)["input_ids"][:1] if each == tokenizer.bos_token_id
        ]
        self.pad_id = next(each for each in (tokenizer.pad_token_id, self.eos_id, 0) if each is not None)
        self._cuts_before_space = all(self._ids(a + b) == self._ids(a) + self._ids(b) for a, b in _PROBES)

    def check(self, document: Document) -> None:
        """Refuse what can be refused without tokenising.

        Raises:
            UsageError: A text where the assistant's words are asked for, a conversation without a chat template, an
                id that the tokenizer does not know.
        """
        content = document.content
        if isinstance(content, list):
            self._template(document)
        elif self._assistant:
            raise UsageError(
                f'{document.where} is no conversation; `data.loss_on = "assistant"` needs .jsonl with `messages`.'
            )
        if isinstance(content, np.ndarray) and len(content) and content.max() >= self.vocab_size:
            index = int(np.argmax(content >= self.vocab_size))
            raise UsageError(
                f"{document.file.where(document.at + index)} has id {content[index]}, the tokenizer knows ids below "
                f"{self.vocab_size}; tokenise with this tokenizer, or say the dtype in {document.file.path.name}.json."
            )

    def examine(self, document: Document, *, longest: int | None = None) -> None:
        """Refuse all that `__call__` would, and a document of more than `longest` tokens.

        Conversations are written out by the chat template; only what may be too long is tokenised.

        Raises:
            UsageError: It is named with its file and line or byte.
        """
        self.check(document)
        content = document.content
        if isinstance(content, list):
            content = self._written(content, document)
        if longest is not None and self._most_tokens(content) > longest:
            refuse_longer(document, len(self(document)), longest)

    def __call__(self, document: Document) -> Piece:
        """Return the whole document as one piece.

        Raises:
            UsageError: What `check` refuses, or messages that the chat template refuses.
        """
        self.check(document)
        match document.content:
            case str(text):
                return self._text(text)
            case list(messages):
                return self._chat(messages, document)
            case ids:
                return _piece(ids.astype(np.int32), None, None)

    def _text(self, text: str) -> Piece:
        if not text:
            return _piece(np.empty(0, dtype=np.int32), None, None)
        ids, ends, num_bytes = [np.array(self._opening, dtype=np.int32)], [np.zeros(len(self._opening), np.int64)], 0
        for part in self._parts(text):
            encoding = self._tokenizer(part, add_special_tokens=False, **self._options)
            ids.append(np.array(encoding["input_ids"], dtype=np.int32))
            if self._count_bytes:
                ends.append(num_bytes + _byte_ends(part, encoding["offset_mapping"]))
                num_bytes += len(part.encode())
        if self.eos_id is not None:
            ids.append(np.array([self.eos_id], dtype=np.int32))
            ends.append(np.array([num_bytes]))
        return _piece(np.concatenate(ids), None, np.concatenate(ends) if self._count_bytes else None)

    def _parts(self, text: str) -> Iterator[str]:
        start = 0
        while start < len(text):
            found = _BEFORE_SPACE.search(text, start + PART_CHARACTERS) if self._cuts_before_space else None
            stop = found.start() if found else len(text)
            yield text[start:stop]
            start = stop

    def _chat(self, messages: list[Message], document: Document) -> Piece:
        with _template_errors(document):
            encoding = self._tokenizer.apply_chat_template(
                messages,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=self._assistant,
                tokenizer_kwargs=self._options,
            )
        text = self._written(messages, document) if self._count_bytes else ""
        counted = np.array(encoding["assistant_masks"], dtype=bool) if self._assistant else None
        ends = _byte_ends(text, encoding["offset_mapping"]) if self._count_bytes else None
        return _piece(np.array(encoding["input_ids"], dtype=np.int32), counted, ends)

    def _written(self, messages: list[Message], document: Document) -> str:
        """Return a conversation as the chat template writes it."""
        with _template_errors(document):
            return self._tokenizer.apply_chat_template(messages, tokenize=False)

    def _most_tokens(self, content: str | np.ndarray) -> int:
        """Return at least as many as the tokens of `content`: no token has less than a byte, as long as none is added.

        A normalizer may make many bytes of one.
        """
        if isinstance(content, np.ndarray):
            return len(content)
        if not self._tokenizer.is_fast or self._tokenizer.backend_tokenizer.normalizer is not None:
            return sys.maxsize
        return len(self._opening) + len(content.encode()) + len(" ") + 1

    def _template(self, document: Document | None = None) -> str:
        try:
            return self._tokenizer.get_chat_template()
        except ValueError as error:
            where = document.where if document else '`data.loss_on = "assistant"`'
            raise UsageError(
                f"{where} needs a chat template and the tokenizer has no default one; add chat_template.jinja to the "
                "tokenizer's folder, or give `text` instead of `messages`."
            ) from error

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def refuse_longer(document: Document, num_tokens: int, longest: int) -> None:
    """Refuse a document whose tokens are more than `longest`."""
    if num_tokens > longest:
        raise UsageError(
            f"{document.where} has {num_tokens} tokens, more than `data.context` ({longest}); "
            'raise it, or set `data.long_documents = "split"`.'
        )


@contextmanager
def _template_errors(document: Document) -> Iterator[None]:
    try:
        yield
    except TemplateError as error:
        raise UsageError(f"{document.where}: the chat template refuses these messages: {error}.") from error


def _byte_ends(text: str, offsets: list[tuple[int, int]]) -> np.ndarray:
    """Return how many bytes of `text` are told once each token is known; a cut character belongs to its first token."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    lengths = 1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF)
    told = np.concatenate(([0], np.cumsum(lengths)))
    ends = np.array([stop for _, stop in offsets], dtype=np.int64)
    return told[np.maximum.accumulate(ends)]


def _piece(ids: np.ndarray, counted: np.ndarray | None, ends: np.ndarray | None) -> Piece:
    target = np.full_like(ids, IGNORED)
    target[:-1] = ids[1:] if counted is None else np.where(counted[1:], ids[1:], IGNORED)
    if ends is None:
        return Piece(ids=ids, target=target)
    target_bytes = np.zeros_like(ids)
    target_bytes[:-1] = np.where(target[:-1] != IGNORED, np.diff(ends), 0)
    return Piece(ids=ids, target=target, target_bytes=target_bytes)
