"""Fixtures that all tests share."""

import gc
import os
import random
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"  # Read by DeepSpeed when it is first imported, here or in a child.
# What DeepSpeed compiles lies with the torch that it is compiled for, unless the user has a place for it.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix, "torch_extensions")))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

import tests.hypothesis_settings  # noqa: F401 - hypothesis's profiles, before any test is read
from tests.ranks import build_deepspeed_op, has_deepspeed_op, remove_stale_lock, skip_where_unsupported
from tests.tiny import TinyCheckpoints


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="the files, and tests in each, in this order"
    )


#: Folders and files with the longest cases. They start first, so that no worker waits for one at the end.
LONGEST = (
    "accelerator",
    "test_kill.py",
    "test_identity.py",
    "test_examples_from_a_wheel.py",
    "test_documented_python.py",
    "test_load_model.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the items: ``LONGEST`` first, or by chance with ``--shuffle``."""
    if (seed := config.getoption("--shuffle")) is not None:
        order = random.Random(seed)
        files = {item.path: order.random() for item in items}
        items.sort(key=lambda item: (files[item.path], order.random()))
    else:
        items.sort(key=lambda item: not set(LONGEST).intersection(item.path.parts))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """What DeepSpeed does not compute in on this machine is not tested on it."""
    try:
        return (yield)
    except ValueError as error:
        skip_where_unsupported(str(error))
        raise


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoints:
    """Tiny checkpoints, made once a session."""
    return TinyCheckpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where what `tests.parity.checkpoint` makes lies, once for all that train it."""
    return tmp_path_factory.mktemp("parity")


#: Folders whose tests know of no engine.
WITHOUT_ENGINES = ("geometry", "recipe", "transfer/planning")


@pytest.fixture(scope="module", autouse=True)
def deepspeed_op(request: pytest.FixtureRequest) -> Iterator[None]:
    """DeepSpeed's shared-memory operation, compiled once an environment, before any process would do it.

    Processes that compile it side by side wait for each other, longer than a test may. Tests that know of no
    engine do without, and without DeepSpeed: they take seconds.
    """
    folder = request.path.parent.relative_to(Path(__file__).parent).as_posix()
    if not f"{folder}/".startswith(tuple(f"{room}/" for room in WITHOUT_ENGINES)):
        remove_stale_lock()
        if not has_deepspeed_op():
            build_deepspeed_op()
        yield
        return
    before = "deepspeed" in sys.modules
    yield
    assert before or "deepspeed" not in sys.modules, f"{request.path} imports DeepSpeed"


@pytest.fixture(scope="module", autouse=True)
def no_group_stays() -> Iterator[None]:
    """A load in the tests' own process makes a process group of one; the next module starts without.

    And without its models, for which something of other libraries is replaced while they live: engines and
    models refer to each other, and DeepSpeed keeps the last ZeRO-3 model in a list.
    """
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    patches = sys.modules.get("zerostart.upstream.patches")
    if patches is not None and patches.active():
        offload = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
        if offload is not None:
            offload.FWD_MODULE_STACK.clear()
        gc.collect()
