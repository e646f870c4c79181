"""Flow matching: times, weights and calls against diffusers and DiffSynth."""

import json
import math

import diffusers
import pytest
import torch

from tests.diffusion.components import COMPONENTS
from tests.integrations.pipelines import tiny_pipelines as tiny
from tests.training.data.tiny_media import PIPELINES, make_picture
from tests.training.diffusion.flow_items import (
    FAMILIES,
    build_transformer,
    make_config,
    make_examples,
    noise,
    predict_velocity,
)
from zerostart.errors import CheckpointError, ConfigError
from zerostart.training import Task, register_task
from zerostart.training.config.load import parse_config
from zerostart.training.diffusion.families import FAMILIES as KINDS
from zerostart.training.diffusion.families import family_of
from zerostart.training.diffusion.flow import FlowConfig, Times
from zerostart.training.loop.task import split_off, task_class


def make_family(name):
    component = COMPONENTS[FAMILIES[name][0]]
    return KINDS[name](build_transformer(name).config), component


def make_times(name="wan", boundaries=(0.0, 1.0), **settings):
    return Times(FlowConfig(**settings), make_family(name)[0], boundaries)


@pytest.mark.parametrize("name", FAMILIES)
def test_velocity_equals_the_call_of_the_pipeline(name):
    """Call two examples at once, with different times and text lengths."""
    kind, component = make_family(name)
    model, items = build_transformer(name).eval(), make_examples(name, 2)
    assert family_of(component.kind) is type(kind)
    latents = torch.stack([item["latents"] for item in items])
    t = torch.tensor([0.3, 0.8])
    with torch.no_grad():
        velocities = kind.velocity(model, latents, t, kind.conditions(items))
        for actual, item, x, at in zip(velocities, items, latents, t.tolist(), strict=True):
            expected = predict_velocity(name, model, x, at, item)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "key"), [("hunyuan-video", "hunyuan_video"), ("ltx2", "ltx2"), ("ltx2", "ltx2_i2v")]
)
def test_transformer_inputs_equal_those_of_the_pipeline(name, key):
    """LTX-2 is compared in the call in which the video ignores the audio."""
    torch.manual_seed(7)
    pipe, calls = (tiny.FAMILIES | PIPELINES)[key](), []
    pipe.set_progress_bar_config(disable=True)
    model, kind = pipe.transformer, KINDS[name](pipe.transformer.config, guidance=6.0)
    model.register_forward_hook(
        lambda _, __, inputs, output: calls.append((inputs, output[0])), with_kwargs=True
    )
    seed = torch.Generator().manual_seed(1)
    image = {"image": make_picture(32, 32, 1), "image_crf": 0} if key == "ltx2_i2v" else {}
    call = {**tiny.CALLS[key.removesuffix("_i2v")], **image}
    pipe(prompt="a cat", num_inference_steps=2, generator=seed, output_type="latent", **call)
    recorded = [call for call in calls if call[0].get("isolate_modalities", True)]
    for inputs, output in recorded:
        item = {"prompt_embeds": inputs["encoder_hidden_states"][0], "latents": inputs["hidden_states"][0]}
        item["prompt_attention_mask"] = inputs["encoder_attention_mask"][0]
        if name == "ltx2":
            embeds = [item["prompt_embeds"], inputs["audio_encoder_hidden_states"][0]]
            item["prompt_embeds"] = torch.cat(embeds, dim=-1)
            sizes = [inputs[size] for size in ("num_frames", "height", "width")]
            item["latents"] = pipe._unpack_latents(inputs["hidden_states"], *sizes)[0].clone()
            if image:
                # The condition replaces any values at the first frame.
                item["condition"] = item["latents"][:, :1].clone()
                item["latents"][:, :1] = 7.0
        else:
            item["pooled_prompt_embeds"] = inputs["pooled_projections"][0]
        with torch.no_grad():
            timestep = inputs["sigma" if name == "ltx2" else "timestep"] / 1000
            velocity = kind.velocity(model, item["latents"][None], timestep, kind.conditions([item]))
        ours, our_output = calls.pop()
        assert velocity.shape == item["latents"][None].shape
        torch.testing.assert_close(our_output, output, rtol=1e-5, atol=1e-5)
        expected = {key: value for key, value in inputs.items() if value is not None and "audio" not in key}
        expected.pop("video_coords", None)  # computed by the transformer
        torch.testing.assert_close({key: ours[key] for key in expected}, expected, check_dtype=False)
    assert len(recorded) == 2


