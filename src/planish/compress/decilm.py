"""The config class of DeciLM models, copied beside their weights: engines ask blocks for attributes, not for keys."""

from types import SimpleNamespace
from typing import Any

from transformers import LlamaConfig


class DeciLMConfig(LlamaConfig):
    """A Llama config whose `block_configs` say what each layer is."""

    model_type = "nemotron-nas"

    def __init__(self, block_configs: Any = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.block_configs = [
            SimpleNamespace(**{part: SimpleNamespace(**said) for part, said in each.items()}) for each in block_configs
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the tree that config.json holds."""
        tree = super().to_dict()
        tree["block_configs"] = [
            {part: dict(vars(said)) for part, said in vars(each).items()} for each in self.block_configs
        ]
        return tree
