"""What flow matching draws, weighs and calls: against formulas and calls of diffusers and DiffSynth."""

import json
import math

import diffusers
import pytest
import torch

from tests.diffusion.components import COMPONENTS
from tests.integrations.pipelines import tiny_pipelines as tiny
from tests.training.data.encoded import MORE, picture
from tests.training.diffusion.flow_items import FAMILIES, build, configured, examples, noise, velocity
from zerostart.errors import CheckpointError, ConfigError
from zerostart.training import Task, register_task
from zerostart.training.config.load import parse_config
from zerostart.training.diffusion.families import FAMILIES as KINDS
from zerostart.training.diffusion.families import family_of
from zerostart.training.diffusion.flow import FlowConfig, Times
from zerostart.training.loop.task import split_off, task_class


def family(name):
    component = COMPONENTS[FAMILIES[name][0]]
    return KINDS[name](build(name).config), component


def times(name="wan", boundaries=(0.0, 1.0), **settings):
    return Times(FlowConfig(**settings), family(name)[0], boundaries)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_transformer_is_called_as_by_its_pipeline(name):
    """Two examples at once, at times of their own, and texts of their own length."""
    kind, component = family(name)
    model, items = build(name).eval(), examples(name, 2)
    assert family_of(component.kind) is type(kind)
    latents = torch.stack([item["latents"] for item in items])
    t = torch.tensor([0.3, 0.8])
    with torch.no_grad():
        found = kind.velocity(model, latents, t, kind.conditions(items))
        for one, item, x, at in zip(found, items, latents, t.tolist(), strict=True):
            torch.testing.assert_close(one, velocity(name, model, x, at, item), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "key"), [("hunyuan-video", "hunyuan_video"), ("ltx2", "ltx2"), ("ltx2", "ltx2_i2v")]
)
def test_a_transformer_gets_what_its_pipeline_feeds_it(name, key):
    """Of LTX-2 in the call in which the video does not look at the sound, whose noise differs here."""
    torch.manual_seed(7)
    pipe, calls = (tiny.FAMILIES | MORE)[key](), []
    pipe.set_progress_bar_config(disable=True)
    model, kind = pipe.transformer, KINDS[name](pipe.transformer.config, guidance=6.0)
    model.register_forward_hook(lambda _, __, given, made: calls.append((given, made[0])), with_kwargs=True)
    seed = torch.Generator().manual_seed(1)
    started = {"image": picture(32, 32, 1), "image_crf": 0} if key == "ltx2_i2v" else {}
    call = {**tiny.CALLS[key.removesuffix("_i2v")], **started}
    pipe(prompt="a cat", num_inference_steps=2, generator=seed, output_type="latent", **call)
    fed = [call for call in calls if call[0].get("isolate_modalities", True)]
    for given, made in fed:
        item = {"prompt_embeds": given["encoder_hidden_states"][0], "latents": given["hidden_states"][0]}
        item["prompt_attention_mask"] = given["encoder_attention_mask"][0]
        if name == "ltx2":
            embeds = [item["prompt_embeds"], given["audio_encoder_hidden_states"][0]]
            item["prompt_embeds"] = torch.cat(embeds, dim=-1)
            sizes = [given[size] for size in ("num_frames", "height", "width")]
            item["latents"] = pipe._unpack_latents(given["hidden_states"], *sizes)[0].clone()
            if started:
                # What stands in the place of the first frame is not what is put there.
                item["condition"] = item["latents"][:, :1].clone()
                item["latents"][:, :1] = 7.0
        else:
            item["pooled_prompt_embeds"] = given["pooled_projections"][0]
        with torch.no_grad():
            times = given["sigma" if name == "ltx2" else "timestep"] / 1000
            found = kind.velocity(model, item["latents"][None], times, kind.conditions([item]))
        ours, own = calls.pop()
        assert found.shape == item["latents"][None].shape
        torch.testing.assert_close(own, made, rtol=1e-5, atol=1e-5)
        told = {key: value for key, value in given.items() if value is not None and "audio" not in key}
        told.pop("video_coords", None)  # which the transformer makes of sizes and frame rate
        torch.testing.assert_close({key: ours[key] for key in told}, told, check_dtype=False)
    assert len(fed) == 2


