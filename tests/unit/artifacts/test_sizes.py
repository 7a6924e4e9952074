import click
import pytest

from ouro_build.artifacts.sizes import SIZE


@pytest.mark.parametrize(
    ("text", "count"),
    [("24GiB", 24 << 30), ("512 MiB", 512 << 20), ("1.5tib", 3 << 39), ("0", 0), ("123", 123), ("9" * 20, int("9" * 20))],
)
def test_sizes_as_people_write_them(text: str, count: int) -> None:
    assert SIZE.convert(text, None, None) == count


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1.5", "24GB", "1e9", "nan", "9" * 5000, "9" * 400 + ".5GiB", "0." + "1" * 5000 + "KiB"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="Write it like 24GiB"):
        SIZE.convert(text, None, None)
