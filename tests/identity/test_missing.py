"""``strict=False``: what the checkpoint lacks is initialised as transformers does, on any world size."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import zerostart
from tests.identity.snapshots import Snapshot, differences
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints, minilm_path

SEED = 1234
ENGINES = ("deepspeed", "fsdp2")


@dataclass(frozen=True)
class Lacking:
    """A checkpoint that lacks tensors of a model, and what transformers' unsharded load makes of it."""

    path: Path
    class_name: str
    reference: Path
    missing: set[str]
    unexpected: set[str]
    tied: set[str]


def lacking_tensors(path: Path, class_name: str, folder: Path) -> Lacking:
    import transformers

    torch.manual_seed(SEED)
    kind = getattr(transformers, class_name)
    model, info = kind.from_pretrained(path, output_loading_info=True)
    snapshot = Snapshot.of(model)
    torch.save(snapshot, folder / "reference.pt")
    tied = {name for group in snapshot.ties for name in group}
    return Lacking(
        path,
        class_name,
        folder / "reference.pt",
        set(info["missing_keys"]),
        set(info["unexpected_keys"]),
        tied,
    )


@pytest.fixture(scope="module")
def no_head(tmp_path_factory: pytest.TempPathFactory) -> Lacking:
    """MiniLM has a pooler and no language-model head; as a masked language model it lacks the head."""
    made = lacking_tensors(minilm_path(), "BertForMaskedLM", tmp_path_factory.mktemp("no_head"))
    assert "cls.predictions.transform.dense.weight" in made.missing
    assert made.unexpected == {"pooler.dense.weight", "pooler.dense.bias"}
    assert "cls.predictions.decoder.weight" in made.tied
    return made


@pytest.fixture(scope="module")
def no_experts(checkpoints: TinyCheckpoints, tmp_path_factory: pytest.TempPathFactory) -> Lacking:
    """A tiny Qwen3-MoE without one norm, one projection and every expert's gate and up of one layer."""
    lost = ("layers.0.input_layernorm.weight", "layers.1.self_attn.q_proj.weight")

    def delete(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if name.endswith(lost) or ("layers.2.mlp.experts." in name and "down_proj" not in name):
                del tensors[name]

    path = checkpoints.edited(checkpoints("qwen3_moe"), "qwen3_moe-deleted", delete)
    made = lacking_tensors(path, "Qwen3MoeForCausalLM", tmp_path_factory.mktemp("no_experts"))
    assert made.missing == {f"model.{name}" for name in lost} | {"model.layers.2.mlp.experts.gate_up_proj"}
    return made


@pytest.fixture(params=["no_head", "no_experts"])
def lacking(request: pytest.FixtureRequest) -> Lacking:
    chosen: Lacking = request.getfixturevalue(request.param)
    return chosen


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
@pytest.mark.parametrize("engine", ENGINES)
def test_initialised_as_transformers_does(lacking: Lacking, engine: str, world_size: int) -> None:
    """And so alike on every world size, for the reference is the same."""
    for names, lines in run_ranks(load_lacking, world_size, lacking, engine):
        assert not lines, "\n".join(lines)
        assert names["missing"] == lacking.missing
        assert names["unexpected"] == lacking.unexpected
        assert names["initialised"] >= lacking.missing - lacking.tied
        assert names["initialised"] <= lacking.missing


@pytest.mark.slow
def test_another_seed_gives_other_values(no_experts: Lacking) -> None:
    for engine in ENGINES:
        for _, lines in run_ranks(load_lacking, 2, no_experts, engine, SEED + 1):
            differing = {line.split(": ")[1].split()[0] for line in lines}
            assert differing == {
                "model.layers.1.self_attn.q_proj.weight",
                "model.layers.2.mlp.experts.gate_up_proj",
            }


def load_lacking(lacking: Lacking, engine: str, seed: int = SEED) -> tuple[dict[str, set[str]], list[str]]:
    import transformers

    torch.manual_seed(seed)
    kind = getattr(transformers, lacking.class_name)
    model = zerostart.load(lacking.path, kind, engine=engine, strict=False, progress=False)
    report = zerostart.report(model)
    names = {name: set(getattr(report, name)) for name in ("missing", "unexpected", "initialised")}
    reference = torch.load(lacking.reference, weights_only=False)
    return names, differences(model, reference, engine)
