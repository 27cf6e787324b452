"""Finds out whether the code that a model runs is what torch and transformers define.

Anything in Python can be replaced: the forward of a class, a function in a module, the attention registered under a
name. Our code may compute a pass instead of the model's only if nothing is replaced. So a search follows all code that
a pass can reach, starting at the classes of the modules, and compares each function with the code in the file of its
module: functions by their place in it, imported names by their origin. A method counts as reached if its name occurs in
reached code, so the search covers more than is run.
"""

import dis
import functools
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import chain, pairwise, repeat
from operator import attrgetter, is_, methodcaller
from types import BuiltinFunctionType, CodeType, FunctionType, GenericAlias, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

ROOTS = ("torch", "transformers", "lookahead")
"""Packages whose own code is trusted."""
OF_LOOP = (
    "_sample", "_prefill", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation",
    "_has_unfinished_sequences", "_optimize_model_for_decode",
)  # fmt: skip
"""Methods of the loop of `generate()`."""
PREPARES_INPUTS = "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"
"""Those that choose what a pass is given, and nothing else."""
# Names of what is called without being named: of a module, and of tensors by operators.
_CALLED = (
    *OF_LOOP,
    "__call__", "forward", "__getattr__", "__getattribute__", "__torch_function__", "__getitem__", "__setitem__",
    *(f"__{kind}{name}__" for kind in ("", "r", "i") for name in ("add", "sub", "mul", "truediv", "matmul", "pow")),
    "__iter__", "__len__", "__neg__", "__and__", "__or__", "__invert__", "__eq__",
    "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
)  # fmt: skip
_FOLLOWED, _NOT_FOLLOWED = ("transformers.", "torch.nn."), "transformers.generation"  # modules with further functions
# What Python itself adds to classes: when an instance is first copied, or when annotations are first asked for.
_PYTHONS = {"__slotnames__", "__annotations__", "__annotations_cache__"}
_IS_FUNCTION = 0x1  # CO_OPTIMIZED: the code of a function, not of a class


class Foreign(NamedTuple):
    """Foreign code: it replaces code that torch or transformers define."""

    place: str
    """Where it was found, such as ``transformers.models.llama.modeling_llama.LlamaMLP.forward``."""
    found: Any
    """What was found there."""
    cls: type | None = None
    """The class of modules that it was found in; None if a module of Python holds it."""

    def __str__(self) -> str:
        code = code_of(self.found)
        if code is not None:
            return f"{self.place} is {getattr(self.found, '__qualname__', code.co_name)} of {code.co_filename}"
        name = getattr(self.found, "__qualname__", type(self.found).__qualname__)
        return f"{self.place} is {name} of {getattr(self.found, '__module__', None) or type(self.found).__module__}"


MOST_INNER = 16  # partial objects in one another; a mock has an attribute of any name, for ever


def function_of(found: Any) -> Any:
    """What a method, a property or a partial object calls."""
    for _ in range(MOST_INNER):
        if isinstance(found, FunctionType):
            break
        inner = (getattr(found, name, None) for name in ("__func__", "func", "fget"))
        called = next((one for one in inner if one is not None), None)
        if called is None:
            break
        found = called
    return found


def code_of(found: Any) -> CodeType | None:
    """The code of a function, of a method, or of what a partial object calls; None if it is not written in Python."""
    return getattr(function_of(found), "__code__", None)


class _Source:
    """What the file of a module defines."""

    def __init__(self, module: ModuleType):
        spec: Any = module.__spec__
        code = spec.loader.get_code(module.__name__)
        self.codes: dict[str, set[CodeType]] = {}
        """Code of functions and of the bodies of classes, by qualified name."""
        self.every: set[CodeType] = set()
        self.imports: dict[str, list[tuple[str, str | None]]] = {}
        """By name: the modules that it may come from, and its name there; None for a module itself."""
        self.stars: list[str] = []
        """Modules of which all names are imported."""
        self.names = set(code.co_names)
        """Names that the module gives a value."""
        self._add(code, "")
        self._read_imports(code, spec.parent)

    def _add(self, code: CodeType, prefix: str) -> None:
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                name = prefix + inner.co_name
                self.codes.setdefault(name, set()).add(inner)
                self.every.add(inner)
                self._add(inner, name + (".<locals>." if inner.co_flags & _IS_FUNCTION else "."))

    def _read_imports(self, code: CodeType, package: str) -> None:
        constants: list[Any] = []
        source, is_of_module = "", True
        latest: tuple[str, str | None] | None = None
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
                constants.append(step.argval)
            elif step.opname == "IMPORT_NAME":
                level, source = constants[-2], step.argval
                if level:
                    source = ".".join(filter(None, [package.rsplit(".", level - 1)[0], source]))
                is_of_module = not constants[-1]  # not "from source import names"
                latest = source.split(".")[0], None
            elif step.opname == "IMPORT_FROM":
                latest = source, None if is_of_module else step.argval
            elif step.opname == "IMPORT_STAR" or (step.opname == "CALL_INTRINSIC_1" and step.arg == 2):
                self.stars.append(source)
            elif step.opname == "STORE_NAME" and latest is not None:
                self.imports.setdefault(step.argval, []).append(latest)
                latest = None