def test_what_no_loss_of_ltx2_reaches_is_not_trained(tmp_path):
    task, model = opened(tmp_path, "ltx2"), build("ltx2")
    task.begin(model)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    other, (item,) = build("ltx2"), examples("ltx2", 1)
    found = task.family.velocity(
        other, item["latents"][None], torch.tensor([0.5]), task.family.conditions([item])
    )
    found.square().sum().backward()
    assert frozen == {name for name, parameter in other.named_parameters() if parameter.grad is None}
    assert 0 < len(frozen) < len(list(model.parameters()))


def test_frame_rates_of_one_batch_are_one():
    kind, items = family("ltx2")[0], examples("ltx2", 2)
    told = [{**one, "frame_rate": torch.tensor(rate)} for one, rate in zip(items, (24.0, 30.0), strict=True)]
    assert kind.conditions(told[1:])["frame_rate"] == 30.0
    assert kind.conditions(items)["frame_rate"] == 24.0
    with pytest.raises(ConfigError, match=r"have 24\.0 and 30\.0 frames a second"):
        kind.conditions(told)
    with pytest.raises(ConfigError, match=r"prompt_embeds of width 16, but the transformer takes 32"):
        kind.conditions([{**items[0], "prompt_embeds": noise(6, 16, seed=1)}])


def test_pictures_that_an_example_starts_from():
    """As the pipelines for editing join them: their tokens after the latents', each with its place."""
    import diffusers

    model, x = build("qwen-image").eval(), noise(1, 4, 8, 8, seed=1)
    images = {f"image_latents.{i}": noise(4, 4 + 4 * i, 8, seed=2 + i) for i in range(2)}
    item = {**examples("qwen-image", 1)[0], **images}
    kind, t = KINDS["qwen-image"](model.config), torch.tensor([0.4])
    pack = diffusers.QwenImagePipeline._pack_latents
    tokens = torch.cat([pack(i, 1, 4, *i.shape[-2:]) for i in (x, *(i[None] for i in images.values()))], 1)
    sides = [[(1, 4, 4), (1, 2, 4), (1, 4, 4)]]
    with torch.no_grad():
        found = kind.velocity(model, x, t, kind.conditions([item]))
        wanted = model(tokens, item["prompt_embeds"][None], None, t, sides, return_dict=False)[0][:, :16]
    unpack = diffusers.QwenImagePipeline._unpack_latents
    torch.testing.assert_close(found, unpack(wanted, 64, 64, 8)[:, :, 0])

    model, x = build("flux").eval(), noise(1, 1, 8, 8, seed=1)
    item = {**examples("flux", 1)[0], "image_latents.0": noise(1, 4, 8, seed=4)}
    kind, pipe = KINDS["flux"](model.config), diffusers.FluxKontextPipeline
    tokens = torch.cat(
        [pipe._pack_latents(x, 1, 1, 8, 8), pipe._pack_latents(item["image_latents.0"][None], 1, 1, 4, 8)], 1
    )
    ids = pipe._prepare_latent_image_ids(1, 4, 4, "cpu", torch.float32)
    more = pipe._prepare_latent_image_ids(1, 2, 4, "cpu", torch.float32)
    more[:, 0] = 1
    text, pooled = item["prompt_embeds"][None], item["pooled_prompt_embeds"][None]
    with torch.no_grad():
        found = kind.velocity(model, x, t, kind.conditions([item]))
        wanted = model(
            tokens,
            text,
            pooled,
            t,
            torch.cat([ids, more]),
            torch.zeros(8, 3),
            torch.ones(1),
            return_dict=False,
        )[0][:, :16]
    torch.testing.assert_close(found, pipe._unpack_latents(wanted, 64, 64, 8))

    model, x = build("flux2").eval(), noise(1, 4, 4, 4, seed=1)
    images = [noise(4, 2, 4, seed=5), noise(4, 4, 4, seed=6)]
    item = {**examples("flux2", 1)[0], **{f"image_latents.{i}": one for i, one in enumerate(images)}}
    kind, pipe = KINDS["flux2"](model.config), diffusers.Flux2Pipeline
    ids = torch.cat([pipe._prepare_latent_ids(x), pipe._prepare_image_ids([i[None] for i in images])], 1)
    tokens = torch.cat([pipe._pack_latents(one) for one in (x, *(i[None] for i in images))], 1)
    text = item["prompt_embeds"][None]
    with torch.no_grad():
        found = kind.velocity(model, x, t, kind.conditions([item]))
        wanted = model(tokens, text, t, ids, pipe._prepare_text_ids(text), torch.ones(1), return_dict=False)[
            0
        ]
    torch.testing.assert_close(found[0], pipe._unpack_latents_with_ids(wanted[:, :16], ids[:, :16])[0])


