"""Tables of media: formats, columns, errors, and equal media on every rank."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.ranks import rank_outcomes
from tests.training.data.media_files import CHINA, FLOWER
from zerostart.distributed.world import World
from zerostart.errors import ConfigError
from zerostart.training.config.load import parse_config
from zerostart.training.data.items import MediaItems, read_media
from zerostart.training.data.media_config import MediaConfig

WORLD = World(0, 1, None)
ROWS = [
    {
        "image": "china.jpg",
        "edit_image": ["flower.jpg", "china.jpg"],
        "prompt": "roofs, and a sky",
        "note": "1",
    },
    {"image": "flower.jpg", "edit_image": None, "prompt": None, "note": "2"},
]
AS_CSV = """image,edit_image,prompt,note
china.jpg,"[""flower.jpg"", ""china.jpg""]","roofs, and a sky",1

flower.jpg,,,2
"""


@pytest.fixture
def folder(tmp_path):
    shutil.copy(CHINA, tmp_path)
    shutil.copy(FLOWER, tmp_path)
    return tmp_path


def make_config(source, **settings):
    return MediaConfig(source=str(source), **{"height": 32, "width": 48, **settings})


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, expected[name])
        elif isinstance(value, list):
            assert all(torch.equal(*pair) for pair in zip(value, expected[name], strict=True))
        else:
            assert value == expected[name]


def get_digests(items):
    return [content for content, _ in items.digests]


def test_one_table_in_three_formats(folder):
    (folder / "a.csv").write_text(AS_CSV, encoding="utf-8-sig")
    (folder / "b.json").write_text(json.dumps(ROWS))
    (folder / "c.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    csv, *json_tables = [
        read_media(make_config(folder / name), WORLD) for name in ("a.csv", "b.json", "c.jsonl")
    ]
    for table in json_tables:
        assert get_digests(table) == get_digests(csv)
        for index in range(2):
            assert_same(csv[index], table[index])
    first, second = csv[0], csv[1]
    assert (first["prompt"], second["prompt"], first["note"]) == ("roofs, and a sky", "", "1")
    assert first["image"].dtype == torch.uint8
    assert first["image"].shape == (3, 32, 48)
    assert [picture.shape for picture in first["edit_image"]] == [(3, 32, 48)] * 2
    assert second["edit_image"] == []
    assert torch.equal(first["edit_image"][1], first["image"])
    with Image.open(FLOWER) as flower:
        mean = torch.from_numpy(np.array(flower)).float().mean((0, 1))
    assert torch.allclose(second["image"].float().mean((1, 2)), mean, atol=6.0)
    with pytest.raises(IndexError):
        csv[2]


def test_folder_without_a_table_has_text_files(folder):
    (folder / "china.txt").write_text("roofs\n")
    (folder / "more").mkdir()
    (folder / ".hidden").mkdir()
    shutil.copy(FLOWER, folder / ".hidden")
    (folder / "flower.jpg").rename(folder / "more" / "flower.jpg")
    with pytest.raises(
        ConfigError, match=r"1 files have no \.txt .*\(more/flower\.jpg\).*media\.prompt to null"
    ):
        MediaItems(make_config(folder))
    shutil.copy(FLOWER, folder / "z.jpg")
    (folder / "z.txt").write_text("the next one")
    with pytest.raises(ConfigError, match=r"1 files have no \.txt"):
        MediaItems(make_config(folder, items=2))  # it does not skip to the next file
    (folder / "z.jpg").unlink()
    (folder / "more" / "flower.txt").write_text("a flower")
    items = MediaItems(make_config(folder))
    assert [items[index]["prompt"] for index in range(2)] == ["roofs", "a flower"]
    assert MediaItems(make_config(folder, prompt=None))[1]["prompt"] == ""
    (folder / "metadata.jsonl").write_text(json.dumps({"image": "china.jpg", "prompt": "by the table"}))
    assert [item["prompt"] for item in MediaItems(make_config(folder))] == ["by the table"]
    (folder / "metadata.csv").write_text("image,prompt\n")
    with pytest.raises(ConfigError, match=r"metadata\.csv and metadata\.jsonl; name the file to use"):
        MediaItems(make_config(folder))


def test_columns_by_other_names(folder):
    table = folder / "pairs.jsonl"
    table.write_text(
        json.dumps({"after": "china.jpg", "before": "flower.jpg", "caption": "x", "image": "no file"})
    )
    columns = {"image": "after", "edit_image": "before", "depth": {"column": "before", "kind": "image"}}
    items = read_media(make_config(table, columns=columns, prompt="caption"), WORLD)
    assert {name for name, value in items[0].items() if not isinstance(value, str)} == set(columns)
    assert items[0]["prompt"] == "x"
    assert torch.equal(items[0]["depth"], items[0]["edit_image"][0])


def test_digest_depends_on_contents_not_on_paths(folder, tmp_path_factory):
    (folder / "a.json").write_text(json.dumps(ROWS))
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in ("china", "flower"):
        shutil.copy(folder / f"{name}.jpg", elsewhere / f"other-{name}.jpg")
    (folder / "b.json").write_text(
        json.dumps(ROWS).replace("china.jpg", "other-china.jpg").replace('"flo', '"other-flo')
    )
    items, copies = (
        MediaItems(make_config(folder / "a.json")),
        MediaItems(make_config(folder / "b.json", base=str(elsewhere))),
    )
    assert get_digests(items) == get_digests(copies)
    assert get_digests(items) == get_digests(MediaItems(make_config(folder / "a.json", repeats=3, workers=1)))
    assert get_digests(items) != get_digests(MediaItems(make_config(folder / "a.json", width=32)))
    picture = elsewhere / "other-flower.jpg"
    data = picture.read_bytes()
    picture.write_bytes(data + b"0")
    assert get_digests(items) != get_digests(MediaItems(make_config(folder / "b.json", base=str(elsewhere))))


def test_columns_left_out_are_not_read_as_pictures(folder):
    row = {"image": "china.jpg", "video": "clip.mp4", "edit_image": None, "note": 3, "prompt": "x"}
    (folder / "a.json").write_text(json.dumps([row]))
    item = MediaItems(make_config(folder / "a.json", columns={"image": "image"}))[0]
    assert item.keys() == {"image", "note", "prompt"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "image,prompt\nx.png,one,two\n", r"a\.csv, line 2: not as many cells as .*\(2\).*quotes"),
        ("a.csv", 'image,prompt\nx.png,"one\n', r"a\.csv, line \d: not valid CSV"),
        ("a.csv", "image,image\nx,y\n", r"a\.csv: two columns have the same name: image"),
        ("a.csv", "image,prompt\n", r"a\.csv is empty: it has no row"),
        ("a.csv", "image,promt\nx,y\n", r"no column 'prompt' but image, promt .*did you mean promt\?"),
        (
            "a.csv",
            "file,prompt\nx,y\n",
            r"none of its columns \(file, prompt\) is one of video, image,.*file_name",
        ),
        ("a.csv", b"image,prompt\n\xff\xfe,y\n", r"a\.csv, line 2: not UTF-8 text \(the byte 0xff\)"),
        ("a.json", '{"image": "x"}', r"a\.json: a table is a JSON list of objects, not a dict"),
        ("a.json", '[{"image": "x"}, 3]', r"a\.json, entry 2: a row is a JSON object"),
        ("a.jsonl", '{"image": "x"}\n{', r"a\.jsonl, line 2: not valid JSON"),
        ("a.jsonl", f'{{"seed": {"9" * 5000}}}', r"a\.jsonl, line 1: not valid JSON: Exceeds the limit"),
        ("a.jsonl", '{"image": "~$x.png", "prompt": "y"}', r"~\$x\.png: no such file"),
        ("a.jsonl", '{"image": "x", "prompt": 3}', r"line 1: column 'prompt': 3 is not a text"),
        (
            "a.jsonl",
            '{"image": ["x"], "prompt": "y"}',
            r"column 'image': a list of files, but its kind is image",
        ),
        ("a.jsonl", '{"image": 7, "prompt": "y"}', r"column 'image': 7 is not the name of a file"),
        ("a.jsonl", '{"image": "https://a/b.png", "prompt": "y"}', r"https://a/b\.png is a URL; download"),
        ("a.jsonl", '{"image": "", "prompt": "y"}', r"line 1: its cells under image are all empty"),
        ("a.csv", b"\xef\xbb\xbfimage,prompt\nx,\xe9t\xe9\n", r"a\.csv, line 2: not UTF-8 .*0xe9"),
        (
            "a.csv",
            "image,prompt\nx,y\n".encode("utf-16"),
            r"a\.csv, line 1: .*only UTF-8 is read, not UTF-16",
        ),
        ("a.jsonl", '{"image": "x"}\n'.encode("utf-16-le"), r"a\.jsonl, line 1: not UTF-8 .*0x00"),
        ("a.json", b'[\n{"image": "\x93"}]', r"a\.json, line 2: not UTF-8 text"),
        ("a.jsonl", b'{"image": "x"}\n\n{"image": "\xe9"}', r"a\.jsonl, line 3: not UTF-8 text"),
        ("a.csv", "image;prompt\nx;y, z\n", r"a\.csv, line 1: semicolons between the columns; .*commas"),
        ("a.csv", '"image";"prompt"\r\n"x";"y"\r\n', r"a\.csv, line 1: semicolons between the columns"),
        ("a.txt", "image", r"a table is a \.csv, \.json or \.jsonl file: not '\.txt'"),
    ],
)
def test_bad_tables_are_named_by_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        read_media(make_config(tmp_path / name), WORLD)[0]


@pytest.mark.parametrize("name", ["More\\\\a.png", "more/A.PNG", "More/A.png", "\\\\More/a.png"])
def test_misspelled_path_suggests_the_existing_file(tmp_path, name):
    (tmp_path / "More").mkdir()
    Image.new("RGB", (32, 32)).save(tmp_path / "More" / "a.png")
    (tmp_path / "t.jsonl").write_text(f'{{"image": "{name}", "prompt": "x"}}')
    with pytest.raises(ConfigError, match=rf"no such file; did you mean {tmp_path}/More/a\.png\?"):
        read_media(make_config(tmp_path / "t.jsonl"), WORLD)
    with pytest.raises(ConfigError, match=rf"did you mean {tmp_path}/t\.jsonl\?"):
        read_media(make_config(tmp_path / "T.jsonl"), WORLD)
    with pytest.raises(ConfigError, match=rf"media\.base .*did you mean {tmp_path}/More\?"):
        read_media(make_config(tmp_path / "t.jsonl", base=f"{tmp_path}/MORE"), WORLD)


def test_unicode_line_separators_do_not_end_json_lines(folder):
    row = {"image": "china.jpg", "prompt": "a temple\u2028and its roofs"}
    (folder / "t.jsonl").write_text(
        json.dumps(row, ensure_ascii=False) + "\r\n", newline="", encoding="utf-8"
    )
    assert read_media(make_config(folder / "t.jsonl"), WORLD)[0]["prompt"] == row["prompt"]


def test_text_file_that_is_not_utf_8_is_named(folder):
    (folder / "flower.txt").write_text("a flower")
    (folder / "china.txt").write_bytes("roofs\n\u201cof a temple\u201d".encode("cp1252"))
    with pytest.raises(ConfigError, match=r"china\.txt, line 2: not UTF-8 text \(the byte 0x93\); .*UTF-8"):
        read_media(make_config(folder), WORLD)


def test_absent_and_damaged_files_are_named_by_row(folder):
    rows = [{"image": f"{name}.jpg", "prompt": ""} for name in ("a", "china", "b", "c", "d", "e")]
    (folder / "t.json").write_text(json.dumps(rows))
    with pytest.raises(ConfigError) as caught:
        read_media(make_config(folder / "t.json"), WORLD)
    text = str(caught.value)
    assert (
        f"t.json, entry 1: {folder}/a.jpg: no such file; correct the name; names in a table are relative to "
        "the directory media.base" in text
    )
    assert text.endswith("; and 2 more rows")
    (folder / "a.jpg").write_bytes(CHINA.read_bytes()[:5000])
    (folder / "b.jpg").write_text("no picture")
    items = MediaItems(make_config(folder / "t.json", items=3))
    assert len(items) == 3
    for index, entry in ((0, 1), (2, 3)):
        with pytest.raises(ConfigError, match=rf"entry {entry}: .*cannot be read as a picture.*replace it"):
            items[index]
    with pytest.raises(ConfigError, match="no such file or directory"):
        MediaItems(make_config(folder / "absent.csv"))
    (folder / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no metadata\.csv.*picture or video"):
        MediaItems(make_config(folder / "empty"))
    with pytest.raises(ConfigError, match=r"media\.base .*no such directory"):
        MediaItems(make_config(folder / "t.json", base=str(folder / "nowhere")))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"height": 64}, "media: height and width belong together"),
        ({"height": 60, "width": 64}, "a size of 60 x 64 does not consist of multiples of multiple_of 16"),
        ({"buckets": [[64, 64], [64, 65]]}, "a size of 64 x 65 does not"),
        ({"buckets": []}, "media.buckets.* at least 1 item"),
        ({"height": 64, "width": 64, "buckets": "standard"}, "no meaning together with height and width"),
        ({"num_frames": 80}, r"num_frames 80 does not leave 1 when divided by 4 .*; 77 or 81 does"),
        ({"time_division_remainder": 4}, "not less than the factor 4"),
        ({"frames": "even", "frame_rate": 8}, "leave one of the two out"),
        ({"columns": {"depth": "d"}}, r"columns\.depth is none of video, image"),
        ({"columns": {"prompt": "d"}}, "'prompt' does not name files"),
        ({"background": [0, 0, 256]}, "has a number above 255"),
        ({"hight": 3}, r"unknown key media\.hight; did you mean media\.height\?"),
    ],
)
def test_bad_settings_are_named_by_key(keys, message):
    values = {
        "model": {"source": "x"},
        "task": {"name": "flow-matching"},
        "train": {"steps": 1},
        "output": {"directory": "y"},
        "media": {"source": "z", **keys},
    }
    with pytest.raises(ConfigError, match=message):
        parse_config(values)


def read_rank_tables(folder, rows):
    """Return the digests of this rank's tables, or their errors."""
    from zerostart.distributed.world import current_world

    rank = int(os.environ["RANK"])
    results = []
    for case in rows:
        table = Path(folder, f"rank{rank}.json")
        table.write_text(json.dumps(case[rank]))
        try:
            results.append(get_digests(read_media(make_config(table), current_world())))
        except ConfigError as error:
            results.append(str(error))
    return results


