"""When programs are checked.

checks(given) -> bool | int              as the user says, else as the environment does
"""

from __future__ import annotations

import os

from csc.errors import InputError


def checks(given: bool | int | None) -> bool | int:
    """True: before a program's first step; a number: and at each step of which it is a divisor; False: never.

    None: True, unless CSC_CHECK is 0. InputError for what is no such thing.
    """
    if given is None:
        return os.environ.get("CSC_CHECK", "1").lower() not in ("0", "false", "off", "no")
    if not isinstance(given, int) or given < 0:
        raise InputError(f"check is {given!r}", "compile", "use True, False, or a number of steps between two checks")
    return given if isinstance(given, bool) else given or False