def test_ltx2_parameters_without_gradient_are_frozen(tmp_path):
    task, model = open_task(tmp_path, "ltx2"), build_transformer("ltx2")
    task.begin(model)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    reference, (item,) = build_transformer("ltx2"), make_examples("ltx2", 1)
    velocity = task.family.velocity(
        reference, item["latents"][None], torch.tensor([0.5]), task.family.conditions([item])
    )
    velocity.square().sum().backward()
    assert frozen == {name for name, parameter in reference.named_parameters() if parameter.grad is None}
    assert 0 < len(frozen) < len(list(model.parameters()))


def test_frame_rates_of_a_batch_must_be_equal():
    kind, items = make_family("ltx2")[0], make_examples("ltx2", 2)
    rates = (torch.tensor(24.0), torch.tensor(30.0))
    items_with_rates = [{**item, "frame_rate": rate} for item, rate in zip(items, rates, strict=True)]
    assert kind.conditions(items_with_rates[1:])["frame_rate"] == 30.0
    assert kind.conditions(items)["frame_rate"] == 24.0
    with pytest.raises(ConfigError, match=r"have 24\.0 and 30\.0 frames a second"):
        kind.conditions(items_with_rates)
    with pytest.raises(ConfigError, match=r"prompt_embeds of width 16, but the transformer takes 32"):
        kind.conditions([{**items[0], "prompt_embeds": noise(6, 16, seed=1)}])


def test_edit_pictures_of_an_example():
    """Their tokens follow those of the latents, as in the pipelines for editing."""
    import diffusers

    model, x = build_transformer("qwen-image").eval(), noise(1, 4, 8, 8, seed=1)
    images = {f"image_latents.{i}": noise(4, 4 + 4 * i, 8, seed=2 + i) for i in range(2)}
    item = {**make_examples("qwen-image", 1)[0], **images}
    kind, t = KINDS["qwen-image"](model.config), torch.tensor([0.4])
    pack = diffusers.QwenImagePipeline._pack_latents
    tokens = torch.cat([pack(i, 1, 4, *i.shape[-2:]) for i in (x, *(i[None] for i in images.values()))], 1)
    sides = [[(1, 4, 4), (1, 2, 4), (1, 4, 4)]]
    with torch.no_grad():
        actual = kind.velocity(model, x, t, kind.conditions([item]))
        expected = model(tokens, item["prompt_embeds"][None], None, t, sides, return_dict=False)[0][:, :16]
    unpack = diffusers.QwenImagePipeline._unpack_latents
    torch.testing.assert_close(actual, unpack(expected, 64, 64, 8)[:, :, 0])

    model, x = build_transformer("flux").eval(), noise(1, 1, 8, 8, seed=1)
    item = {**make_examples("flux", 1)[0], "image_latents.0": noise(1, 4, 8, seed=4)}
    kind, pipe = KINDS["flux"](model.config), diffusers.FluxKontextPipeline
    tokens = torch.cat(
        [pipe._pack_latents(x, 1, 1, 8, 8), pipe._pack_latents(item["image_latents.0"][None], 1, 1, 4, 8)], 1
    )
    ids = pipe._prepare_latent_image_ids(1, 4, 4, "cpu", torch.float32)
    image_ids = pipe._prepare_latent_image_ids(1, 2, 4, "cpu", torch.float32)
    image_ids[:, 0] = 1
    text, pooled = item["prompt_embeds"][None], item["pooled_prompt_embeds"][None]
    with torch.no_grad():
        actual = kind.velocity(model, x, t, kind.conditions([item]))
        expected = model(
            tokens,
            text,
            pooled,
            t,
            torch.cat([ids, image_ids]),
            torch.zeros(8, 3),
            torch.ones(1),
            return_dict=False,
        )[0][:, :16]
    torch.testing.assert_close(actual, pipe._unpack_latents(expected, 64, 64, 8))

    model, x = build_transformer("flux2").eval(), noise(1, 4, 4, 4, seed=1)
    images = [noise(4, 2, 4, seed=5), noise(4, 4, 4, seed=6)]
    item = {**make_examples("flux2", 1)[0], **{f"image_latents.{i}": image for i, image in enumerate(images)}}
    kind, pipe = KINDS["flux2"](model.config), diffusers.Flux2Pipeline
    ids = torch.cat([pipe._prepare_latent_ids(x), pipe._prepare_image_ids([i[None] for i in images])], 1)
    tokens = torch.cat([pipe._pack_latents(image) for image in (x, *(i[None] for i in images))], 1)
    text = item["prompt_embeds"][None]
    with torch.no_grad():
        actual = kind.velocity(model, x, t, kind.conditions([item]))
        expected = model(
            tokens, text, t, ids, pipe._prepare_text_ids(text), torch.ones(1), return_dict=False
        )[0]
    torch.testing.assert_close(actual[0], pipe._unpack_latents_with_ids(expected[:, :16], ids[:, :16])[0])


