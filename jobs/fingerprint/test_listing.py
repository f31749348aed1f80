"""Whose print a file is: by its name, or by index.csv."""

import os
from dataclasses import fields
from pathlib import Path

import pytest
from loguru import logger

from tests.cases.fingerprint import find_shared_prints
from trainyard.data.raw import describe_unread, list_once
from trainyard.errors import UserError
from trainyard.foreign import remember_reads

from .config import Config, PackingSettings
from .layouts import NAMED, PUBLIC
from .listing import Print, describe_listing, find_doubts, list_prints
from .pack import log_reading, samples


def make_files(raw: Path, *names: str) -> Path:
    """Write empty files: listing reads no image."""
    for name in names:
        path = raw / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return raw


def make_packing(layout: str = "auto", dpi_of_sets: tuple[str, ...] = ()) -> PackingSettings:
    packing = Config().packing
    packing.layout, packing.dpi_of_sets = layout, list(dpi_of_sets)
    return packing


def read_fingers(raw: Path, layout: str = "auto") -> dict[str, str]:
    return {one.path: one.finger for one in list_prints(raw, make_packing(layout)).prints}


def test_folders_of_prints_are_listed_once_within_a_block_which_knows_all_of_them(tmp_path: Path) -> None:
    make_files(tmp_path, "a/1_1.png", "a/1_2.png", "b/2_1.png", "b/.hidden/3_1.png")
    with list_once() as listed:
        first = read_fingers(tmp_path, "sets")
        make_files(tmp_path, "b/4_1.png")
        assert read_fingers(tmp_path, "sets") == first and len(first) == 3
    assert sorted(listed.times) == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "b")]
    assert len(read_fingers(tmp_path, "sets")) == 4


SAME_FINGER = {
    "sessions": ("one/101_1.png", "two/101_1.png"),
    "folders": ("101/1.png", "101/2.png"),
    "sd4": ("figs_0/f0001_01.png", "figs_0/s0001_01.png"),
    "sd14": ("F0000001.wsq", "S0000001.WSQ"),
    "sd300": ("roll/00001000_roll_500_01.png", "plain/00001000_plain_500_11.png"),
    "sd302": ("R/500/00002302_R_500_slap_02.png", "A/00002302_A_roll_02.png"),
    "mcyt": ("dp/dp_0000_3_0.bmp", "pb/pb_0000_3_11.bmp"),
    "socofing": ("Real/1__M_Left_index_finger.BMP", "Altered/Altered-Easy/1__M_Left_index_finger_CR.BMP"),
    "polyu": ("DBI/1_1_1.jpg", "DBI/1_2_1.jpg"),
}
"""Two files of one finger by each layout, which the plain reading takes for two fingers or cannot read."""


@pytest.mark.parametrize("layout", sorted({*SAME_FINGER} - {"folders"}))
def test_auto_refuses_names_that_a_layout_reads_in_another_way_and_says_what_to_type(
    tmp_path: Path, layout: str
) -> None:
    make_files(tmp_path, *SAME_FINGER[layout])
    with pytest.raises(UserError, match=rf"packing\.layout={layout}\b") as refused:
        read_fingers(tmp_path)
    assert "index.csv" in str(refused.value) and "packing.layout=sets" in str(refused.value)
    assert len(set(read_fingers(tmp_path, layout).values())) == 1


def test_every_layout_is_an_option_and_has_an_example_here() -> None:
    (choices,) = (one.metadata["choices"] for one in fields(PackingSettings) if one.name == "layout")
    assert choices == ("auto", *NAMED)
    assert set(NAMED) == {*SAME_FINGER, "sets", "fvc"}


