"""Runs build/peer_probe for the tests in this folder."""
import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("BONFIRE_BUILD", ROOT / "build")).resolve()
PROBE = BUILD / "peer_probe"


def run(command, timeout=120, bytes=False, **variables):
    """Runs a command, and fails with all that it said where it fails. Returns it as text, or as it came."""
    ended = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=not bytes,
                           timeout=timeout, env={**os.environ, **variables})
    if ended.returncode != 0:
        raise AssertionError(f"{command} ended with {ended.returncode}:\n{ended.stdout}")
    return ended.stdout


def probe(*arguments, **variables):
    return run([PROBE, *arguments], **variables)
