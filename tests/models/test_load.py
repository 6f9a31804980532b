"""What `load` refuses: positions, rotary parameters, weights that are not those of the config, half-made caches."""

import math

import pytest
from safetensors.torch import load_file, save_file

from planish.errors import UsageError
from planish.models.builtin import made_whole
from planish.models.load import load_config, load_model, load_tokenizer
from planish.sections import ModelSection

YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "yarnn", "factor": 4.0}, "did you mean `yarn`?"),
        ({"rope_type": "yarn"}, "factor"),
        ({"factor": 4.0}, "factor"),
        ({"rope_type": "linear", "factor": 0.5}, "got 0.5"),
        ({"rope_type": "linear", "factor": math.nan}, "must be finite"),
        ({**YARN, "beta_fats": 3}, "beta_fats"),
        ({"rope_type": "default"}, "what the model has already"),
        ({"rope_type": "linear", "factor": 2.0}, "longer than the model's 512 positions"),
        (None, "longer than the model's 256 positions"),
    ],
)
def test_rotary_parameters_that_mean_nothing_are_refused(model_folder, rope, said):
    with pytest.raises(UsageError, match=r"rope") as refused:
        load_config(ModelSection(from_=str(model_folder()), rope=rope), context=1024)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("rope", "positions"),
    [(YARN, 1024), ({"rope_theta": 1e6}, 1024), ({"rope_type": "dynamic", "factor": 4.0}, 256)],
)
def test_rotary_parameters_that_reach_are_taken(model_folder, rope, positions):
    config = load_config(ModelSection(from_=str(model_folder()), rope=rope), context=1024)
    assert rope.items() <= config.rope_parameters.items()
    assert config.max_position_embeddings == positions


def test_layers_of_several_kinds_take_a_table_each(model_folder):
    folder = model_folder("gemma3", layer_types=["sliding_attention", "full_attention"])
    section = ModelSection(from_=str(folder), rope=YARN)
    with pytest.raises(UsageError, match=r"write for example `model\.rope\.\w+_attention = "):
        load_config(section, context=1024)
    config = load_config(ModelSection(from_=section.from_, rope={"full_attention": YARN}), context=1024)
    assert config.rope_parameters["full_attention"]["factor"] == 4.0
    assert config.rope_parameters["sliding_attention"]["rope_type"] == "default"


@pytest.mark.parametrize("kind", ["missing", "shape"])
def test_weights_that_would_be_drawn_at_random_are_refused(model_folder, kind):
    folder = model_folder()
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights |= {name: weights[name][1:].clone()}
    if kind == "missing":
        del weights[name]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    section = ModelSection(from_=str(folder))
    with pytest.raises(UsageError, match=r"not those of its config: `model\.layers\.1\.mlp\.up_proj\.weight` is"):
        load_model(section, context=8, tokenizer=load_tokenizer(section), seed=0)


def _fill(target, error=None):
    with made_whole(target) as folder:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, UsageError])
def test_a_cache_is_whole_or_not_there(tmp_path, error):
    target = tmp_path / "cache" / "model"
    with pytest.raises(error):
        _fill(target, error)
    assert list(target.parent.iterdir()) == []
    _fill(target)
    assert [each.name for each in target.parent.iterdir()] == ["model"]
