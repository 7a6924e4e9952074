"""Which sections a report has."""

from __future__ import annotations

from ouro_build.builder.report import artifact_sections as artifact
from ouro_build.builder.report import worker_sections as worker
from ouro_build.builder.report.differences import coverage_difference, startup_difference
from ouro_build.builder.report.page import Page, Section
from ouro_build.builder.report.sources import Report


def compose(report: Report) -> Page:
    """The page of `report`. What an artifact's report could show and was not given is named; a worker's shows what is there."""
    sections: list[Section] = []
    shown = report.artifact
    if shown is not None:
        sections += [artifact.about(shown), artifact.fit(report.fit), artifact.memory(shown)]
        sections += [artifact.graphs(shown, report.observed), artifact.images(shown)]
    if shown is not None or report.startup is not None:
        sections.append(worker.startup(report.startup))
    if report.startup_before is not None and report.startup is not None:
        sections.append(startup_difference(report.startup_before, report.startup))
    if shown is not None or report.coverage is not None:
        sections += worker.coverage(report.coverage)
    if report.coverage_before is not None and report.coverage is not None:
        sections.append(coverage_difference(report.coverage_before, report.coverage))
    if report.notes:
        sections.append(Section("notes", "Notes", tuple(("note", note) for note in report.notes)))
    return Page(f"Report on {report.name}", tuple(sections))