@cache
def _source(module: str) -> _Source | None:
    """What the file of a module of `ROOTS` defines; None for other modules, and for those without a file in Python."""
    found = sys.modules.get(module)
    if found is None or module.split(".")[0] not in ROOTS:
        return None
    try:
        return _Source(found)
    except (AttributeError, ImportError, TypeError):  # a module that was made in another way
        return None


_defined: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def is_defined(cls: type) -> bool:
    """Whether torch or transformers, or Python, defines a class and those that it is derived from."""
    if cls not in _defined:
        _defined[cls] = all(
            (source is not None and base.__qualname__ in source.codes) or _is_pythons(base.__module__) or base in _IN_C
            for base in cls.__mro__
            for source in [_source(base.__module__)]
        )
    return _defined[cls]


_IN_C = (torch.Tensor, *torch.Tensor.__mro__)


def is_wholly_own(function: Any) -> bool:
    """Whether torch or transformers, or Python, defines a function, and those that decorators have wrapped in it."""
    return is_own(function) and all(map(is_own, _inner(function_of(function))))


def is_own(function: Any) -> bool:
    """Whether torch or transformers, or Python, defines what this is, or what it calls."""
    function = function_of(function)
    if not isinstance(function, FunctionType):
        return str(getattr(function, "__module__", None)).split(".")[0] in (*ROOTS, "builtins", "math", "None")
    module = str(function.__globals__.get("__name__"))
    source = _source(module)
    return function.__code__ in source.every if source else _is_pythons(module)


def _is_pythons(module: str) -> bool:
    return module.split(".")[0] in sys.stdlib_module_names and module != "__main__"


def _origins(source: _Source, name: str) -> list[tuple[str, str | None]]:
    """Where the file of a module may have imported a name from: modules, and the name there."""
    found = source.imports.get(name, [])
    return found if name in source.names else [*found, *((star, name) for star in source.stars)]


@cache
def _defined_as(module: str, name: str) -> frozenset[CodeType] | None:
    """The code that a name of a module has by its file, or by those that it is imported from; None if it is no code."""
    source = _source(module)
    if source is None:
        return None
    if name in source.codes:
        return frozenset(source.codes[name])
    for origin, there in _origins(source, name):
        if there is not None and (origin, there) != (module, name):
            codes = _defined_as(origin, there)
            if codes is not None:
                return codes
    return None


_NATIVE = (BuiltinFunctionType, type(str.join), type(str.__len__), type(type.__dict__["__doc__"]))
"""Functions and attributes that are not written in Python."""


