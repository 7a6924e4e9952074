"""What every command does with its streams and signals, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

COMMANDS = """
import sys, time
import click
from ouro_build.artifacts.console import Output, run

@click.group()
def cli(): pass

@cli.command()
@click.option("--json", "as_json", is_flag=True)
def show(as_json):
    Output(json=as_json).data({"text": "é…😀"}, lambda v: v["text"])

@cli.command()
def wait():
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("cleaned", flush=True)

run(cli)
"""


def start(*arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-c", COMMANDS, *arguments]
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize(
    ("encoding", "shown"), [("utf-8", "é…😀"), ("ascii", r"\xe9\u2026\U0001f600"), ("latin-1", r"é\u2026\U0001f600")]
)
def test_text_is_printed_in_any_encoding(encoding: str, shown: str) -> None:
    process = start("show", PYTHONIOENCODING=encoding)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.decode(encoding).strip() == shown


def test_json_is_utf8_in_any_encoding() -> None:
    process = start("show", "--json", PYTHONIOENCODING="ascii")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert json.loads(out.decode()) == {"text": "é…😀"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_terminated_commands_clean_up(number: signal.Signals) -> None:
    process = start("wait")
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, b"cleaned\n", b"\ninterrupted\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_closed_streams_are_no_error(closed: str, more: list[str]) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-P", "-c", COMMANDS, "show", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (">&-" not in closed.replace("2>&-", ""))