@pytest.mark.parametrize("name", ["flux", "qwen-image"])
def test_odd_sides_are_told_before_the_transformer_is_called(name):
    """One rank alone has such an example, and the others would wait for it in the forward."""
    kind, _ = family(name)
    (item,) = examples(name, 1)
    for key in ("latents", "image_latents.0"):
        odd = {**item, key: noise(*item["latents"].shape[:-1], 7, seed=1)}
        with pytest.raises(
            ConfigError,
            match=rf"{key} of 8 by 7 cannot be divided into patches of 2 by 2: make both sides even",
        ):
            kind.conditions([odd])


def test_wan_with_frames_that_are_given():
    """Beside the latents where the transformer has channels for them, else as the first frame."""
    torch.manual_seed(1)
    model = COMPONENTS["wan2.1 i2v"].build().eval()
    kind, x, t = KINDS["wan"](model.config), noise(1, 4, 3, 4, 4, seed=1), torch.tensor([0.6])
    item = {"latents": x[0], "prompt_embeds": noise(6, 16, seed=2), "image_embeds": noise(5, 13, seed=3)}
    item["condition"] = noise(4, 3, 4, 4, seed=4)
    with torch.no_grad():
        found = kind.velocity(model, x, t, kind.conditions([item]))
        given = torch.cat([x, item["condition"][None]], 1)
        embeds = (item["prompt_embeds"][None], item["image_embeds"][None])
        wanted = model(given, t * 1000, *embeds, return_dict=False)[0]
        assert torch.equal(found, wanted)
        with pytest.raises(ConfigError, match=r"latents .and condition. of 4 channels, .* takes 8"):
            kind.conditions([{name: value for name, value in item.items() if name != "condition"}])

    model = build("wan").eval()
    kind = KINDS["wan"](model.config)
    conditions = kind.conditions([{**item, "condition": noise(4, 1, 4, 4, seed=4)}])  # looks at no picture
    mask = torch.ones(1, 1, 3, 4, 4)
    mask[:, :, 0] = 0
    with torch.no_grad():
        found = kind.velocity(model, x, t, conditions)
        given = (1 - mask) * conditions["condition"] + mask * x
        timestep = (mask[0][0][:, ::2, ::2] * t * 1000).flatten()[None]
        wanted = model(given, timestep, embeds[0], return_dict=False)[0]
    torch.testing.assert_close(found, wanted)
    assert kind.trained(found, conditions).shape[2] == 2  # DiffSynth's loss leaves the first frame out

    model = COMPONENTS["wan2.1 vace"].build().eval()
    kind = KINDS["wan"](model.config)
    item = {"latents": x[0], "prompt_embeds": item["prompt_embeds"]}
    with pytest.raises(ConfigError, match="no control_latents"):
        kind.conditions([item])
    control = noise(6, 3, 4, 4, seed=8)
    with torch.no_grad():
        found = kind.velocity(model, x, t, kind.conditions([{**item, "control_latents": control}]))
        wanted = model(x, t * 1000, embeds[0], None, control[None], torch.ones(2), return_dict=False)[0]
    assert torch.equal(found, wanted)


