"""From what the user wrote under `data.train` to files: paths, folders and the built-in corpora."""

import importlib.util
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from planish.data.corpus import Corpus
from planish.data.document import DataFile
from planish.data.encode import Encoder
from planish.data.parquet import ParquetFile
from planish.data.text import JsonlFile, TextFile
from planish.data.tokens import TokenFile
from planish.decode import nearest
from planish.errors import UsageError

SUFFIXES = (".txt", ".jsonl", ".parquet", ".bin")
_BUILTIN = "builtin:"
_NOT_CORPUS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def open_corpora(sources: Sequence[str], encode: Encoder, *, apart: bool = False) -> list[Corpus]:
    """Return one corpus of all `sources`, or one of each where they are to be kept `apart`.

    The documents at the beginning of the first file of each source are checked; of the others only folders, sizes and
    footers are read.

    Memory: path and size of each file; one group of documents for a moment.

    Raises:
        UsageError: A source with nothing in it, or with something that cannot be used.
    """
    found = [_find(source, encode) for source in sources]
    corpora = found if apart else [_merge(found)]
    for corpus in found:
        if not corpus.files:
            raise UsageError(f"{corpus.name} is empty; there is no text to read, leave it out.")
    for corpus in found:
        for file in corpus.files[:1]:
            for document in next(file.groups(0), []):
                encode.check(document)
    return corpora


def _find(source: str, encode: Encoder) -> Corpus:
    files, num_empty = [], 0
    for path, name in files_of(source):
        size_bytes = _size_bytes(path)
        if size_bytes == 0:
            num_empty += 1
        else:
            files.append(_data_file(path, name, size_bytes, encode))
    return Corpus(name=source, files=tuple(files), num_empty=num_empty)


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error


def _merge(corpora: Sequence[Corpus]) -> Corpus:
    return Corpus(
        name=", ".join(corpus.name for corpus in corpora),
        files=tuple(file for corpus in corpora for file in corpus.files),
        num_empty=sum(corpus.num_empty for corpus in corpora),
    )


def files_of(source: str) -> Iterator[tuple[Path, str]]:
    """Return the files of `source`, each with its name within it, in a fixed order.

    Raises:
        UsageError: A source that does not exist or holds no text.
    """
    if source.startswith(_BUILTIN):
        return _builtin(source)
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path)
    if not path.exists():
        raise UsageError(f'{source} does not exist; name a file, a folder, or a built-in such as "builtin:english".')
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{source} is of no known kind; files end in {', '.join(SUFFIXES)}.")
    return iter([(path, path.name)])


def _folder(root: Path) -> Iterator[tuple[Path, str]]:
    found = list(_walk(root, SUFFIXES, frozenset()))
    if not found:
        raise UsageError(f"{root} holds no text: no file in it ends in {', '.join(SUFFIXES)}.")
    return ((path, path.relative_to(root).as_posix()) for path in found)


def _builtin(source: str) -> Iterator[tuple[Path, str]]:
    builtins: dict[str, Callable[[], Iterator[tuple[Path, str]]]] = {"english": _english, "python": _python}
    name = source.removeprefix(_BUILTIN)
    if name not in builtins:
        raise UsageError(f"{source} is no built-in corpus; {nearest(name, builtins)}")
    return builtins[name]()


def _english() -> Iterator[tuple[Path, str]]:
    yield Path(__file__).with_name("english.txt"), "english.txt"


def _python() -> Iterator[tuple[Path, str]]:
    """Yield the sources of the installed standard library and of torch, found without importing either."""
    spec = importlib.util.find_spec("torch")
    torch_folders = spec.submodule_search_locations if spec is not None else None
    for root in (sysconfig.get_path("stdlib"), *(torch_folders or ())):
        for path in _walk(Path(root), (".py",), frozenset(_NOT_CORPUS)):
            yield path, path.relative_to(Path(root).parent).as_posix()


def _walk(root: Path, suffixes: tuple[str, ...], without: frozenset[str]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - without)
        for name in sorted(names):
            if name.lower().endswith(suffixes):
                yield Path(folder, name)


def _data_file(path: Path, name: str, size_bytes: int, encode: Encoder) -> DataFile:
    match path.suffix.lower():
        case ".jsonl":
            return JsonlFile(path=path, name=name, size_bytes=size_bytes)
        case ".parquet":
            return ParquetFile.open(path, name, size_bytes)
        case ".bin":
            return TokenFile.open(path, name, size_bytes, vocab_size=encode.vocab_size, eos_id=encode.eos_id)
        case _:
            return TextFile(path=path, name=name, size_bytes=size_bytes)
