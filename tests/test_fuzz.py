"""Damaged files of every kind that people bring: each is read, a bad record or one sentence, and never a traceback.

`pytest tests/test_fuzz.py -m long -s` prints what came out of 2,000 mutations of each kind.
"""

import io
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
import wsq  # noqa: F401  # Pillow writes WSQ with it
from PIL import Image

from jobs.pricing import catalog
from tests.images import make_texture
from trainyard.config.compose import compose
from trainyard.config.families import load_family
from trainyard.config.settings import TrainConfig
from trainyard.data.shards import Sample
from trainyard.data.write_shard import ShardTask, write_shard
from trainyard.errors import UserError

MUTATIONS = 2000
JOBS = Path(__file__).parents[1] / "jobs"
WORDS = [b"null", b"NaN", b"1e999", b"-1", b"9" * 400, b'"', b"\t", b"\0", b"\n", b"\\ud800", b"[]", b"{}", b"\xff"]
READ, BAD, NAMED, REFUSED = "read", "bad record", "other error, named", "refused"


def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    """Return damaged bytes: cut, overwritten, removed, doubled, zeroed or with a word put in, one to four times."""
    for _ in range(rng.integers(1, 5)):
        begin, end = sorted(rng.integers(0, len(data) + 1, 2).tolist())
        end = min(end, begin + int(rng.choice([1, 4, 64, 4096])))
        part = data[begin:end]
        put = [
            *(b"", bytes(len(part)), part * 2, rng.bytes(len(part)), WORDS[rng.integers(len(WORDS))]),
            bytes(byte ^ 1 << int(rng.integers(8)) for byte in part[:1]) + part[1:],
        ][rng.integers(6)]
        data = data[: len(data) // 2] if rng.random() < 0.05 else data[:begin] + put + data[end:]
    return data


def encode_image(kind: str, mode: str) -> bytes:
    """Encode an image; a JPEG says that it lies on its side."""
    target, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    options = {"exif": exif} if kind == "JPEG" else {}
    Image.fromarray(make_texture(0, 72, 80, 3)).convert(mode).save(target, kind, **options)
    return target.getvalue()


def encode_sound(kind: str, subtype: str) -> bytes:
    target = io.BytesIO()
    soundfile.write(target, 0.3 * np.sin(np.arange(4000) / 9), 16000, format=kind, subtype=subtype)
    return target.getvalue()


def configure(job: str, *options: str) -> TrainConfig:
    return compose(job, list(options), JOBS)


def load_files(job: str, name: str, *options: str) -> Callable[[Path], Iterator[Sample]]:
    """Return what lists a folder that has one file, of this name, without looking for labels."""
    config = configure(job, *options)
    family = load_family(JOBS, config.family, "pack")
    return lambda raw: family.unlabelled(raw, config, {})


def list_folder(job: str, *options: str) -> Callable[[Path], Iterator[Sample]]:
    """Return what lists a folder as for training, and loads nothing."""
    config = configure(job, *options)
    family = load_family(JOBS, config.family, "pack")

    def read(raw: Path) -> Iterator[Sample]:
        list(family.samples(raw, config))
        return iter(())

    return read


def read_catalogue(raw: Path) -> Iterator[Sample]:
    catalog.read(raw / "train.csv", catalog.Columns("id", ("text",), "price", ("size",)))
    return iter(())


FACES, SPEECH, PRINTS = ("twins_smoke",), ("antispoof_smoke", "packing.stereo=mix"), ("fingerprint_smoke",)
FILES = {
    **{kind: (encode_image(kind, "RGB"), FACES) for kind in ("JPEG", "PNG", "BMP", "TIFF", "GIF", "WEBP")},
    "PNG I;16 as a print": (encode_image("PNG", "I;16"), PRINTS),
    "WSQ": (encode_image("WSQ", "L"), PRINTS),
    **{
        f"{kind} {subtype}": (encode_sound(kind, subtype), SPEECH)
        for kind, subtype in [
            *[("WAV", "PCM_16"), ("WAV", "FLOAT"), ("WAV", "GSM610"), ("FLAC", "PCM_16"), ("OGG", "VORBIS")],
            *[("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III"), ("AIFF", "PCM_24"), ("AU", "ULAW")],
        ]
    },
}
"""Files of one sample each: their bytes, and the job that loads them, with options."""

COCO = {
    "images": [{"id": number, "file_name": f"{number}.png", "width": 80, "height": 72} for number in range(3)],
    "annotations": [
        {"id": number, "image_id": number % 3, "category_id": 1, "bbox": [4, 5, 10.5, 8], "area": 84.0, "iscrowd": 0}
        for number in range(6)
    ],
    "categories": [{"id": 1, "name": "car"}],
}
TEXTS: dict[str, tuple[str, str, Callable[[Path], Iterator[Sample]]]] = {
    "COCO JSON": ("annotations/instances_train.json", json.dumps(COCO), list_folder("tinydet_smoke")),
    "twins JSON": ("twin_pairs_infor.json", '[["a", "b"], ["c", "d"], ["e", "f"]]', list_folder("twins_smoke")),
    "people JSON": (
        "dataset_infor.json",
        '{"a": ["a/1.png"], "b": ["b/1.png"]}',
        list_folder("twins_smoke", "packing.singles=keep"),
    ),
    "index.csv": ("index.csv", "path,finger,dpi\n1.png,a,500\n2.png,a,\n", list_folder("fingerprint_smoke")),
    "protocol.csv": (
        "protocol.csv",
        "path,label,set\n1.wav,real,train\n2.wav,fake,val\n",
        list_folder("antispoof_smoke"),
    ),
    "ASVspoof protocol": (
        "ASVspoof2019_LA_cm_protocols/ASVspoof2019.LA.cm.train.trn.txt",
        "LA_0079 LA_T_1 - - bonafide\nLA_0079 LA_T_2 - A01 spoof\n",
        list_folder("antispoof_smoke"),
    ),
    "catalogue CSV": (
        "train.csv",
        'id,text,price,size\n1,"a ""b"" c",12.5,3\n2,"x\ny",1,2\n3,z,"1,200.50",\n',
        read_catalogue,
    ),
    "catalogue TSV": (
        "train.csv",
        'id\ttext\tprice\tsize\n1\ta "b\t12.5\t3\n2\tx"\t1\t2\n3\tz\t7\t\n',
        read_catalogue,
    ),
}
"""Tables and JSON files: their names and contents, and what reads the folder."""


@pytest.mark.long
@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_is_read_or_is_a_bad_record(kind: str, tmp_path: Path) -> None:
    data, (job, *options) = FILES[kind]
    suffix = ".wav" if job.startswith("antispoof") else ".png"
    list_samples, rng = load_files(job, f"a{suffix}", *options), np.random.default_rng(0)
    path = tmp_path / f"a{suffix}"
    out = tmp_path / "shards" / "shard-00000.h5"
    out.parent.mkdir()
    found: Counter[str] = Counter()
    warnings.simplefilter("ignore")  # Pillow's about what it repairs
    for _ in range(MUTATIONS):
        path.write_bytes(mutate(data, rng))
        task = ShardTask(out, list(list_samples(path)), "", skip_bad=True, artifacts=None)
        written = write_shard(task, on_sample=lambda: None)
        reasons = [reason for _, reason in written.bad]
        found[NAMED if any(".py:" in reason for reason in reasons) else BAD if reasons else READ] += 1
    print(f"{kind:20} {dict(sorted(found.items()))}")
    assert found.total() == MUTATIONS and found[BAD] > MUTATIONS / 10


@pytest.mark.long
@pytest.mark.parametrize("kind", TEXTS)
def test_a_damaged_table_is_read_or_refused_in_a_sentence(kind: str, tmp_path: Path) -> None:
    name, text, read = TEXTS[kind]
    rng, found, path = np.random.default_rng(0), Counter[str](), tmp_path / "raw" / name
    for other in ("1.png", "2.png", "1.wav", "2.wav", "images/0.png", *(f"{person}/1.png" for person in "abcdef")):
        (tmp_path / "raw" / other).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "raw" / other).touch()
    path.parent.mkdir(exist_ok=True)
    for _ in range(MUTATIONS):
        path.write_bytes(mutate(text.encode(), rng))
        try:
            list(read(tmp_path / "raw"))
        except UserError as error:
            assert str(error) and "\n" not in str(error).replace("\n  ", ""), "one sentence, or a list of cells"
            found[REFUSED] += 1
        else:
            found[READ] += 1
    print(f"{kind:20} {dict(sorted(found.items()))}")
    assert found.total() == MUTATIONS and found[REFUSED] > MUTATIONS / 10