def test_each_public_layout_reads_its_data_set(tmp_path: Path) -> None:
    read = {
        f"{layout.name} {stem}": layout.read(stem)
        for layout in PUBLIC
        for stem in (
            *("FVC2002_DB2_B/101_1", "raw/FVC2006/DB1_A/7_12", "DB2_B/101_1", "f0001_01", "s2000_10", "S0000001"),
            *("00001000_roll_500_01", "x/00001000_plain_2000_12", "00002302_R_1000_slap_02", "00002302_A_roll_10"),
            *("pb_0012_3_11", "Real/600__F_Right_thumb_finger", "a/Altered-Hard/1__M_Left_little_finger_Zcut"),
            *("148_2_5", "contact-based_fingerprints/second_session/7_6", "processed/first_session/p7/p6"),
        )
        if layout.read(stem)
    }
    assert {name: (one.finger, one.impression, one.set, one.dpi) for name, one in read.items() if one} == {
        "fvc FVC2002_DB2_B/101_1": ("FVC2002_DB2_B/101", 1, "FVC2002_DB2_B", 569),
        "fvc raw/FVC2006/DB1_A/7_12": ("FVC2006_DB1_A/7", 12, "FVC2006_DB1_A", 250),
        "sd4 f0001_01": ("0001_01", 1, "", 0),
        "sd4 s2000_10": ("2000_10", 2, "", 0),
        "sd14 S0000001": ("0000001", 2, "", 0),
        "sd300 00001000_roll_500_01": ("00001000_01", 1, "roll", 500),
        "sd300 x/00001000_plain_2000_12": ("00001000_06", 1, "plain", 2000),
        "sd302 00002302_R_1000_slap_02": ("00002302_02", 1, "R_slap", 1000),
        "sd302 00002302_A_roll_10": ("00002302_10", 1, "A_roll", 0),
        "mcyt pb_0012_3_11": ("0012_3", 11, "pb", 0),
        "socofing Real/600__F_Right_thumb_finger": ("600_right_thumb", 1, "Real", 0),
        "socofing a/Altered-Hard/1__M_Left_little_finger_Zcut": ("1_left_little", 4, "Altered-Hard", 0),
        "polyu 148_2_5": ("148", 5, "session_2", 0),
        "polyu contact-based_fingerprints/second_session/7_6": ("7", 6, "contact_second", 0),
        "polyu processed/first_session/p7/p6": ("7", 6, "contactless_first", 0),
    }


def test_an_image_of_several_fingers_is_no_print_of_one(tmp_path: Path) -> None:
    make_files(tmp_path, "00002302_S_500_slap_13.png", "00002302_S_500_slap_02.png", "00002302_S_500_slap_07.png")
    listing = list_prints(tmp_path, make_packing("sd302"))
    assert [one.finger for one in listing.prints] == ["00002302_02", "00002302_07"]
    assert find_doubts(listing)[0] == (
        "1 images are left out, because they show several fingers or a palm: 00002302_S_500_slap_13.png"
    )


def test_sensors_of_fvc_bring_their_resolution_or_are_asked_about(tmp_path: Path) -> None:
    make_files(tmp_path, "FVC2002_DB2_B/101_1.tif", "FVC2002_DB1_B/101_1.tif", "FVC2002_DB1_B/101_2.tif")
    with pytest.raises(UserError, match=r"at 569 dpi, but packing.dpi=500.*packing.dpi_of_sets=\[FVC2002_DB2_B:569\]"):
        read_fingers(tmp_path)
    for packing in (make_packing("fvc"), make_packing(dpi_of_sets=("FVC2002_DB2_*:569", "FVC2002_DB1_B:500"))):
        assert [one.dpi for one in list_prints(tmp_path, packing).prints] == [500, 500, 569]
    assert [one.dpi for one in list_prints(tmp_path, make_packing("sets")).prints] == [0, 0, 0]


@pytest.mark.parametrize("names", ["DB1_A/1_1.bmp", "1_1.bmp"])
def test_the_year_of_fvc_may_be_in_the_name_of_the_raw_folder_or_above(tmp_path: Path, names: str) -> None:
    make_files(tmp_path / "FVC2006/DB1_A", "1_1.bmp", "1_2.bmp", "2_1.bmp")
    raw = (tmp_path / "FVC2006/DB1_A/1_1.bmp").parents[names.count("/")]
    with pytest.raises(UserError, match=r"at 250 dpi, but packing.dpi=500"):
        read_fingers(raw)
    found = list_prints(raw, make_packing("fvc")).prints
    assert {(one.dpi, one.set) for one in found} == {(250, "FVC2006_DB1_A")} and len(found) == 3


def test_a_sensor_of_fvc_without_its_year_is_asked_about_where_the_resolution_depends_on_it(tmp_path: Path) -> None:
    make_files(tmp_path / "a", "DB1_A/1_1.bmp", "DB1_A/1_2.bmp")
    make_files(tmp_path / "b/DB2_B", "1_1.bmp")
    for raw, option, dpi in (("a", "[DB1_A:250]", 250), ("b/DB2_B", "[*:569]", 569)):
        with pytest.raises(UserError, match=rf"500 dpi in some years and {dpi} in others") as error:
            read_fingers(tmp_path / raw)
        (remedy,) = (word.strip(",'") for word in str(error.value).split() if "dpi_of_sets" in word)
        assert remedy == f"packing.dpi_of_sets={option.replace(str(dpi), '500')}"
        packing = make_packing(dpi_of_sets=(option.strip("[]"),))
        assert {one.dpi for one in list_prints(tmp_path / raw, packing).prints} == {dpi}
    make_files(tmp_path / "c", "DB4_A/1_1.bmp")  # 500 dpi in all years
    assert len(read_fingers(tmp_path / "c")) == 1