def test_wan_with_a_first_and_a_last_frame():
    """Wan2.1 FLF2V has places for the pictures: its pipeline gives them as [2 * batch, L, D]."""
    torch.manual_seed(1)
    one = COMPONENTS["wan2.1 i2v"]
    model = diffusers.WanTransformer3DModel(**{**one.config, "pos_embed_seq_len": 10}).eval()
    torch.nn.init.normal_(model.condition_embedder.image_embedder.pos_embed)
    kind, x, t = KINDS["wan"](model.config), noise(2, 4, 3, 4, 4, seed=1), torch.tensor([0.6, 0.2])
    texts, condition = noise(2, 512, 16, seed=2), noise(2, 4, 3, 4, 4, seed=4)
    pictures = noise(4, 5, 13, seed=3)  # the two of the first example, the two of the second
    items = [
        {"latents": x[n], "prompt_embeds": texts[n], "condition": condition[n]}
        | {"image_embeds": pictures[2 * n : 2 * n + 2].flatten(0, 1)}
        for n in range(2)
    ]
    with torch.no_grad():
        found = kind.velocity(model, x, t, kind.conditions(items))
        wanted = model(torch.cat([x, condition], 1), t * 1000, texts, pictures, return_dict=False)[0]
    assert torch.equal(found, wanted)
    for lacking in ({**items[0], "image_embeds": pictures[0]}, items[0] | {"image_embeds": pictures[0, :0]}):
        with pytest.raises(ConfigError, match=r"takes 10, for a first and a last frame: set cache.last"):
            kind.conditions([lacking])


@pytest.mark.parametrize("sampling", ["uniform", "logit-normal"])
@pytest.mark.parametrize("boundaries", [(0.0, 1.0), (0.875, 1.0), (0.2, 0.4)])
def test_times_are_the_distribution_between_its_boundaries(sampling, boundaries):
    """As those of diffusers' and DiffSynth's draws that happen to lie there, by their quantiles."""
    low, high = boundaries
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(400_000, generator=generator, dtype=torch.float64)
    if sampling == "logit-normal":
        u = torch.sigmoid(0.3 + 1.2 * torch.randn(400_000, generator=generator, dtype=torch.float64))
    theirs = 3 * u / (1 + 2 * u)
    theirs = theirs[(theirs >= low) & (theirs <= high)]
    places = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    settings = {"logit_mean": 0.3, "logit_std": 1.2} if sampling == "logit-normal" else {}
    ours = times(boundaries=boundaries, sampling=sampling, shift=3.0, **settings).at(places, 3.0)
    assert ours.min() >= low
    assert ours.max() <= high
    torch.testing.assert_close(ours, torch.quantile(theirs, places), rtol=0, atol=0.01)


def test_shifts_are_the_families():
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    assert times("flux").shift(4096) == 3.0
    assert times("wan", shift=7.5).shift(1) == 7.5
    told = {name: times(name, shift="resolution").shift(1024) for name in ("flux", "qwen-image", "flux2")}
    assert told["flux"] == pytest.approx(math.exp(calculate_shift(1024)))
    assert told["qwen-image"] == pytest.approx(math.exp(calculate_shift(1024, 256, 8192, 0.5, 0.9)))
    assert told["flux2"] == pytest.approx(math.exp(compute_empirical_mu(1024, 50)))
    with pytest.raises(ConfigError, match="wan has no shift by resolution"):
        times("wan", shift="resolution").shift(1024)


