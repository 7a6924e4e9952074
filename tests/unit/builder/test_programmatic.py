"""The proof that a kernel may start early, on PTX that keeps the rule and on PTX that breaks it in each way."""

from __future__ import annotations

import pytest

from ouro_build.builder.programmatic import mentions, violations

HEAD = """
.visible .entry k(
	.param .u64 .ptr .global .align 1 k_param_0,
	.param .u64 .ptr .global .align 1 k_param_1,
	.param .u32 k_param_2
)
.reqntid 128
{
	.reg .b64 	%rd<9>;
	ld.param.b64 	%rd1, [k_param_0];
	ld.param.b64 	%rd2, [k_param_1];
	mov.u32 	%r1, %tid.x;
	mad.wide.u32 	%rd3, %r1, 4, %rd1; // weights
	mad.wide.u32 	%rd4, %r1, 4, %rd2;
	setp.lt.u32 	%p1, %r1, 64;
"""
WEIGHT = "	@%p1 ld.global.L1::evict_first.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd3 + 0 ], %rd7;\n"
WAIT = "$L__tmp3:\n	// begin inline asm\n	griddepcontrol.wait ;\n"
TAIL = "	ld.global.b32 	%r6, [%rd4];\n	st.global.b32 	[%rd4], %r6;\n	ret;\n}\n"


def test_weights_may_be_read_before_the_wait_and_everything_after() -> None:
    assert violations(HEAD + "	griddepcontrol.launch_dependents;\n" + WEIGHT + WAIT + TAIL, {0}, set(), {1}) == []


def test_what_launches_wrote_is_read_before_the_wait_past_the_l1_cache() -> None:
    past = "	@%p1 ld.global.cg.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd4 + 0 ];\n"
    assert violations(HEAD + WEIGHT + past + WAIT + TAIL, {0}, {1}, set()) == []
    copied = "	cp.async.cg.shared.global [ %r1 + 0 ], [ %rd4 + 0 ], 0x10, %r2;\n"
    assert violations(HEAD + copied + WAIT + TAIL, {0}, {1}, set()) == []
    for through in (past.replace(".cg", ""), past.replace(".cg", ".L1::evict_first"), past.replace(".cg", ".ca")):
        (found,) = violations(HEAD + WEIGHT + through + WAIT + TAIL, {0}, {1}, set())
        assert found.startswith("it reads through the L1 cache what launches wrote before the wait")


ACQUIRED = "	// begin inline asm\n	ld.acquire.gpu.global.b32 %r9, [%rd2];\n	// end inline asm\n"
THROUGH = "	@%p1 ld.global.L1::evict_first.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd4 + 0 ];\n"


def test_after_an_acquiring_load_what_launches_wrote_is_read_through_the_l1_cache() -> None:
    def found(*lines: str) -> list[str]:
        return violations(HEAD + "".join(lines) + WAIT + TAIL, {0}, {1}, set())

    assert found(ACQUIRED, THROUGH) == []
    assert found(ACQUIRED.replace("gpu", "sys"), WEIGHT, THROUGH) == []
    assert len(found(THROUGH, ACQUIRED)) == 1
    # perhaps not at all, of what says nothing of the writes, of a program's own memory
    for other in (ACQUIRED.replace("ld.", "@%p1 ld."), ACQUIRED.replace("%rd2", "%rd1"), ACQUIRED.replace("global", "shared")):
        assert len(found(other, THROUGH)) == 1
    # within a block of threads: it may be older itself
    assert len(found(ACQUIRED.replace("gpu", "cta"), THROUGH)) == 2
    # cached apart
    for apart in (THROUGH.replace("global", "global.nc"), "	ldu.global.b32 	%r2, [%rd4];\n"):
        assert len(found(ACQUIRED, apart)) == 1
    assert len(violations(HEAD + ACQUIRED + THROUGH + WAIT + TAIL, {0}, set(), {1})) == 2


NUMBER = "	ld.param.b32 	%r7, [k_param_2];\n	cvt.u64.u32 	%rd6, %r7;\n"
FOUND = "	ld.global.b64 	%rd6, [%rd3];\n"
READ = "	ld.global.b32 	%r2, [%rd5];\n"


@pytest.mark.parametrize("other", [NUMBER, FOUND])
def test_a_number_or_what_was_read_early_may_be_a_part_of_an_early_address_and_is_none_alone(other: str) -> None:
    def broken(address: str) -> int:
        return len(violations(HEAD + other + address + READ + WAIT, {0}, set(), {1}))

    assert broken("	add.s64 	%rd5, %rd1, %rd6;\n") == 0
    assert broken("	add.s64 	%rd5, %rd2, %rd6;\n") == 1
    assert broken("	mov.b64 	%rd5, %rd6;\n") == 1


