"""Tables that these tests fit stay out of the user's cache."""

import pytest

from planish.train import predict


@pytest.fixture(autouse=True, scope="session")
def tables_of_the_tests(tmp_path_factory):
    """Keep fitted tables in a folder of this session."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "cache_folder", lambda: folder)
        yield
