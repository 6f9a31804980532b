"""A byte-level BPE trained on the spot, and files of documents."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import planish.data.sources

MARKED = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{% elif message.role == 'user' %}{{ message.content }}"
    "{% else %}{{ raise_exception('no such role') }}{% endif %}{{ '\\n' }}{% endfor %}"
)


def train_tokenizer(**options):
    """Return a tokenizer of 600 ids with bytes as its alphabet, so that any text is tokenised without loss."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    [(english, _)] = planish.data.sources._english()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([english.read_text(encoding="utf-8")[:50_000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **options)


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(eos_token="<eos>")


@pytest.fixture(scope="session")
def bare_tokenizer():
    """No EOS and no chat template."""
    return train_tokenizer()


@pytest.fixture(scope="session")
def chat_tokenizer():
    chat = train_tokenizer(eos_token="<eos>")
    chat.chat_template = MARKED
    return chat


@pytest.fixture
def write_jsonl(tmp_path):
    """Return a function that writes records (or raw lines) as JSON lines and returns the file's path as text."""

    def write(*records, name="documents.jsonl"):
        lines = [each if isinstance(each, str) else json.dumps(each) for each in records]
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return str(tmp_path / name)

    return write