class ReachableCode:
    """Whose code passes run that call these classes of modules, and these functions, as it was when this was made."""

    def __init__(self, classes: Iterable[type], functions: Iterable[tuple[str, str, Any]] = ()):
        """functions: for each, the module and the name by which torch or transformers define it, and what is used."""
        self.functions = list(functions)
        self.names = set(_CALLED)
        """Names of attributes and methods that passes use."""
        self._foreign: dict[str, Foreign] = {}
        self._classes: dict[type, None] = {}
        self._bindings: dict[tuple[str, str], tuple[dict[str, Any], Any]] = {}  # what names of modules stand for
        self._functions: dict[FunctionType, CodeType] = {}
        self.written: set[str] = set()
        """Names of attributes that passes may write to."""
        self._modules: set[tuple[str, frozenset[str]]] = set()
        for cls in (*classes, torch.Tensor):
            for base in cls.__mro__:
                if not _is_pythons(base.__module__):
                    self._classes[base] = None
        for module, name, function in self.functions:
            codes = _defined_as(module, name)
            self._defined(f"{module}.{name}", function, codes) if codes else self._value(f"{module}.{name}", function)
        done: set[tuple[type, str]] = set()
        while wanted := [
            (cls, name) for cls in self._classes for name in vars(cls).keys() & self.names if (cls, name) not in done
        ]:
            done.update(wanted)
            for cls, name in wanted:
                self._attribute(cls, name)
        self.foreign = tuple(self._foreign.values())
        """All code that neither torch nor transformers defines there."""
        self.methods = frozenset(name for cls, name in done if isinstance(vars(cls)[name], FunctionType))
        """Names of the methods that passes call. An attribute of an object may stand in for its class's."""
        self._look()
        spaces, found = zip(*self._bindings.values(), strict=True) if self._bindings else ((), ())
        self._bound = spaces, [name for _, name in self._bindings], found

    def is_current(self) -> bool:
        """Whether nothing was replaced since then."""
        # Each call of generate() asks this of a thousand names, so nothing here is a function of Python's.
        spaces, names, found = self._bound
        has_same_classes = list(map(len, map(vars, self._classes))) == self._sizes and all(
            map(is_, chain.from_iterable(map(_VALUES, map(vars, self._classes))), self._attributes)
        )
        return (
            (has_same_classes or self._has_same_but_for_pythons())
            and all(map(is_, map(_CODE, self._functions), self._functions.values()))
            and all(map(is_, map(dict.get, spaces, names, repeat(_MISSING)), found))
        )

    def _look(self) -> None:
        """Note what the classes have."""
        self._before = [dict(vars(cls)) for cls in self._classes]
        self._attributes = list(chain.from_iterable(map(_VALUES, self._before)))
        self._sizes = list(map(len, self._before))

    def _has_same_but_for_pythons(self) -> bool:
        """Whether the classes have what they had, but for what Python itself has added. That is noted."""
        for cls, before in zip(self._classes, self._before, strict=True):
            now = vars(cls)
            names = (now.keys() | before.keys()) - _PYTHONS
            if any(now.get(name, _MISSING) is not before.get(name, _MISSING) for name in names):
                return False
        self._look()
        return True

    def _blame(self, place: str, found: Any, cls: type | None = None) -> None:
        self._foreign.setdefault(place, Foreign(place, found, cls))

    def _attribute(self, cls: type, name: str) -> None:
        """Follow what a class has under a name."""
        module = "torch._tensor" if cls is torch.Tensor else cls.__module__
        found, source = vars(cls)[name], _source(module)
        if any(vars(base).get(name) is found for base in cls.__mro__[1:]):  # inherited; as when it was put back
            return
        if isinstance(found, (staticmethod, classmethod)):
            found = found.__func__
        elif isinstance(found, (property, functools.cached_property)):
            found = found.fget if isinstance(found, property) else found.func
        if not callable(found) or isinstance(found, (*_NATIVE, type, GenericAlias)):
            return
        place, qualified = f"{cls.__module__}.{cls.__qualname__}.{name}", f"{cls.__qualname__}.{name}"
        if source is None:
            self._blame(place, found, cls)
        elif qualified in source.codes:
            self._defined(place, found, source.codes[qualified], cls)
        elif any(name in body.co_names for body in source.codes.get(cls.__qualname__, ())) or _is_default(found, name):
            self._value(place, found, cls)  # another name for a function
        elif not (isinstance(found, FunctionType) and found.__code__.co_filename == "<string>"):  # of a dataclass
            self._blame(place, found, cls)

    def _defined(self, place: str, found: Any, codes: Iterable[CodeType], cls: type | None = None) -> None:
        """Follow a function that must have one of these codes, below its decorators."""
        is_object = not isinstance(found, FunctionType) and type(found).__module__.split(".")[0] in ROOTS
        if not (is_object or any(one.__code__ in codes for one in _inner(_undecorated(found)))):
            self._blame(place, found, cls)
        self._value(place, found, cls)

    def _value(self, place: str, found: Any, cls: type | None = None) -> None:
        """Follow what was found, which may be any code of torch or transformers."""
        found = _undecorated(function_of(found))
        if isinstance(found, FunctionType):
            self._function(place, found, cls)
        elif callable(found) and not isinstance(found, _NATIVE):
            kind = found if isinstance(found, type) else type(found)
            if kind.__module__.split(".")[0] not in ROOTS and not _is_pythons(kind.__module__):
                self._blame(place, found, cls)

    def _function(self, place: str, function: FunctionType, cls: type | None) -> None:
        if function in self._functions:
            return
        space, code = function.__globals__, function.__code__
        self._functions[function] = code
        module = str(space.get("__name__"))
        source = _source(module)
        if source is not None:
            if vars(sys.modules[module]) is not space or code not in source.every:
                self._blame(place, function, cls)
                return
            if module.startswith(_FOLLOWED) and not module.startswith(_NOT_FOLLOWED):
                self._code(space, code)
        elif not _is_pythons(module):
            self._blame(place, function, cls)
            return
        for inner in enclosed(function):  # decorators hold what they decorate
            if isinstance(inner, (FunctionType, MethodType, functools.partial)):
                self._value(place, inner, cls)

    def _code(self, space: dict[str, Any], code: CodeType) -> None:
        used = frozenset(code.co_names)
        self.names |= used - {"__init__"}  # the objects are there already
        self.written |= _written(code)
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                self._code(space, inner)
        for name in used:
            self._global(space, name, used)

    def _global(self, space: dict[str, Any], name: str, used: frozenset[str]) -> None:
        """Follow what a name of a module stands for. used: names of its attributes that may be meant."""
        module, found = str(space.get("__name__")), space.get(name, _MISSING)
        if isinstance(found, ModuleType):
            self._module(found, used)
        source = _source(module)
        if source is None or (module, name) in self._bindings:
            return
        self._bindings[module, name] = space, found
        if found is _MISSING:  # it is Python's, or of an object
            return
        place, codes = f"{module}.{name}", _defined_as(module, name)
        if codes is not None:
            if isinstance(found, type):
                if found.__name__ != name or found.__module__.split(".")[0] not in ROOTS:
                    self._blame(place, found)
            else:
                self._defined(place, found, codes)
        elif any(_imported(origin, there) is found for origin, there in _origins(source, name)):
            return
        elif name in source.imports or not _is_called(found, name):
            self._blame(place, found)
        else:
            self._value(place, found)

    def _module(self, module: ModuleType, used: frozenset[str]) -> None:
        """Follow what attributes of a module stand for."""
        if _source(module.__name__) is not None and (module.__name__, used) not in self._modules:
            self._modules.add((module.__name__, used))
            for name in vars(module).keys() & used:
                self._global(vars(module), name, used)