@pytest.mark.parametrize(
    ("early", "message"),
    [
        ("	ld.global.b32 	%r2, [%rd4];\n", "reads what is not early"),
        ("	add.s64 	%rd5, %rd3, %rd4;\n	ld.global.b32 	%r2, [%rd5];\n", "reads what is not early"),
        ("	ld.global.b32 	%r2, [%rd8];\n", "reads what is not early"),
        ("	cp.async.ca.shared.global [%r1], [%rd4], 16;\n", "leave|reads what is not early|writes"),
        ("	st.global.b32 	[%rd3], %r1;\n", "writes before the wait"),
        ("	st.b32 	[%rd3], %r1;\n", "writes before the wait"),
        ("	atom.add.global.u32 	%r2, [%rd3], 1;\n", "writes before the wait"),
        ("	red.global.add.u32 	[%rd3], 1;\n", "writes before the wait"),
        ("	@%p1 bra 	$L__BB0_2;\n", "may leave before the wait"),
        ("	@%p1 ret;\n", "may leave before the wait"),
        ("	{ st.global.b32 	[%rd3], %r1;\n	}\n", "writes before the wait"),
        (
            "	{\n	.reg .pred q;\n	setp.ne.b32 q, %r1, 0;\n	}\n	st.global.b32 [%rd3], %r1;\n",
            "writes before the wait",
        ),
        ("	{\n	.reg .pred q;\n	@q st.global.b32 [%rd3], %r1;\n	}\n", "writes before the wait"),
        ("	@!q bra 	$L__BB0_2;\n", "may leave before the wait"),
        (
            "	mov.b64 	%rd5, %rd4;\n	@%p1 mov.b64 	%rd5, %rd3;\n	ld.global.b32 	%r2, [%rd5];\n",
            "reads what is not early",
        ),
        (
            "	mov.b64 	other, %rd4;\n	add.s64 	%rd5, other, %rd3;\n	ld.global.b32 	%r2, [%rd5];\n",
            "reads what is not early",
        ),
        ("	discard.global.L2 	[%rd3], 128;\n", "not known"),
        ("	sured.b.add.1d.u32.clamp 	[%rd3, %r1], %r1;\n", "not known"),
    ],
)
def test_each_breach_is_found(early: str, message: str) -> None:
    found = violations(HEAD + WEIGHT + early + WAIT + TAIL, {0}, set(), {1})
    assert len(found) == 1
    assert any(part in found[0] for part in message.split("|"))


def test_shared_memory_is_a_programs_own() -> None:
    assert (
        violations(
            HEAD + "	st.shared.b32 	[%r1], %r1;\n	ld.shared.b32 	%r2, [%r1];\n" + WAIT + TAIL, {0}, set(), {1}
        )
        == []
    )


def test_an_address_that_was_in_a_programs_own_memory_is_as_late_as_it_was() -> None:
    kept = "	st.shared.v2.b64 	[%r1], {{ {0}, {0} }};\n	ld.shared.b64 	%rd5, [%r1];\n"
    chosen = "	selp.b64 	%rd6, %rd3, %rd5, %p1;\n	ld.global.b32 	%r2, [%rd6];\n"
    assert violations(HEAD + kept.format("%rd3") + chosen + WAIT + TAIL, {0}, set(), {1}) == []
    for space in ("shared", "local"):
        found = violations(HEAD + (kept.format("%rd4") + chosen).replace("shared", space) + WAIT + TAIL, {0}, set(), {1})
        assert len(found) == 1
        assert "reads what is not early" in found[0]


def test_fetching_ahead_leaves_an_address_what_it_was() -> None:
    fetch = "	prefetch.global.L2 	[%rd3];\n	cp.async.ca.shared.global [%r1], [%rd3], 16;\n"
    assert violations(HEAD + fetch + WEIGHT + WAIT + TAIL, {0}, set(), {1}) == []


def test_taking_part_is_seen_behind_a_scope() -> None:
    assert mentions(HEAD + "	{\n	.reg .pred q;\n	}\n	griddepcontrol.launch_dependents;\n" + TAIL)


def test_a_wait_is_needed_and_a_guarded_one_is_none() -> None:
    assert violations(HEAD + TAIL, {0}, set(), {1}) == ["it has no wait that every program reaches"]
    guarded = WAIT.replace("griddepcontrol.wait", "@%p1 griddepcontrol.wait")
    assert violations(HEAD + guarded + TAIL, {0}, set(), {1}) == ["it has no wait that every program reaches"]


def test_taking_part_is_seen() -> None:
    assert mentions(HEAD + WAIT + TAIL)
    assert not mentions(HEAD + TAIL + "// griddepcontrol.wait in a comment\n")
