"""A rank that waits alone in a sharded component says what to do."""

import datetime
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zerostart
from tests.integrations.pipelines.tiny_pipelines import make_pipeline
from tests.ranks import rank_outcomes


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pipeline("wan", tmp_path_factory.mktemp("waiting") / "wan")


def alone_in_the_encoder(path: Path, engine: str) -> None:
    pipe = zerostart.load_pipeline(path, engine=engine, without=("transformer", "vae"), progress=False)
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=3))
    if dist.get_rank() == 0:
        with torch.no_grad():
            pipe.text_encoder(torch.tensor([[4, 5, 6]]))
    time.sleep(10)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_who_waits_for_ever_is_told_where_and_what_to_do(engine: str, path: Path) -> None:
    waiting = rank_outcomes(alone_in_the_encoder, 2, path, engine)[0].describe()
    assert "of the sharded component text_encoder, for which all ranks have to be there" in waiting
    assert "make the same calls on each" in waiting