@pytest.mark.parametrize("name", ["flux", "qwen-image"])
def test_odd_sides_are_refused_before_the_call(name):
    """Otherwise other ranks would wait in the forward of the transformer."""
    kind, _ = make_family(name)
    (item,) = make_examples(name, 1)
    for key in ("latents", "image_latents.0"):
        odd = {**item, key: noise(*item["latents"].shape[:-1], 7, seed=1)}
        with pytest.raises(
            ConfigError,
            match=rf"{key} of 8 by 7 cannot be divided into patches of 2 by 2: make both sides even",
        ):
            kind.conditions([odd])


def test_wan_with_condition_frames():
    """Frames are extra channels if the transformer has them, or the first frame otherwise."""
    torch.manual_seed(1)
    model = COMPONENTS["wan2.1 i2v"].build().eval()
    kind, x, t = KINDS["wan"](model.config), noise(1, 4, 3, 4, 4, seed=1), torch.tensor([0.6])
    item = {"latents": x[0], "prompt_embeds": noise(6, 16, seed=2), "image_embeds": noise(5, 13, seed=3)}
    item["condition"] = noise(4, 3, 4, 4, seed=4)
    with torch.no_grad():
        actual = kind.velocity(model, x, t, kind.conditions([item]))
        inputs = torch.cat([x, item["condition"][None]], 1)
        embeds = (item["prompt_embeds"][None], item["image_embeds"][None])
        expected = model(inputs, t * 1000, *embeds, return_dict=False)[0]
        assert torch.equal(actual, expected)
        with pytest.raises(ConfigError, match=r"latents .and condition. of 4 channels, .* takes 8"):
            kind.conditions([{name: value for name, value in item.items() if name != "condition"}])

    model = build_transformer("wan").eval()
    kind = KINDS["wan"](model.config)
    # This transformer ignores image_embeds.
    conditions = kind.conditions([{**item, "condition": noise(4, 1, 4, 4, seed=4)}])
    mask = torch.ones(1, 1, 3, 4, 4)
    mask[:, :, 0] = 0
    with torch.no_grad():
        actual = kind.velocity(model, x, t, conditions)
        inputs = (1 - mask) * conditions["condition"] + mask * x
        timestep = (mask[0][0][:, ::2, ::2] * t * 1000).flatten()[None]
        expected = model(inputs, timestep, embeds[0], return_dict=False)[0]
    torch.testing.assert_close(actual, expected)
    assert kind.loss_values(actual, conditions).shape[2] == 2  # DiffSynth's loss leaves the first frame out

    model = COMPONENTS["wan2.1 vace"].build().eval()
    kind = KINDS["wan"](model.config)
    item = {"latents": x[0], "prompt_embeds": item["prompt_embeds"]}
    with pytest.raises(ConfigError, match="no control_latents"):
        kind.conditions([item])
    control = noise(6, 3, 4, 4, seed=8)
    with torch.no_grad():
        actual = kind.velocity(model, x, t, kind.conditions([{**item, "control_latents": control}]))
        expected = model(x, t * 1000, embeds[0], None, control[None], torch.ones(2), return_dict=False)[0]
    assert torch.equal(actual, expected)


