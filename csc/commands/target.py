"""`path.py:name` on the command line: load the user's file and find the compiled model in it."""

from __future__ import annotations

import difflib
import importlib.util
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from csc.api import compile
from csc.driver.compiled import CompiledModel
from csc.driver.new_model import compiled_model
from csc.errors import CscError, InputError, MissingPackage, user_line


def load_value(target: str, name: str) -> Any:
    """What `path.py:name` names; of a path alone, `name` in it. InputError as of load_target."""
    path, _, attribute = target.rpartition(":") if not target.endswith(".py") else (target, "", name)
    if not path or not attribute:
        raise InputError(f"{target!r} names no file", "target", f"write path.py, or path.py:name; {name} else")
    return _attribute(_load(Path(path)), attribute, path)


def load_target(target: str, example: str | None = None) -> CompiledModel:
    """The CompiledModel named by `path.py:name`: decorated, made by csc.compile, a plain module, or a factory of one.

    example: name of the example batch (or a function that makes it) in the same file, for targets that have none.
    Raises InputError if there is no such file or name, or the file itself fails (with the user's line).
    """
    path, _, name = target.rpartition(":")
    if not path or not name:
        raise InputError(f"{target!r} names no model", "target", "write path.py:name, for example train.py:llava")
    module = _load(Path(path))
    value = _attribute(module, name, path)
    if isinstance(value, CompiledModel):
        compiled = value
    elif isinstance(value, nn.Module) or callable(value):
        compiled = compiled_model(value, compile(lambda: nn.Module()).options, None)
    else:
        raise InputError(
            f"{name} is a {type(value).__name__}",
            target,
            "name a compiled model, an nn.Module or a function that makes one",
        )
    if example is not None:
        batch = _attribute(module, example, path)
        compiled = compiled.with_example(batch() if callable(batch) else batch)
    return compiled


def _load(path: Path) -> Any:
    if not path.is_file():
        raise InputError(
            f"there is no file {path}", "target", "give the path of a Python file, then a colon and a name"
        )
    specification = importlib.util.spec_from_file_location(f"csc_target_{path.stem}", path)
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


def _attribute(module: Any, name: str, path: str) -> Any:
    if not hasattr(module, name):
        close = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("_")], n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "define it at the top level of the file"
        raise InputError(f"{path} has no {name!r}", "target", hint)
    return getattr(module, name)


def overridden(compiled: CompiledModel, overrides: Mapping[str, Any]) -> CompiledModel:
    """With the options that the command line gives (those that are not None)."""
    changes = {name: value for name, value in overrides.items() if value is not None}
    return compiled.with_options(**changes) if changes else compiled
