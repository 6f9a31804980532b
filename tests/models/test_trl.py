"""TRL's SFTTrainer with a plan installed: the losses of the plain model, by the head that TRL brings itself."""

import pytest
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import planish
from planish.errors import UsageError
from planish.methods import Blocked, Plan


def trainer_of(model, tokenizer, folder):
    settings = SFTConfig(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        max_length=24,
        logging_steps=1,
        activation_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    rows = Dataset.from_dict({"text": ["Once upon a time there was a king", "and he had a daughter"] * 2})
    return SFTTrainer(model=model, args=settings, train_dataset=rows, processing_class=tokenizer)


def test_trl_trains_with_a_plan_installed(tiny_model, tiny_tokenizer, tmp_path):
    losses = []
    for plan in (Plan.plain(), Plan(vocab=Blocked(tile_bytes=2**16))):
        model = tiny_model()
        planish.install(model, plan)
        trainer = trainer_of(model, tiny_tokenizer, tmp_path)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert len(losses[0]) == 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)  # the log rounds


def test_a_plan_over_trls_head_says_which_comes_first(tiny_model, tiny_tokenizer, tmp_path):
    trainer = trainer_of(tiny_model(), tiny_tokenizer, tmp_path)
    planish.install(trainer.model, Plan())
    with pytest.raises(UsageError, match=r"call `planish.install` before the trainer is made"):
        trainer.train()
