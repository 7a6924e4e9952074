import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.fit import CONTEXT_BYTES
from ouro_build.runtime.driver import open_driver
from ouro_build.runtime.machine import describe, probe
from tests.unit.runtime.fake_driver import FakeDriver


def test_a_device_is_described_and_nothing_is_kept() -> None:
    api = FakeDriver(memory=5000)
    machine = probe(0, api)
    assert (machine.name, machine.capability, machine.sm_count) == ("Fake GPU", (9, 0), 132)
    assert (machine.memory_total, machine.memory_free, machine.cuda) == (5000, 5000, (13, 1))
    assert (machine.context, machine.reason) == (0, "")
    assert api.live() == {}


def test_free_memory_is_what_is_left() -> None:
    driver = open_driver(0, FakeDriver(memory=5000))
    driver.call("cuMemAlloc", 1000, doing="allocating")
    assert describe(driver).memory_free == 4000


def test_the_open_context_is_what_is_in_use_but_no_more_than_plans_count() -> None:
    driver = open_driver(0, FakeDriver(memory=4 * CONTEXT_BYTES))
    driver.call("cuMemAlloc", 1000, doing="allocating")
    assert describe(driver).context == 1000
    driver.call("cuMemAlloc", 2 * CONTEXT_BYTES, doing="allocating")
    machine = describe(driver)
    assert machine.context == CONTEXT_BYTES
    assert machine.available == machine.memory_free + CONTEXT_BYTES


def test_an_absent_device_is_a_value_with_a_reason() -> None:
    assert "CUDA_ERROR_NO_DEVICE" in probe(0, FakeDriver(devices=0)).reason


def test_a_failing_question_gives_the_context_back() -> None:
    api = FakeDriver()
    api.fail("cuMemGetInfo", "CUDA_ERROR_UNKNOWN")
    with pytest.raises(Exception, match="asking about CUDA device 0"):
        probe(0, api)
    assert api.live() == {}


def test_a_wrong_number_is_not_an_absent_device() -> None:
    with pytest.raises(UsageError):
        probe(1, FakeDriver())
