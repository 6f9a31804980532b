"""Tables are fitted once for all tests of a session, in a folder of their own."""

import pytest

from planish.runfile import load
from planish.train import predict


@pytest.fixture(autouse=True, scope="session")
def tables_of_the_tests(tmp_path_factory):
    """Keep fitted tables in a folder of this session."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "cache_folder", lambda: folder)
        yield folder


@pytest.fixture
def run_of(tmp_path, tiny_model):
    """Return (family, *settings, **config) -> a run file for a tiny model of that family, its config alone on disk."""

    def make(family, *settings, **config):
        folder = tmp_path / family
        tiny_model(family, **config).config.save_pretrained(folder)
        base = [("model.config", str(folder / "config.json")), ("data.train", "none"), ("data.eval", "none")]
        return load(None, [*base, ("data.context", 64), *settings])

    return make
