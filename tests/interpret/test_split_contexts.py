from hypothesis import given, settings
from hypothesis import strategies as st

from ouro_build.kernels.split_contexts import Split, SplitRule
from tests.kernel_cases.split_contexts import case

ROW = st.none() | st.tuples(st.integers(0, 5), st.integers(0, 5000), st.integers(0, 3))


@given(
    st.lists(ROW, min_size=1, max_size=9).filter(lambda rows: any(rows)),
    st.builds(SplitRule, st.sampled_from([16, 64]), st.integers(1, 40), st.integers(1, 40), st.integers(1, 3)),
)
@settings(max_examples=20, deadline=None)
def test_does_what_the_reference_says(rows: list[tuple[int, int, int] | None], rule: SplitRule) -> None:
    case(device="cpu", rows=tuple(rows), rule=rule, max_context=5001).check()


def test_rows_of_the_batch_that_are_cut_elsewhere_count_as_well() -> None:
    rows, others = (None, (1, 40, 1), (2, 30, 1), (1, 9, 2)), ((1, 33, 1), None, None, None)
    seen = case(device="cpu", rows=rows, others=others).check()["splits"]
    first = seen[seen[:, Split.INDEX] == 0]
    assert dict(zip(first[:, Split.ROW].tolist(), first[:, Split.SETTLED].tolist(), strict=True)) == {1: 33, 2: 30, 3: 9}
