import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ouro_build.artifacts.errors import ArtifactError
from ouro_build.artifacts.oracle import MARGIN_UNIT, Oracle, decode_oracle, encode_oracle, margin_units
from tests.artifact_maker import ORACLE


def test_round_trip() -> None:
    assert decode_oracle(encode_oracle(ORACLE), 512) == ORACLE


@given(st.floats(0, 1e4))
def test_margins_are_rounded_down(margin: float) -> None:
    units = margin_units(margin)
    assert units / MARGIN_UNIT <= margin < (units + 1) / MARGIN_UNIT


def test_margins_are_bounded() -> None:
    assert margin_units(float("inf")) == 1 << 20


def test_disagreements_count_where_the_margin_decides() -> None:
    oracle = Oracle(prompt_ids=(1,), greedy_ids=(4, 5, 6, 7), margins=(64, 64, 12, 64))
    assert oracle.disagreements((4, 5, 6, 7), 0.2) == ()
    assert oracle.disagreements((4, 0, 0, 7), 0.2) == (1,)
    assert oracle.disagreements((4, 0, 0, 7), 0.1) == (1, 2)
    assert oracle.disagreements((4, 5), 0.2) == (2, 3)
    assert oracle.clear(0.2) == (4, 5, 7)
    assert oracle.clear(1.0) == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_ids": ()},
        {"greedy_ids": (), "margins": ()},
        {"greedy_ids": (4, 512)},
        {"prompt_ids": (-1,)},
        {"margins": (64,)},
        {"margins": (64, -1)},
    ],
)
def test_what_cannot_be(changes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ArtifactError, match=r"oracle\.json: "):
        decode_oracle(encode_oracle(msgspec.structs.replace(ORACLE, **changes)), 512)


@pytest.mark.parametrize("raw", [b"", b"{}", encode_oracle(ORACLE) + b" ", encode_oracle(ORACLE)[:-1] + b',"x":1}'])
def test_strict(raw: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"oracle\.json: "):
        decode_oracle(raw, 512)