def test_wan_with_a_first_and_a_last_frame():
    """The pipeline of Wan2.1 FLF2V passes the pictures as [2 * batch, L, D]."""
    torch.manual_seed(1)
    component = COMPONENTS["wan2.1 i2v"]
    model = diffusers.WanTransformer3DModel(**{**component.config, "pos_embed_seq_len": 10}).eval()
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
        actual = kind.velocity(model, x, t, kind.conditions(items))
        expected = model(torch.cat([x, condition], 1), t * 1000, texts, pictures, return_dict=False)[0]
    assert torch.equal(actual, expected)
    for lacking in ({**items[0], "image_embeds": pictures[0]}, items[0] | {"image_embeds": pictures[0, :0]}):
        with pytest.raises(ConfigError, match=r"takes 10, for a first and a last frame: set cache.last"):
            kind.conditions([lacking])


@pytest.mark.parametrize("sampling", ["uniform", "logit-normal"])
@pytest.mark.parametrize("boundaries", [(0.0, 1.0), (0.875, 1.0), (0.2, 0.4)])
def test_times_between_boundaries_keep_their_distribution(sampling, boundaries):
    """Quantiles equal those of diffusers' and DiffSynth's draws between the boundaries."""
    low, high = boundaries
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(400_000, generator=generator, dtype=torch.float64)
    if sampling == "logit-normal":
        u = torch.sigmoid(0.3 + 1.2 * torch.randn(400_000, generator=generator, dtype=torch.float64))
    theirs = 3 * u / (1 + 2 * u)
    theirs = theirs[(theirs >= low) & (theirs <= high)]
    quantiles = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    settings = {"logit_mean": 0.3, "logit_std": 1.2} if sampling == "logit-normal" else {}
    ours = make_times(boundaries=boundaries, sampling=sampling, shift=3.0, **settings).at(quantiles, 3.0)
    assert ours.min() >= low
    assert ours.max() <= high
    torch.testing.assert_close(ours, torch.quantile(theirs, quantiles), rtol=0, atol=0.01)


def test_shifts_equal_diffusers():
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    assert make_times("flux").shift(4096) == 3.0
    assert make_times("wan", shift=7.5).shift(1) == 7.5
    shifts = {
        name: make_times(name, shift="resolution").shift(1024) for name in ("flux", "qwen-image", "flux2")
    }
    assert shifts["flux"] == pytest.approx(math.exp(calculate_shift(1024)))
    assert shifts["qwen-image"] == pytest.approx(math.exp(calculate_shift(1024, 256, 8192, 0.5, 0.9)))
    assert shifts["flux2"] == pytest.approx(math.exp(compute_empirical_mu(1024, 50)))
    with pytest.raises(ConfigError, match="wan has no shift by resolution"):
        make_times("wan", shift="resolution").shift(1024)


def test_weights_of_times():
    """References are diffusers' function, and DiffSynth's formula at Wan's times."""
    from diffusers.training_utils import compute_loss_weighting_for_sd3

    t = torch.tensor([0.1, 0.5, 0.95])
    for ours, theirs in (("cosmap", "cosmap"), ("sigma-sqrt", "sigma_sqrt"), ("none", "none")):
        expected = compute_loss_weighting_for_sd3(theirs, t)
        torch.testing.assert_close(make_times(weighting=ours).weights(t, 5.0), expected)
    sigmas = torch.linspace(1.0, 0.0, 1001)[:-1]
    sigmas = 5 * sigmas / (1 + 4 * sigmas)
    y = torch.exp(-2 * ((sigmas * 1000 - 500) / 1000) ** 2)
    y = (y - y.min()) * (1000 / (y - y.min()).sum())
    weights = make_times(weighting="bell").weights(sigmas, 5.0)
    torch.testing.assert_close(weights, y, rtol=1e-4, atol=1e-5)