def test_weights_of_times():
    """diffusers' by its own function, DiffSynth's by its formula over Wan's times."""
    from diffusers.training_utils import compute_loss_weighting_for_sd3

    t = torch.tensor([0.1, 0.5, 0.95])
    for ours, theirs in (("cosmap", "cosmap"), ("sigma-sqrt", "sigma_sqrt"), ("none", "none")):
        wanted = compute_loss_weighting_for_sd3(theirs, t)
        torch.testing.assert_close(times(weighting=ours).weights(t, 5.0), wanted)
    sigmas = torch.linspace(1.0, 0.0, 1001)[:-1]
    sigmas = 5 * sigmas / (1 + 4 * sigmas)
    y = torch.exp(-2 * ((sigmas * 1000 - 500) / 1000) ** 2)
    y = (y - y.min()) * (1000 / (y - y.min()).sum())
    found = times(weighting="bell").weights(sigmas, 5.0)
    torch.testing.assert_close(found, y, rtol=1e-4, atol=1e-5)


def opened(folder, name="wan", precision="no", **settings):
    values = configured(folder, name, "fsdp2", 3)
    values["task"] |= settings
    values["train"]["mixed_precision"] = precision
    config = parse_config(values)
    task = task_class(config.task.name)(config)
    task.open()
    return task


def test_draws_depend_on_seed_epoch_and_number_alone(tmp_path):
    task = opened(tmp_path)
    items = task.items(None)
    collate = task.collator(0)
    whole = task.drawn(collate([items[i] for i in range(4)]), 2)
    alone = task.drawn(task.collator(7)([items[2]]), 2)
    for key in ("noisy", "target", "t"):
        assert torch.equal(whole[key][2:3], alone[key])
    later = task.drawn(collate([items[2]]), 3)
    assert not torch.equal(later["t"], alone["t"])
    assert not torch.equal(later["target"], alone["target"])
    x, t = items[2]["latents"], alone["t"]
    torch.testing.assert_close(alone["noisy"][0], x + t * alone["target"][0])


@pytest.mark.parametrize(("name", "unit"), [("wan", 1000.0), ("flux", 1.0)])
def test_in_bf16_latents_are_mixed_at_the_times_that_are_told(tmp_path, name, unit):
    task = opened(tmp_path, name, "bf16")
    drawn = task.drawn({"items": [task.items(None)[i] for i in range(8)]}, 0)
    told = drawn["t"] * unit
    torch.testing.assert_close(told.bfloat16().float(), told, rtol=3e-7, atol=0)


def test_texts_are_dropped_for_the_one_that_stands_for_none(tmp_path):
    task = opened(tmp_path, drop_prompt=0.5)
    with pytest.raises(ConfigError, match="have no embeddings of the text ''"):
        task.items(None)
    empty = torch.zeros(6, 16)

    class Items(list):
        def prompt(self, text):
            assert text == ""
            return {"prompt_embeds": empty}

    items = task.numbered(Items(examples("wan", 40)))
    found = [task.drawn({"items": [items[i]]}, 0)["conditions"]["prompt_embeds"] for i in range(40)]
    dropped = [not one.any() for one in found]
    assert 8 <= sum(dropped) <= 32
    assert all(torch.equal(one[0], items[i]["prompt_embeds"]) for i, one in enumerate(found) if one.any())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"task": {"boundaries": [0.9, 0.1]}},
            ConfigError,
            "boundaries must be a lower and a higher time",
        ),
        ({"task": {"family": "sdxl"}}, ConfigError, "family sdxl is unknown; choose one of wan"),
        ({"task": {"samplin": "x"}}, ConfigError, r"unknown key task.samplin; did you mean task\.sampling"),
        (
            {"model": {"component": "vae"}},
            ConfigError,
            r"model\.component vae is not a model of .*; its models are transformer",
        ),
        ({"output": {"directory": "x", "pipeline": True}}, None, ""),
        ({"task": {"name": "flow-matching"}}, ConfigError, r"unknown key task\.path"),
    ],
)
def test_mistakes_are_named(tmp_path, change, error, message):
    values = configured(tmp_path, "wan", "fsdp2", 3)
    for section, keys in change.items():
        values[section] = {**values.get(section, {}), **keys}

    def read():
        config = parse_config(values)
        task_class(config.task.name)(config).open()

    if error is None:
        read()
    else:
        with pytest.raises(error, match=message):
            read()


