"""Files of users: what `path.py:name` or `my.module:name` names in them."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from csc.errors import CscError, InputError, MissingPackage, user_line


def load_value(target: str, name: str) -> Any:
    """What `path.py:name` names; of a path alone, `name` in it. InputError as of csc.commands.target.load_target."""
    path, _, own = target.rpartition(":") if not target.endswith(".py") else (target, "", name)
    if not path or not own:
        raise InputError(f"{target!r} names no file", "target", f"write path.py, or path.py:name; {name} else")
    return attribute(load_file(Path(path)), own, path)


def load_named(target: str) -> Any:
    """What `path.py:name` or `my.module:name` names, in the module that is loaded already if one is. InputError if
    there is none.
    """
    place, _, name = target.rpartition(":")
    if not place.endswith(".py"):
        try:
            module: Any = importlib.import_module(place)
        except ImportError as error:
            raise InputError(
                f"there is no module {place} ({error})", target, "write my.module:Name, or my_file.py:Name"
            ) from error
    else:
        path = Path(place)
        module = _loaded(path) or load_file(path)
    *outer, last = name.split(".")
    for one in outer:
        module = attribute(module, one, place)
    return attribute(module, last, place)


def _loaded(path: Path) -> Any:
    """The module of a file, if it has been loaded; the program that runs is one."""
    wanted = str(path.resolve())
    files = ((module, getattr(module, "__file__", None)) for module in list(sys.modules.values()))
    return next((module for module, file in files if file and os.path.abspath(file) == wanted), None)


def load_file(path: Path) -> Any:
    """A file as a module, loaded anew. InputError if there is none or it fails, with the user's line."""
    if not path.is_file():
        raise InputError(
            f"there is no file {path}", "target", "give the path of a Python file, then a colon and a name"
        )
    name = f"csc_target_{path.stem}"
    while (other := sys.modules.get(name)) is not None and other.__file__ != str(path):
        name += "_"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    sys.path.insert(0, str(path.parent.resolve()))  # the file may import its neighbours, as it would when run
    try:
        specification.loader.exec_module(module)
    except CscError:
        raise
    except SyntaxError as error:
        raise InputError(f"syntax error: {error.msg}", f"{error.filename}:{error.lineno}", "mend that line") from error
    except Exception as error:
        where = user_line(error) or str(path)
        missing = MissingPackage.of(error, where) if isinstance(error, ModuleNotFoundError) else None
        if missing is not None:
            raise missing from error
        last = traceback.format_exception_only(error)[-1].strip()
        raise InputError(
            f"the file fails when it is loaded: {last}", where, "mend it so that python can import it"
        ) from error
    return module


def attribute(module: Any, name: str, path: str) -> Any:
    """What a module, loaded from `path`, has under a name. InputError if it has nothing."""
    if not hasattr(module, name):
        close = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("_")], n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "define it at the top level of the file"
        raise InputError(f"{path} has no {name!r}", "target", hint)
    return getattr(module, name)