@pytest.mark.slow
def test_ranks_with_different_media_fail(folder):
    row, other, absent = (
        {"image": name, "prompt": "x"} for name in ("china.jpg", "flower.jpg", "absent.jpg")
    )
    cases = [([row], [row]), ([row], [other]), ([row], [row, other]), ([row], [absent])]
    outcomes = rank_outcomes(read_rank_tables, 2, str(folder), cases, timeout=60)
    assert all(outcome.ok for outcome in outcomes), outcomes
    first, second = (outcome.value for outcome in outcomes)
    assert first == second
    assert first[0] == get_digests(MediaItems(make_config(folder / "rank0.json")))
    assert "the ranks differ in the media (rank 0: '1 rows," in first[1]
    assert "rank 1: '2 rows," in first[2]
    assert "absent.jpg: no such file" in first[3]


def test_saved_hugging_face_datasets(folder):
    datasets = pytest.importorskip("datasets")
    columns = {
        "image": [str(folder / "china.jpg"), str(folder / "flower.jpg")],
        "edit_image": [[str(folder / "flower.jpg")] * 2, []],
        "text": ["roofs", "a flower"],
    }
    features = {"image": datasets.Image(), "edit_image": datasets.List(datasets.Image())}
    features = datasets.Features({**features, "text": datasets.Value("string")})
    dataset = datasets.Dataset.from_dict(columns, features)
    (folder / "t.json").write_text(
        json.dumps([{"image": "china.jpg", "edit_image": ["flower.jpg"] * 2, "prompt": "roofs"}])
    )
    expected = MediaItems(make_config(folder / "t.json"))[0]
    datasets.DatasetDict({"train": dataset}).save_to_disk(folder / "several")
    dataset.save_to_disk(folder / "one")
    for name in ("several", "one"):
        items = read_media(make_config(folder / name, prompt="text"), WORLD)
        assert len(items) == 2
        assert_same(items[0], expected)
    with pytest.raises(ConfigError, match=r"cannot load the split 'test'"):
        MediaItems(make_config(folder / "several", split="test"))