def test_what_is_no_transformer_is_named(tmp_path):
    values = configured(tmp_path, "wan", "fsdp2", 3)
    with pytest.raises(ConfigError, match=r"task.name flow-matching needs the section media"):
        parse_config({**values, "task": {"name": "flow-matching"}})
    (tmp_path / "bare").mkdir()
    values["model"]["source"] = str(tmp_path / "bare")
    config = parse_config(values)
    with pytest.raises(CheckpointError, match=r"has no config\.json of a diffusers transformer"):
        task_class(config.task.name)(config).open()
    with pytest.raises(ConfigError, match="UNet2DConditionModel belongs to no family"):
        family_of("UNet2DConditionModel")
    assert family_of("MyTransformer", "wan").name == "wan"
    with pytest.raises(
        ConfigError, match=r"task.family wan: FluxTransformer2DModel belongs to the family flux;"
    ):
        family_of("FluxTransformer2DModel", "wan")


def test_the_experts_of_a_pipeline_have_their_own_times(tmp_path):
    values = configured(tmp_path, "wan", "fsdp2", 3)
    root = tmp_path / "wan"
    (root / "transformer").rename(root / "transformer_2")
    index = json.loads((root / "model_index.json").read_text())
    index |= {"boundary_ratio": 0.875, "transformer_2": index["transformer"]}
    (root / "model_index.json").write_text(json.dumps(index))
    for component in ("transformer_2", "transformer"):
        values["model"]["component"] = component
        config = parse_config(values)
        task = task_class(config.task.name)(config)
        task.open()
        assert task.where.boundaries == ((0.0, 0.875) if component == "transformer_2" else (0.875, 1.0))
        drawn = task.drawn({"items": [task.items(None)[i] for i in range(12)]}, 0)["t"]
        assert bool((drawn <= 0.875).all()) == (component == "transformer_2")
        alone = {**values, "model": {"source": str(root / component)}}
        by_itself = task_class(config.task.name)(parse_config(alone))
        by_itself.open()
        assert by_itself.where.boundaries == task.where.boundaries
        (root / "transformer_2").rename(root / "transformer") if component == "transformer_2" else None


def test_what_is_held_out_is_in_no_repeat(tmp_path):
    class Rows:
        def __len__(self):
            return 12  # four rows, three times

        def __getitem__(self, index):
            return {"row": index % 4, "index": index}

        def digest(self):
            return "rows"

        def shapes(self):
            return ["a", "b", "c", "d"] * 3

    training, held_out = split_off(Rows(), 0.25, [(4, 3)])
    assert [training[i]["row"] for i in range(len(training))] == [0, 1, 2] * 3
    assert [training[i]["index"] for i in range(len(training))] == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    assert training.shapes() == ["a", "b", "c"] * 3
    assert [held_out[i]["row"] for i in range(len(held_out))] == [3]
    assert held_out.shapes() == ["d"]
    once, rest = split_off(Rows(), 0.25)
    assert (len(once), len(rest), once.digest()) == (9, 3, "rows:0:9")


def test_tasks_are_known_by_name():
    class Mine(Task):
        """Nothing in particular."""

    with pytest.raises(ConfigError, match="another task is named 'flow-matching' already"):
        register_task("flow-matching", Mine)
    with pytest.raises(ConfigError, match="must not contain a colon"):
        register_task("a:b", Mine)
    with pytest.raises(ConfigError, match="cannot be imported: No module named 'nowhere'"):
        task_class("nowhere:Task")
    with pytest.raises(ConfigError, match="does not name a class derived from"):
        task_class("pathlib:Path")
