"""Pictures: conversion to upright RGB, scaling and cropping."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.training.data.media_files import CHINA
from zerostart.errors import ConfigError
from zerostart.training.data.media import (
    MediaFile,
    fit_picture,
    image_size,
    rgb_image,
    standard_sizes,
    target_size,
)
from zerostart.training.data.media_config import MediaConfig

BACKGROUND = (255, 128, 0)
GENERATOR = np.random.default_rng(0)
COLORS = GENERATOR.integers(0, 256, (4, 6, 3), dtype=np.uint8)
GREY = COLORS[..., 0]


def encode(picture, suffix=".png", **options):
    content = io.BytesIO()
    picture.save(content, Image.registered_extensions()[suffix], **options)
    return MediaFile(f"picture{suffix}", None, content.getvalue())


def decode(file):
    return np.asarray(rgb_image(file, BACKGROUND))


def test_modes_become_red_green_and_blue():
    grey = np.repeat(GREY[..., None], 3, axis=2)
    assert (decode(encode(Image.fromarray(COLORS))) == COLORS).all()
    assert (decode(encode(Image.fromarray(GREY))) == grey).all()
    assert (decode(encode(Image.fromarray(GREY > 99).convert("1"))) == 255 * (grey > 99)).all()
    quantized = Image.fromarray(COLORS).quantize(4)
    assert (decode(encode(quantized)) == np.asarray(quantized.convert("RGB"))).all()
    cmyk = Image.fromarray(COLORS).convert("CMYK")  # black is 0 there: each color is 255 minus its ink
    assert (decode(encode(cmyk, ".tif")) == COLORS).all()


def test_sixteen_bits_are_scaled_and_not_cut_off():
    grey = np.repeat(GREY[..., None], 3, axis=2)
    for suffix in (".png", ".tif"):
        assert (decode(encode(Image.fromarray(GREY.astype(np.uint16) * 257), suffix)) == grey).all()
    between = np.array([[0, 128, 129, 65535 - 129, 65535]], dtype=np.uint16)
    assert decode(encode(Image.fromarray(between)))[0, :, 0].tolist() == [0, 0, 1, 254, 255]
    with pytest.raises(ConfigError, match="mode I with more than 16 bits"):
        decode(encode(Image.fromarray(GREY.astype(np.int32) * 100000), ".tif"))
    with pytest.raises(ConfigError, match="mode F with more than 16 bits"):
        decode(encode(Image.fromarray(GREY.astype(np.float32)), ".tif"))


def test_transparent_pixels_show_the_background():
    alpha = np.tile(np.array([0, 255, 0, 255, 51, 204], dtype=np.uint8), (4, 1))
    weight = alpha[..., None] / 255
    expected = COLORS * weight + np.array(BACKGROUND) * (1 - weight)
    rgb = decode(encode(Image.fromarray(np.dstack([COLORS, alpha]))))
    assert np.abs(rgb - expected).max() <= 1
    assert (rgb[:, 1::2][:, :2] == COLORS[:, 1:4:2]).all()
    assert (rgb[:, 0] == BACKGROUND).all()
    palette = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), "P")
    palette.putpalette([10, 20, 30, 40, 50, 60])
    assert decode(encode(palette, transparency=0))[0].tolist() == [list(BACKGROUND), [40, 50, 60]]


def test_pictures_stand_upright():
    upright = {
        1: COLORS,
        2: COLORS[:, ::-1],
        3: COLORS[::-1, ::-1],
        4: COLORS[::-1],
        5: COLORS.transpose(1, 0, 2),
        6: np.rot90(COLORS, -1),
        7: COLORS[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(COLORS, 1),
    }
    for orientation, expected in upright.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        for suffix in (".png", ".tif"):
            file = encode(Image.fromarray(COLORS), suffix, exif=exif)
            assert (decode(file) == expected).all(), orientation
            assert image_size(file) == expected.shape[:2]


def make_config(**keys):
    return MediaConfig(source="unused", **keys)


def test_sizes_equal_diffsynths():
    """Sizes of its ``ImageCropAndResize.get_height_width``, as (height, width)."""
    for size, keys, expected in [
        ((427, 640), {"max_pixels": 65536}, (208, 304)),
        ((427, 640), {}, (416, 640)),
        ((427, 640), {"multiple_of": 32}, (416, 640)),
        ((3024, 4032), {}, (880, 1168)),
        ((3024, 4032), {"multiple_of": 32}, (864, 1152)),
        ((1080, 1920), {"max_pixels": 832 * 480}, (464, 832)),
        ((10, 10), {"height": 480, "width": 832}, (480, 832)),
    ]:
        assert target_size(size, make_config(**keys)) == expected
    with pytest.raises(ConfigError, match=r"10 x 640 pixels .* are too few for media\.multiple_of 16"):
        target_size((10, 640), make_config())


def test_a_picture_goes_to_the_bucket_of_its_shape():
    buckets = make_config(buckets=[[512, 512], [384, 640], [640, 384], [768, 1280]])
    assert target_size((427, 640), buckets) == (768, 1280)  # of equal shapes the largest
    assert target_size((640, 427), buckets) == (640, 384)
    assert target_size((500, 520), buckets) == (512, 512)
    assert (1024, 1024) in standard_sizes(1024 * 1024, 16)
    assert target_size((3024, 4032), make_config(buckets="standard")) == (896, 1152)


@given(st.integers(256, 2**21), st.sampled_from([8, 16, 32, 48]))
def test_standard_sizes_fit(max_pixels, multiple_of):
    if max_pixels < multiple_of**2:
        with pytest.raises(ConfigError, match=r"media\.max_pixels"):
            standard_sizes(max_pixels, multiple_of)
        return
    sizes = standard_sizes(max_pixels, multiple_of)
    assert len(set(sizes)) == len(sizes)
    for height, width in sizes:
        assert height % multiple_of == width % multiple_of == 0
        assert height * width <= max_pixels
        assert 0.5 <= height / width <= 2


def test_scaling_and_cropping():
    with Image.open(CHINA) as picture:
        half = picture.resize((320, 214), Image.Resampling.BILINEAR)
        assert fit_picture(picture, (427, 640)) == picture
        whole = np.asarray(picture)
        assert (np.asarray(fit_picture(picture, (427, 400))) == whole[:, 120:520]).all()
        assert (
            np.asarray(fit_picture(picture, (400, 640))) == whole[14:414]
        ).all()  # 13.5 pixels, rounded to even
        assert (np.asarray(fit_picture(picture, (208, 320))) == np.asarray(half)[3:211]).all()
        assert fit_picture(picture, (1024, 1024)).size == (1024, 1024)