def open_task(folder, name="wan", precision="no", **settings):
    values = make_config(folder, name, "fsdp2", 3)
    values["task"] |= settings
    values["train"]["mixed_precision"] = precision
    config = parse_config(values)
    task = task_class(config.task.name)(config)
    task.open()
    return task


def test_draws_depend_only_on_seed_epoch_and_number(tmp_path):
    task = open_task(tmp_path)
    items = task.items(None)
    collate = task.collator(0)
    batch = task.drawn(collate([items[i] for i in range(4)]), 2)
    single = task.drawn(task.collator(7)([items[2]]), 2)
    for key in ("noisy", "target", "t"):
        assert torch.equal(batch[key][2:3], single[key])
    later = task.drawn(collate([items[2]]), 3)
    assert not torch.equal(later["t"], single["t"])
    assert not torch.equal(later["target"], single["target"])
    x, t = items[2]["latents"], single["t"]
    torch.testing.assert_close(single["noisy"][0], x + t * single["target"][0])


@pytest.mark.parametrize(("name", "unit"), [("wan", 1000.0), ("flux", 1.0)])
def test_bf16_latents_are_mixed_at_rounded_times(tmp_path, name, unit):
    task = open_task(tmp_path, name, "bf16")
    batch = task.drawn({"items": [task.items(None)[i] for i in range(8)]}, 0)
    times = batch["t"] * unit
    torch.testing.assert_close(times.bfloat16().float(), times, rtol=3e-7, atol=0)


def test_dropped_texts_are_replaced_by_the_empty_text(tmp_path):
    task = open_task(tmp_path, drop_prompt=0.5)
    with pytest.raises(ConfigError, match="have no embeddings of the text ''"):
        task.items(None)
    empty = torch.zeros(6, 16)

    class Items(list):
        def prompt(self, text):
            assert text == ""
            return {"prompt_embeds": empty}

    items = task.numbered(Items(make_examples("wan", 40)))
    embeds = [task.drawn({"items": [items[i]]}, 0)["conditions"]["prompt_embeds"] for i in range(40)]
    dropped = [not text_embeds.any() for text_embeds in embeds]
    assert 8 <= sum(dropped) <= 32
    assert all(
        torch.equal(text_embeds[0], items[i]["prompt_embeds"])
        for i, text_embeds in enumerate(embeds)
        if text_embeds.any()
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"task": {"boundaries": [0.9, 0.1]}}, ConfigError, "boundaries must be a lower and a higher time"),
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
    values = make_config(tmp_path, "wan", "fsdp2", 3)
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


def test_missing_or_unknown_transformer_is_named(tmp_path):
    values = make_config(tmp_path, "wan", "fsdp2", 3)
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
    values = make_config(tmp_path, "wan", "fsdp2", 3)
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
        times = task.drawn({"items": [task.items(None)[i] for i in range(12)]}, 0)["t"]
        assert bool((times <= 0.875).all()) == (component == "transformer_2")
        single = {**values, "model": {"source": str(root / component)}}
        single_task = task_class(config.task.name)(parse_config(single))
        single_task.open()
        assert single_task.where.boundaries == task.where.boundaries
        (root / "transformer_2").rename(root / "transformer") if component == "transformer_2" else None


def test_held_out_items_are_in_no_repeat(tmp_path):
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
    train_part, test_part = split_off(Rows(), 0.25)
    assert (len(train_part), len(test_part), train_part.digest()) == (9, 3, "rows:0:9")


def test_registration_of_tasks():
    class Mine(Task):
        """Task without methods."""

    with pytest.raises(ConfigError, match="another task is named 'flow-matching' already"):
        register_task("flow-matching", Mine)
    with pytest.raises(ConfigError, match="must not contain a colon"):
        register_task("a:b", Mine)
    with pytest.raises(ConfigError, match="cannot be imported: No module named 'nowhere'"):
        task_class("nowhere:Task")
    with pytest.raises(ConfigError, match="does not name a class derived from"):
        task_class("pathlib:Path")