_MISSING = object()
_CODE, _VALUES = attrgetter("__code__"), methodcaller("values")


def _is_called(found: Any, name: str) -> bool:
    """Whether a function may be known by this name. What is no function may have any."""
    if isinstance(found, BuiltinFunctionType):
        own, known_by = found.__name__.strip("_"), name.strip("_")
        return f"_{own}".endswith(f"_{known_by}") or own.replace("_", "") == known_by
    return not isinstance(found, FunctionType) or any(inner.__name__ == name for inner in _inner(found))


def _is_default(found: Any, name: str) -> bool:
    """Whether a decorator of transformers may have given a class this method: a function, and no method of others."""
    return getattr(found, "__qualname__", "") == f"_default{name}" and is_own(found)


@cache
def _written(code: CodeType) -> frozenset[str]:
    """Names of the attributes that a method writes to in its own object."""
    steps = list(dis.get_instructions(code))
    return frozenset(
        step.argval for last, step in pairwise(steps) if step.opname == "STORE_ATTR" and "self" in _names(last)
    )


def _names(step: dis.Instruction) -> tuple[Any, ...]:
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)


def enclosed(function: Any) -> Iterator[Any]:
    """Yield what a function has taken from around it."""
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # it is empty
            yield cell.cell_contents


def _undecorated(found: Any) -> Any:
    """The function in an object that a decorator of Python has made, such as functools.cache."""
    is_decorated = not isinstance(found, FunctionType) and _is_pythons(type(found).__module__)
    return getattr(found, "__wrapped__", found) if is_decorated else found


def _inner(function: Any) -> Iterator[FunctionType]:
    """Yield a function, and those that decorators have wrapped in it."""
    seen, left = set(), [function]
    while left:
        one = left.pop()
        if isinstance(one, FunctionType) and id(one) not in seen:
            seen.add(id(one))
            yield one
            left += [getattr(one, "__wrapped__", None), *enclosed(one)]


def _imported(origin: str, name: str | None) -> Any:
    """What an import gives now."""
    module = sys.modules.get(origin)
    if name is None or module is None:
        return module
    found = vars(module).get(name, sys.modules.get(f"{origin}.{name}"))
    return getattr(module, name, None) if found is None else found
