import pytest

from tests.kernel_cases.argmax import VOCABULARIES, case, expected


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_matches_the_reference(dtype: str, vocabulary: int) -> None:
    case(dtype, "cpu", vocabulary).check()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_ties_nan_and_zeros(vocabulary: int) -> None:
    assert case("float32", "cpu", vocabulary).check()["tokens"][1:7].tolist() == expected(vocabulary)