def test_without_the_library_a_dataset_is_refused_by_name():
    try:
        import datasets  # noqa: F401
    except ImportError:
        with pytest.raises(
            ConfigError, match=r"media\.source hf:a/b is a Hugging Face dataset.*pip install datasets"
        ):
            MediaItems(make_config("hf:a/b"))


def test_skipped_files_of_a_directory_are_logged(folder, caplog):
    for name in ("a.avif", "b.AVIF", "c.heic", "d.jfif", "notes", ".hidden.heic"):
        (folder / name).write_bytes(b"x")
    for picture in ("china", "flower"):
        (folder / f"{picture}.txt").write_text("text")
    assert len(read_media(make_config(folder), WORLD)) == 2
    (message,) = (record.getMessage() for record in caplog.records)
    assert "skipped: 2 .avif, 1 .heic, 1 .jfif, 1 notes; pictures end with .jpg" in message


@pytest.mark.parametrize("form", ["json", "jsonl"])
def test_a_row_without_its_text_is_refused_by_row(folder, form):
    """An empty text is intended; a missing one may be a misspelled column."""
    rows = [*ROWS, {"image": "china.jpg"}, {"image": "china.jpg", "Prompt": "a"}]
    text = json.dumps(rows) if form == "json" else "\n".join(map(json.dumps, rows))
    (folder / f"rows.{form}").write_text(text)
    place = "entry" if form == "json" else "line"
    with pytest.raises(ConfigError, match=rf"rows\.{form}, {place} 3: no 'prompt'; .*{place} 4: no 'prompt'"):
        read_media(make_config(folder / f"rows.{form}"), WORLD)
    assert len(read_media(make_config(folder / f"rows.{form}", prompt=None), WORLD)) == 4