def test_fvc_nested_once_more_is_read_at_once(tmp_path: Path) -> None:
    make_files(
        tmp_path, "disc/FVC2000/Dbs/Db1_a/1_1.tif", "disc/FVC2002_DB2_B/DB2_B/101_1.tif", "FVC2006/DB1_A/1_1.bmp"
    )
    found = list_prints(tmp_path, make_packing())
    assert found.source == "packing.layout=fvc"
    assert {one.finger: one.dpi for one in found.prints} == {
        "FVC2000_DB1_A/1": 500,
        "FVC2002_DB2_B/101": 569,
        "FVC2006_DB1_A/1": 250,
    }


def test_index_csv_finds_files_from_a_mac_and_paths_of_another_machine(tmp_path: Path) -> None:
    make_files(tmp_path, "e\u0301/1_1.png", "b.png")
    write_index(tmp_path, f"path;finger\n\u00e9/1_1.png;x\n{tmp_path}/b.png;y\n")
    assert [one.path for one in list_prints(tmp_path, make_packing()).prints] == ["b.png", "e\u0301/1_1.png"]


@pytest.mark.parametrize(
    ("option", "reason"),
    [("A", "expected SET:DPI"), ("A:many", "expected SET:DPI"), ("A:5", "50 to 10000"), ("C:500", "Sets found: A, B")],
)
def test_a_resolution_that_fits_no_set_is_refused(tmp_path: Path, option: str, reason: str) -> None:
    make_files(tmp_path, "A/1_1.png", "B/2_1.png")
    with pytest.raises(UserError, match=reason):
        list_prints(tmp_path, make_packing(dpi_of_sets=(option,)))
    with pytest.raises(UserError, match="set 'A' has 500 and 569 dpi"):
        list_prints(tmp_path, make_packing(dpi_of_sets=("*:500", "A:569")))


def test_plain_names_need_no_option(tmp_path: Path) -> None:
    make_files(
        tmp_path, "FVC2004_DB1_B/101_1.tif", "FVC2004_DB4_B/101_1.tif", "UareU/012_10_1.tif", "UareU/012_1_1.tif"
    )
    make_files(tmp_path, "loose_7.png", "dp_0000_0_1.bmp")  # one sensor of MCYT: the same fingers in both readings
    assert list(read_fingers(tmp_path).values()) == [
        *("dp_0000_0", "loose", "FVC2004_DB1_B/101", "FVC2004_DB4_B/101", "UareU/012_10", "UareU/012_1")
    ]


def test_the_same_impression_twice_is_refused(tmp_path: Path) -> None:
    make_files(tmp_path, "101_1.png", "101_1.tif")
    with pytest.raises(UserError, match=r"101_1\.png and 101_1\.tif are both impression 1 of finger 101"):
        read_fingers(tmp_path)
    make_files(tmp_path / "nist", "00002302_R_500_slap_02.png", "00002302_R_1000_slap_02.png")
    with pytest.raises(UserError, match="are both impression 1 of finger 00002302_02 in set R_slap"):
        read_fingers(tmp_path / "nist", "sd302")


def test_a_name_that_the_layout_cannot_read_is_named_when_packed(tmp_path: Path) -> None:
    make_files(tmp_path, "101_1.png", "thumb.png", "a/b/101_2.png")
    listing = list_prints(tmp_path, make_packing())
    assert [one.path for one in listing.prints] == ["101_1.png"]
    assert listing.unreadable["thumb.png"].startswith("the name is not <finger>_<impression>")
    assert listing.unreadable["a/b/101_2.png"].startswith("the file is more than one folder deep")
    assert len(list(samples(tmp_path, Config()))) == 3


