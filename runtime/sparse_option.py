"""`--sparse`, for commands that decode with an artifact of whatever modes."""

from __future__ import annotations

import click

sparse_option = click.option(
    "--sparse",
    type=click.Choice(("auto", "off")),
    default="auto",
    show_default=True,
    help="auto: decode sparsely where the artifact has sparse modes; off: dense.",
)
