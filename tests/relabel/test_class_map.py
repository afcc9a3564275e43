"""Class maps: files, merged probabilities against float64, and error messages."""

import json
import os

import pytest
import torch

from densefeed.relabel.class_map import ClassMap, merge_classes, read_class_map
from densefeed.system.errors import UserError

TEACHER = ["tabby", "poodle", "siamese", "truck"]
DATA = ["cat", "dog"]
WANT = ClassMap(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 0]), 2)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("map.json", '{"tabby": "cat", "siamese": "cat", "1": "dog", "truck": null}'),
        ("map.json", '{"2": "cat", "0": "cat", "poodle": "dog"}'),
        ("map.csv", "teacher,data\ntabby,cat\nsiamese, cat\n\n1,dog\ntruck,\n"),
        ("map.csv", '"tabby",cat\r\n2,cat\r\npoodle,dog\r\n'),
        # Spreadsheets and editors write a byte order mark, and rows of empty cells.
        ("map.csv", "\ufeff,\nteacher,data\ntabby,cat\n2,cat\n1,dog\n"),
        ("map.json", '\ufeff{"2": "cat", "0": "cat", "poodle": "dog"}'),
    ],
)
def test_json_and_csv_give_the_same_map(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    found = read_class_map(tmp_path / name, TEACHER, 4, DATA)
    assert found.classes == 2
    assert found.source.tolist() == WANT.source.tolist()
    assert found.target.tolist() == WANT.target.tolist()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"tabby": "cat"}', r"no class of the teacher becomes 'dog'; assign one"),
        ("{}", r"no class of the teacher becomes 'cat' and 1 more"),
        (
            '{"wolf": "dog"}',
            r"the teacher has no class 'wolf'; use names such as tabby and numbers from 0 to 3",
        ),
        ('{"tabby": "cat", "4": "dog"}', r"the teacher has no class '4'"),
        ('{"tabby": "cat", "poodle": "wolf"}', r"class 'wolf' is not in the data \('cat' is\)"),
        ('{"tabby": "cat", "0": "dog"}', r"contains the teacher's class '0' twice"),
        ('{"tabby": "cat", "tabby": null}', r"is damaged \('tabby' is there twice\); correct it"),
        ('{"tabby": 0}', r"must be an object such as"),
    ],
)
def test_errors_of_a_json_map_are_reported(tmp_path, text, words):
    (tmp_path / "map.json").write_text(text)
    with pytest.raises(UserError, match=rf"map.json.* ?{words}"):
        read_class_map(tmp_path / "map.json", TEACHER, 4, DATA)


def test_errors_of_a_csv_map_are_reported(tmp_path):
    (tmp_path / "map.csv").write_text("tabby,cat\npoodle\n")
    with pytest.raises(UserError, match=r"map.csv, line 2: 'poodle' has 1 columns"):
        read_class_map(tmp_path / "map.csv", TEACHER, 4, DATA)
    with pytest.raises(UserError, match=r"nowhere.csv: there is no such file"):
        read_class_map(tmp_path / "nowhere.csv", TEACHER, 4, DATA)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("map.json", b'{"%s": "cat"}' % (b"9" * 5000), r"has no class '9{48}'; use"),
        ("map.csv", b"1,dog\n%s,cat\n" % (b"9" * 5000), r", line 2: the teacher has no class"),
        ("map.json", b'{"a":' * 100_000, r"is damaged \(it is nested too deeply"),
        ("map.csv", b'tabby,cat\n"poodle,dog\n1,dog\n', r"line 2 is not valid CSV \(unexpected"),
        ("map.csv", b'tabby,cat\n"poodle"s,dog\n', r"line 2 is not valid CSV \(',' expected"),
        ("map.csv", b"tabby,cat\n%s,dog\n" % (b"x" * 200_000), r"is not a text file with lines"),
        ("map.csv", b"tabby,c\0at\n", r"is not a text file"),
        ("map.csv", "tabby,cat\n".encode("utf-16"), r"is not a text file"),
        ("map.csv", b"\r\r\ntabby,cat\rpoodle\r", r", line 4: 'poodle' has 1 columns"),
    ],
)
def test_hostile_class_maps_are_refused(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}.*{said}") as error:
        read_class_map(tmp_path / name, TEACHER, 4, DATA)
    assert len(str(error.value)) < 500


def test_huge_and_irregular_class_maps_are_refused(tmp_path):
    """A file without end, a pipe without a writer, and one that a thousand class maps fit into."""
    for name, said in (("map.csv", "not a text file"), ("map.json", "more than 32 MiB")):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**40)
        with pytest.raises(UserError, match=said):
            read_class_map(tmp_path / name, TEACHER, 4, DATA)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(UserError, match=r"this is not a regular file"):
            read_class_map(tmp_path / path, TEACHER, 4, DATA)


def test_classes_of_one_name_are_refused(tmp_path):
    (tmp_path / "map.csv").write_text("0,cat\n1,dog\n")
    with pytest.raises(UserError, match="two classes of the data are called 'cat', which a class"):
        read_class_map(tmp_path / "map.csv", TEACHER, 4, ["cat", "dog", "cat"])


def test_leading_zeros_are_no_other_class(tmp_path):
    (tmp_path / "map.csv").write_text("00,cat\n0001,dog\n")
    found = read_class_map(tmp_path / "map.csv", TEACHER, 4, DATA)
    assert found.source.tolist() == [0, 1]


def test_without_names_classes_are_numbers(tmp_path):
    (tmp_path / "map.json").write_text(json.dumps({"0": "cat", "3": "dog"}))
    assert read_class_map(tmp_path / "map.json", [], 4, DATA).source.tolist() == [0, 3]
    (tmp_path / "map.json").write_text(json.dumps({"tabby": "cat"}))
    with pytest.raises(UserError, match=r"use numbers from 0 to 3"):
        read_class_map(tmp_path / "map.json", [], 4, DATA)


def test_merged_probabilities_add_up_and_those_of_no_class_are_dropped():
    """Against float64; classes 1e-130 times as probable as the best keep their logarithm."""
    logits = 5 * torch.randn(2, 3, 3, 4, generator=torch.Generator().manual_seed(0))
    logits[0, 0, 0] = torch.tensor([-300.0, 0.0, -301.0, 5.0])
    merged = merge_classes(logits, WANT)
    probability = logits.double().softmax(-1)[..., :3]
    probability = probability / probability.sum(-1, keepdim=True)
    want = torch.stack([probability[..., 0] + probability[..., 2], probability[..., 1]], -1)
    torch.testing.assert_close(merged.double().softmax(-1), want, rtol=1e-5, atol=1e-9)
    assert merged[0, 0, 0, 0].item() == pytest.approx(
        -300 + torch.tensor(-1.0).exp().log1p().item(), rel=1e-6
    )


def test_a_map_of_the_same_classes_changes_no_bit():
    logits = torch.randn(2, 3, 3, 4)
    order = torch.tensor([2, 0, 3, 1])
    merged = merge_classes(logits, ClassMap(torch.arange(4), order, 4))
    torch.testing.assert_close(merged[..., order], logits, rtol=0, atol=0)
