"""The reference that is made when it is first needed, and only for what it may help with."""

from __future__ import annotations

import pytest

from ouro_build.artifacts.plan import ProgramKey
from ouro_build.runtime.executor import Executor
from ouro_build.runtime.late import LateReference
from tests.unit.runtime.test_dispatch import Only

KEY, OTHER = ProgramKey("recurrent", 4, "mixed"), ProgramKey("coda", 4)


def test_it_is_made_once_for_a_wanted_key() -> None:
    made: list[Only] = []

    def make() -> Executor:
        made.append(Only("reference", KEY))
        return made[-1]

    late = LateReference(make, lambda key: key.program == "recurrent")
    assert not late.has(OTHER)
    assert made == [], "asked for what it cannot help with, it loads nothing"
    assert late.has(KEY)
    late.run(KEY)
    late.run(KEY)
    assert len(made) == 1
    assert made[0].ran == [KEY, KEY]
    assert not late.has(ProgramKey("recurrent", 8, "mixed"))
    late.close()
    assert made[0].ran == []
    assert not late.has(KEY)


def test_where_there_is_no_torch_nothing_is_helped() -> None:
    late = LateReference(lambda: None, lambda key: True)
    assert not late.has(KEY)
    with pytest.raises(ValueError, match="ask `has` first"):
        late.run(KEY)
    late.close()