def test_what_is_not_read_is_counted_and_named(tmp_path: Path) -> None:
    make_files(
        tmp_path, "101_1.png", "101_2.png", "a.raw", "b.raw", "c_1.PGM", "A/d.eft", "notes.txt", "LICENSE", ".x.png"
    )
    (tmp_path / "gone_1.png").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe_1.tif")
    with remember_reads() as read:
        sources = {sample.source for sample in samples(tmp_path, Config())}
    assert describe_unread(tmp_path, lambda path: path in sources | read) == (
        "1 .eft (A/d.eft), 1 .png (gone_1.png), 2 .raw (a.raw, b.raw), 1 .tif (pipe_1.tif)",
        "1 .txt (notes.txt), 1 without ending (LICENSE)",
    )
    make_files(tmp_path / "only", "1.raw", "2.raw")
    with pytest.raises(UserError, match=r"expected images .*found 2 \.raw \(1\.raw, 2\.raw\)"):
        list_prints(tmp_path / "only", make_packing())


def test_a_link_to_a_listed_folder_is_refused_and_one_from_elsewhere_is_followed(tmp_path: Path) -> None:
    raw, elsewhere = make_files(tmp_path / "raw", "101_1.png"), make_files(tmp_path / "other", "102_1.png")
    (raw / "A").symlink_to(elsewhere)
    assert list(read_fingers(raw).values()) == ["101", "A/102"]
    (raw / "B").symlink_to(raw)
    with pytest.raises(UserError, match=r"B: links to .*Remove the link"):
        read_fingers(raw)


def test_a_person_sees_five_examples_and_is_warned_of_single_impressions(tmp_path: Path) -> None:
    make_files(tmp_path, *(f"A/{finger}_1.png" for finger in range(20)), "A/0_2.wsq")
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message).rstrip()), format="{level} {message}")
    try:
        log_reading(tmp_path, Config())
    finally:
        logger.remove(sink)
    assert lines[0] == "INFO prints 21, fingers 20, sets 1; read by packing.layout=sets. For example:"
    assert lines[1].split() == ["INFO", "path", "finger", "impression", "set", "dpi", "split"]
    assert lines[2].split() == ["INFO", "A/0_1.png", "A/0", "1", "A", "500", "-"]
    assert len(lines) == 8
    assert lines[7].startswith("WARNING 19 of 20 fingers have a single impression")


def test_the_examples_show_every_set(tmp_path: Path) -> None:
    make_files(tmp_path, "A/1_1.png", "B/2_1.png", *(f"C/3_{number}.png" for number in range(50)))
    lines = describe_listing(list_prints(tmp_path, make_packing()), make_packing())
    shown = [line.split()[0] for line in lines[2:]]
    assert shown == ["A/1_1.png", "B/2_1.png", "C/3_0.png", "C/3_41.png", "C/3_9.png"]
    assert len(describe_listing(list_prints(tmp_path / "A", make_packing()), make_packing())) == 3


def write_index(raw: Path, text: str) -> Path:
    (raw / "index.csv").write_text(text)
    return raw


def test_index_csv_says_whose_print_a_file_is(tmp_path: Path) -> None:
    make_files(tmp_path, "one/a.png", "two/b.png", "two/c.wsq", "two/unlisted.png")
    write_index(
        tmp_path,
        "\ufeffset,path,finger,dpi,split,impression\n"
        "optical,one/a.png,anna left,,train,1\n\n"
        'touch,./two/b.png,anna left,1000,train,1\ntouch,two/c.wsq,"bob, thumb",,test_touch,4\n',
    )
    listing = list_prints(tmp_path, make_packing(dpi_of_sets=("touch:569",)))
    assert listing.prints == [
        Print("one/a.png", "anna left", 1, "optical", 0, "train"),
        Print("two/b.png", "anna left", 1, "touch", 1000, "train"),
        Print("two/c.wsq", "bob, thumb", 4, "touch", 569, "test_touch"),
    ]
    assert listing.source == "index.csv"
    assert find_doubts(listing) == ["1 images are left out, because index.csv does not name them: two/unlisted.png"]
    with pytest.raises(UserError, match=r"packing\.layout=sd4 both say"):
        list_prints(tmp_path, make_packing("sd4"))


def test_index_csv_numbers_impressions_where_it_has_no_column_for_them(tmp_path: Path) -> None:
    make_files(tmp_path, "a.png", "b.png", "c.png")
    write_index(tmp_path, "path,finger\nc.png,x\na.png,x\nb.png,y\n")
    assert [(one.path, one.impression) for one in list_prints(tmp_path, make_packing()).prints] == [
        ("a.png", 1),
        ("b.png", 1),
        ("c.png", 2),
    ]


