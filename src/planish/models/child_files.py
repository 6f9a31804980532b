"""What lies beside a child's weights so that it opens without planish: its model's source, named in its config."""

import shutil
from pathlib import Path
from typing import Any

from planish.models import child


def is_child(config: Any) -> bool:
    """Return whether `config` is a compressed child's."""
    return config.model_type == child.MODEL_TYPE


def save_config(config: Any, folder: Path) -> None:
    """Write config.json, with `auto_map` and the file that it names.

    Raises:
        OSError: The disk refuses.
    """
    source = Path(child.__file__)
    config.auto_map = {
        "AutoConfig": f"{source.stem}.{child.Child.__name__}",
        "AutoModelForCausalLM": f"{source.stem}.{child.ChildForCausalLM.__name__}",
    }
    config.save_pretrained(folder)
    shutil.copyfile(source, folder / source.name)
