import pytest

from tests.kernel_cases.argmax import VOCABULARIES, case


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("vocabulary", [*VOCABULARIES, 49152])
def test_matches_the_reference(dtype: str, vocabulary: int) -> None:
    case(dtype, "cuda", vocabulary).check()
