"""Fixtures that all tests share."""

import gc
import os
import random
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"  # Read by DeepSpeed when it is first imported, here or in a child.
# DeepSpeed's compiled operations belong to this environment's torch, unless the user set another folder.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix, "torch_extensions")))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

import tests.hypothesis_settings  # noqa: F401 - hypothesis's profiles, before any test is read
from tests.ranks import build_deepspeed_op, has_deepspeed_op, remove_stale_lock, skip_unsupported_dtype
from tests.tiny import TinyCheckpoints


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="shuffle the files, and the tests in each, by this seed"
    )


#: Folders and files with the longest cases; they start first, so that no worker waits for one at the end.
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
    """Order the items: ``LONGEST`` first, or shuffled with ``--shuffle``."""
    if (seed := config.getoption("--shuffle")) is not None:
        order = random.Random(seed)
        files = {item.path: order.random() for item in items}
        items.sort(key=lambda item: (files[item.path], order.random()))
    else:
        items.sort(key=lambda item: not set(LONGEST).intersection(item.path.parts))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Skip tests in dtypes that DeepSpeed does not support on this machine."""
    try:
        return (yield)
    except ValueError as error:
        skip_unsupported_dtype(str(error))
        raise


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoints:
    """Tiny checkpoints, written once a session."""
    return TinyCheckpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for the checkpoints of `tests.parity.checkpoint`, shared by the session."""
    return tmp_path_factory.mktemp("parity")


#: Folders whose tests use no engine.
WITHOUT_ENGINES = ("geometry", "recipe", "transfer/planning")


@pytest.fixture(scope="module", autouse=True)
def deepspeed_op(request: pytest.FixtureRequest) -> Iterator[None]:
    """DeepSpeed's shared-memory operation, compiled once before tests use it.

    Processes that compile it at the same time wait for each other, longer than a test may take. Tests in
    ``WITHOUT_ENGINES`` must not even import DeepSpeed, which takes seconds.
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
def process_cleanup() -> Iterator[None]:
    """Destroy the process group and the patched models that a module leaves in the tests' process.

    Patches of other libraries last as long as the models, which engines and a list of DeepSpeed's refer to.
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
