"""Optimizers by name, and errors before any file is read."""

import re

import pytest
import torch

from tests.ranks import run_ranks
from tests.training.loop.test_resumed_runs import run_interrupted, with_checkpoints
from tests.training.loop.test_run import make_config as make_config
from tests.training.loop.test_run import read_losses, run
from zerostart.engines import Mesh, check_choice, optimizers
from zerostart.errors import ConfigError
from zerostart.training import register_elementwise_optimizer
from zerostart.training.config.configuration import TrainingConfig
from zerostart.training.loop.optimizers import check_optimizer, optimizer_factory


@pytest.mark.slow
def test_adafactor_resumes_exactly(checkpoints, make_config):
    """Adafactor's factors do not match parameter elements, and are saved as they are."""
    options = {"steps": 4, "optimizer": "torch.optim:Adafactor"}
    engine = {"engine": {"name": "fsdp2", "zero_stage": 0}}
    straight = run_ranks(run, 2, make_config(checkpoints("qwen3"), output="straight", **options) | engine)[0]
    config = with_checkpoints(
        make_config(checkpoints("qwen3"), output="resumed", **options) | engine, every=2
    )
    run_ranks(run_interrupted, 2, config, 3)
    assert read_losses(run_ranks(run, 2, config)[0]) == read_losses(straight)


def catch_refusal(engine, **train):
    chosen = check_choice(engine, 3).for_stage(3, None, Mesh(1), None)
    with pytest.raises(ConfigError) as caught:
        check_optimizer(TrainingConfig(**{"steps": 1, **train}), chosen)
    return str(caught.value)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"optimizer": "adamv"}, "train.optimizer 'adamv' is unknown .*: it is one of "),
        (
            {"optimizer": "lbfgs"},
            "lbfgs: torch.optim.lbfgs.LBFGS is not known to step each element by itself",
        ),
        ({"optimizer": "muon"}, "Muon is not known to step each element by itself"),
        (
            {"optimizer": "sgd", "optimizer_args": {"momentun": 0.9}},
            "sgd cannot be made .*unexpected keyword argument 'momentun'",
        ),
        (
            {"optimizer_args": {"weight_decay": 0.1}},
            "cannot be made .*multiple values for keyword argument 'weight_decay'",
        ),
        ({"optimizer_args": {"lr": 1.0}}, "multiple values for keyword argument 'lr'"),
        ({"optimizer": "sgd", "optimizer_args": {"momentum": -1}}, "sgd cannot be made .*Invalid momentum"),
        ({"optimizer": "sgd", "betas": [0.9, 0.99]}, "unexpected keyword argument 'betas'"),
        ({"optimizer": "rprop", "weight_decay": 0.1}, "unexpected keyword argument 'weight_decay'"),
        ({"optimizer": "no_such_package:Lion"}, "no_such_package:Lion' is unknown .No module named"),
        ({"optimizer": "torch.nn:Linear"}, "does not name a class derived from torch.optim.Optimizer"),
    ],
)
def test_refusal_names_the_mistake(train, message):
    assert re.search(message, catch_refusal("fsdp2", **train))


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_optimizer_that_mixes_elements_is_refused_with_shards(engine):
    """Unsharded parameters work with any optimizer."""
    assert "Adafactor is not known to step each element by itself" in catch_refusal(
        engine, optimizer="adafactor"
    )
    assert "set engine.zero_stage to 0" in catch_refusal(engine, optimizer="torch.optim:Muon")
    whole = check_choice(engine, 0).for_stage(0, None, Mesh(1), None)
    check_optimizer(TrainingConfig(steps=1, optimizer="torch.optim:Adafactor"), whole)


def test_registered_class_is_accepted(monkeypatch):
    monkeypatch.setattr(optimizers, "_elementwise", set(optimizers._elementwise))
    chosen = check_choice("fsdp2", 3).for_stage(3, None, Mesh(1), None)
    name = f"{__name__}:OwnSgd"
    with pytest.raises(ConfigError, match="OwnSgd is not known"):
        check_optimizer(TrainingConfig(steps=1, optimizer=name), chosen)
    register_elementwise_optimizer(OwnSgd)
    check_optimizer(TrainingConfig(steps=1, optimizer=name), chosen)


class OwnSgd(torch.optim.SGD):
    pass


def test_adagrad_is_refused_on_deepspeed():
    assert "makes its state before the first step" in catch_refusal("deepspeed", optimizer="adagrad")


def test_optimizer_has_the_configured_arguments():
    train = {"steps": 1, "learning_rate": 0.3, "optimizer_args": {"momentum": 0.9}}
    optimizer = optimizer_factory(TrainingConfig(optimizer="torch.optim:SGD", **train))(
        [torch.nn.Parameter(torch.ones(2))]
    )
    assert (type(optimizer), optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (
        torch.optim.SGD,
        0.3,
        0.9,
    )
