"""One thread per process, set before torch starts its pool: ranks share the machine's cores, and
results must not depend on how many it has."""

import faulthandler
import gc
import getpass
import os
import tempfile
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# On a busy machine an example may take longer than any limit.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# What is counted of models is kept between runs of the tests, but not where a user has it.
os.environ["XDG_CACHE_HOME"] = os.path.join(
    tempfile.gettempdir(), f"orchmllm-tests-{getpass.getuser()}")


def pytest_collectstart() -> None:
    gc.disable()  # while everything is imported: nothing of it is garbage


def pytest_collection_finish() -> None:
    gc.freeze()  # so that no collection looks through it, either
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The package refuses whole models where transformers is of a version that was not tested."""
    from orchmllm.models.families import is_known, versions

    found = metadata.version("transformers")
    if not is_known(found):
        left_out = pytest.mark.skip(reason=f"whole models were tried with transformers "
                                    f"{versions()}, and {found} is installed")
        for item in items:
            if item.get_closest_marker("whole"):
                item.add_marker(left_out)


def pytest_unconfigure(config: pytest.Config) -> None:
    """A thread or a process that keeps the interpreter from exiting is told, not waited for. One of
    several processes of tests waits for the others then."""
    if not hasattr(config, "workerinput"):
        faulthandler.dump_traceback_later(60, exit=True)


@pytest.fixture(scope="session")
def demo_corpus(tmp_path_factory) -> Path:
    """A folder with 16 examples of the demo's corpus and a small model, which no test changes."""
    from tests.lib.commands import make_demo_data

    folder = make_demo_data(tmp_path_factory.mktemp("demo"), 16)
    return folder