HEADER = "path,finger,impression,set,dpi,split\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEADER + "no.png,x,1,,,train", "line 2, path: expected the path of an image .* found 'no.png'"),
        (HEADER + "../a.png,x,1,,,train", "line 2, path: .* found '../a.png'"),
        (HEADER + "/etc/passwd,x,1,,,train", "line 2, path: '/etc/passwd' is outside of .*Move the file into it"),
        (HEADER + "notes.txt,x,1,,,train", "line 2, path: .* found 'notes.txt'"),
        (HEADER + ",x,1,,,train", "line 2, path: .* found nothing"),
        (HEADER + "a.png,,1,,,train", "line 2, finger: expected the name of the finger, found nothing"),
        (HEADER + "a.png,x,left,,,train", "line 2, impression: expected a whole number, found 'left'"),
        (HEADER + "a.png,x,,,,train", "line 2, impression: expected a whole number, found nothing"),
        (HEADER + "a.png,x,1,,5e2,train", "line 2, dpi: expected a whole number of 50 to 10000, found '5e2'"),
        (HEADER + "a.png,x,1,,,Train", "line 2, split: expected train, val, test, or test_ and a name, found 'Train'"),
        (HEADER + "a.png,x,1,,,", "line 2, split: .* found nothing"),
        (HEADER + "a.png,x,1,,", "line 2: 5 cells, the header has 6"),
        (HEADER + "a.png,x,1,,,train\na.png,x,2,,,train", "line 3, path: expected each path once, .* in line 2 too"),
        (
            HEADER + "a.png,x,1,,,train\nb.png,x,1,,,train",
            "line 3, impression: .* found impression 1 of finger 'x' again",
        ),
        (HEADER + "a.png,x,1,,,train\nb.png,x,2,,,test", "line 3, split: expected 'train' as for finger 'x' in line 2"),
        (HEADER, "expected one line for each print"),
        ("", "line 1: no column finger, path. It has: none"),
        ("path,impression\na.png,1", "line 1: no column finger. It has: path, impression"),
        ("path,finger,fingr\n", "line 1: .* found 'fingr'. Nearest: finger"),
        ("path,finger,finger\n", "several columns are named 'finger'"),
        ("path;finger\nno.png;x", "line 2, path: expected the path of an image .* found 'no.png'"),
        ('path,finger\n"a.png,x', "line 2: not a table"),
        ("path,finger\na.png,\udcff", "line 2: expected UTF-8, found the byte 0xff"),
    ],
)
def test_a_bad_cell_of_index_csv_is_one_sentence_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    make_files(tmp_path, "a.png", "b.png", "notes.txt")
    (tmp_path / "index.csv").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=rf"index\.csv[:,] .*\n?.*{said}"):
        list_prints(tmp_path, make_packing())


def test_all_bad_cells_of_index_csv_are_named_at_once(tmp_path: Path) -> None:
    make_files(tmp_path, "a.png")
    write_index(tmp_path, "path,finger,dpi\n" + "no.png,,x\n" * 5)
    with pytest.raises(UserError, match="15 of its cells are wrong") as refused:
        list_prints(tmp_path, make_packing())
    assert str(refused.value).count("\n") == 11 and "and 5 more" in str(refused.value)


def test_packed_data_depend_on_what_index_csv_says(tmp_path: Path) -> None:
    from trainyard.data.pack import read_listing

    make_files(tmp_path, "a.png", "b.png")
    digests = [
        read_listing(samples(write_index(tmp_path, text), Config()), {})[1]
        for text in ("path,finger\na.png,x\nb.png,x\n", "path,finger\na.png,x\nb.png,y\n")
    ]
    assert len(set(digests)) == 2


def test_tests_may_share_fingers_but_training_may_not(tmp_path: Path) -> None:
    make_files(tmp_path, "a.png", "b.png")
    write_index(tmp_path, "path,finger,split\na.png,x,test_one\nb.png,x,test_two\n")
    assert [one.split for one in list_prints(tmp_path, make_packing()).prints] == ["test_one", "test_two"]


def test_the_real_prints_are_read_as_before() -> None:
    fingers = read_fingers(find_shared_prints())
    assert len(fingers) == 680 and len(set(fingers.values())) == 85
    assert fingers["FVC2004_DB1_B/101_1.tif"] == "FVC2004_DB1_B/101"
    assert fingers["UareU/012_10_1.tif"] == "UareU/012_10"
