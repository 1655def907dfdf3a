"""Folders of processes that are killed do not stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from csc.temporary import PREFIX, TemporaryFolder, remove_left

HOLDS = "from csc.temporary import TemporaryFolder\nf = TemporaryFolder()\nprint(f.name, flush=True)\ninput()"


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_has_stays(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", HOLDS], stdin=-1, stdout=-1, text=True, env=environment)
        for _ in range(2)
    ]
    names = [Path(one.stdout.readline().strip()).parent for one in started if one.stdout is not None]
    assert all(one.is_dir() and one.parent == tmp_path for one in names)
    started[0].send_signal(signal.SIGKILL)
    started[0].wait()
    strange = tmp_path / f"{PREFIX}without-a-lock"
    strange.mkdir()
    remove_left(tmp_path)
    assert not names[0].exists() and names[1].exists() and strange.exists()
    started[1].communicate("\n")
    assert not names[1].exists()


def test_it_is_gone_with_its_context() -> None:
    with TemporaryFolder() as name:
        assert not list(Path(name).iterdir()) and Path(name).parent.name.startswith(PREFIX)
    assert not Path(name).parent.exists()
