# ruff: noqa: E501
"""Models whose code looks at something indirectly, each with a change of what it looks at."""

from __future__ import annotations

from dataclasses import dataclass

SIDE = """
SCALE = 2.0
TABLE = {"a": [1.0, {"b": 2.0}]}
def act(x): return x * SCALE
def other(x): return x * 5
class Scaler:
    def __call__(self, x): return x * SCALE
    def scaled(self, x): return x * SCALE
class Layer:
    factor = 2.0
    def __call__(self, x): return x * self.factor
scaler = Scaler()
"""
NET = """
import torch
from torch import nn
from torch.nn import functional as F
import PKG
{top}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.prepare()
    def prepare(self):
        {init}
    def forward(self, x):
        x = self.linear(x)
        {forward}
"""


@dataclass(frozen=True)
class Case:
    """A model's code, and what is done after the first key. Names in `change`: net (the file), side, deep, model."""

    change: str
    forward: str = "return x * SCALE"
    top: str = "SCALE = 2.0"
    init: str = "pass"
    told: bool = True  # False: such a model has no key


CASES = {
    # values of modules
    "a number": Case("net.SCALE = 3.0"),
    "package.module.CONST": Case("side.SCALE = 3.0", "return x * PKG.side.SCALE", "import PKG.side"),
    "package.package.module.CONST": Case("deep.C = 3.0", "return x * PKG.sub.deep.C", "import PKG.sub.deep"),
    "a module under another name": Case("deep.C = 3.0", "return x * d.C", "import PKG.sub.deep as d"),
    "a module's module": Case("deep.C = 3.0", "return x * side.deep.C", "from . import side\nfrom .sub import deep\nside.deep = deep"),
    "an import in forward": Case("side.SCALE = 3.0", "import PKG.side as s; return x * s.SCALE", "import PKG.side"),
    "a relative import in forward": Case("side.SCALE = 3.0", "from .side import SCALE; return x * SCALE", "import PKG.side"),
    "a function imported in forward": Case("side.SCALE = 3.0", "from .side import act; return act(x)", "import PKG.side"),
    "a star import": Case("net.SCALE = 3.0", top="from .side import *"),
    "a function of a star import": Case("side.SCALE = 3.0", "return act(x)", "from .side import *"),
    "a conditional import": Case("side.SCALE = 3.0", "return x * s.SCALE", "try:\n    from . import side as s\nexcept ImportError:\n    s = None"),
    "a module as an attribute": Case("side.SCALE = 3.0", "return x * self.s.SCALE", "from . import side", "self.s = side"),
    "a module in a list": Case("side.SCALE = 3.0", "return x * MODULES[0].SCALE", "from . import side\nMODULES = [side]"),
    "a module's __getattr__": Case("side.HIDDEN['SCALES'] = 3.0", "return x * side.SCALES", "from . import side\nside.HIDDEN = {'SCALES': 2.0}\nside.__getattr__ = lambda name: side.HIDDEN[name]"),
    "a module of a class of its own": Case("type(side).factor = 3.0", "return x * side.double()", "from . import side\nclass M(type(side)):\n    factor = 2.0\n    def double(self): return self.factor\nside.__class__ = M"),
    "getattr with a constant": Case("side.SCALE = 3.0", "return x * getattr(side, 'SCALE')", "from . import side"),
    "getattr with a name that is computed": Case("side.SCALE = 3.0", "return x * getattr(side, NAME)", "from . import side\nNAME = 'SCALE'"),
    "vars of a module": Case("side.SCALE = 3.0", "return x * vars(side)['SCALE']", "from . import side"),
    "a module's __dict__": Case("side.SCALE = 3.0", "return x * side.__dict__['SCALE']", "from . import side"),
    "globals()": Case("net.SCALE = 3.0", "return x * globals()['SCA' + 'LE']", told=False),
    "sys.modules": Case("side.SCALE = 3.0", "return x * sys.modules['PKG.side'].SCALE", "import sys, PKG.side", told=False),
    "importlib": Case("side.SCALE = 3.0", "return x * importlib.import_module('PKG.side').SCALE", "import importlib, PKG.side", told=False),
    "__import__": Case("side.SCALE = 3.0", "return x * __import__('PKG.side', fromlist=['x']).SCALE", "import PKG.side", told=False),
    "eval": Case("net.SCALE = 3.0", "return x * eval('SCALE')", told=False),
    "two files of one name": Case("deep2.C = 3.0", "return x * one.C * two.C", "from .sub import deep as one\nfrom .sub2 import deep as two"),
    # objects
    "a dictionary in a list in a dictionary": Case("side.TABLE['a'][1]['b'] = 3.0", "return x * side.TABLE['a'][1]['b']", "from . import side"),
    "a set": Case("net.ON.add('b')", "return x * len(ON)", "ON = {'a'}"),
    "a method of a global object": Case("side.SCALE = 3.0", "return scaler.scaled(x)", "from .side import scaler"),
    "a global object that is called": Case("side.SCALE = 3.0", "return scaler(x)", "from .side import scaler"),
    "an object made in forward": Case("side.SCALE = 3.0", "return Scaler()(x)", "from .side import Scaler"),
    "a method of an object in a list": Case("side.SCALE = 3.0", "return ALL[0].scaled(x)", "from .side import scaler\nALL = [scaler]"),
    "a bound method": Case("side.SCALE = 3.0", "return act(x)", "from .side import scaler\nact = scaler.scaled"),
    "an object's attribute": Case("side.scaler.k = 3.0", "return x * scaler.k", "from .side import scaler\nscaler.k = 2.0"),
    "an attribute of a class": Case("side.Layer.factor = 3.0", "return side.Layer()(x)", "from . import side"),
    "an attribute of a class by name": Case("side.Layer.factor = 3.0", "return x * Layer.factor", "from .side import Layer"),
    "an attribute of a base class": Case("side.Layer.factor = 3.0", "return Child()(x)", "from .side import Layer\nclass Child(Layer): pass"),
    "a dunder of a class": Case("net.K.__scale__ = 3.0", "return x * K.__scale__", "class K:\n    __scale__ = 2.0"),
    "a metaclass": Case("net.Meta.factor = 3.0", "return x * K.double", "class Meta(type):\n    factor = 2.0\n    @property\n    def double(cls): return Meta.factor\nclass K(metaclass=Meta): pass"),
    "a property": Case("net.SCALE = 3.0", "return x * K().scale", "SCALE = 2.0\nclass K:\n    @property\n    def scale(self): return SCALE"),
    "__getattr__ of an object": Case("net.SCALE = 3.0", "return x * OBJECT.anything", "SCALE = 2.0\nclass K:\n    def __getattr__(self, name): return SCALE\nOBJECT = K()"),
    "a descriptor": Case("net.SCALE = 3.0", "return x * K().d", "SCALE = 2.0\nclass D:\n    def __get__(self, *a): return SCALE\nclass K:\n    d = D()"),
    "a dataclass": Case("net.CONFIG.scale = 3.0", "return x * CONFIG.scale", "from dataclasses import dataclass\n@dataclass\nclass C:\n    scale: float = 2.0\nCONFIG = C()"),
    "a named tuple": Case("net.P = net.Pair(3.0, 1.0)", "return x * P.a", "from collections import namedtuple\nPair = namedtuple('Pair', 'a b')\nP = Pair(2.0, 1.0)"),
    "a simple namespace": Case("net.N.scale = 3.0", "return x * N.scale", "from types import SimpleNamespace\nN = SimpleNamespace(scale=2.0)"),
    "slots": Case("net.OBJECT.scale = 3.0", "return x * OBJECT.scale", "class K:\n    __slots__ = ('scale',)\nOBJECT = K()\nOBJECT.scale = 2.0"),
    "private slots": Case("net.OBJECT.set(3.0)", "return x * OBJECT.get()", "class K:\n    __slots__ = ('__scale',)\n    def set(self, v): self.__scale = v\n    def get(self): return self.__scale\nOBJECT = K()\nOBJECT.set(2.0)"),
    "an enumeration": Case("net.Mode.A._value_ = 3.0", "return x * Mode.A.value", "from enum import Enum\nclass Mode(Enum):\n    A = 2.0"),
    "a weak reference": Case("net.KEPT.factor = 3.0", "return x * REF().factor", "import weakref\nfrom .side import Layer\nKEPT = Layer()\nKEPT.factor = 2.0\nREF = weakref.ref(KEPT)"),
    "an ordered dictionary": Case("net.D['a'] = 3.0", "return x * D['a']", "from collections import OrderedDict\nD = OrderedDict(a=2.0)"),
    "a default dictionary": Case("net.D.default_factory = lambda: 3.0", "return x * D.default_factory()", "from collections import defaultdict\nD = defaultdict(lambda: 2.0)"),
    "an array of numpy": Case("net.A[1] = 3.0", "return x * float(A[1])", "import numpy as np\nA = np.array([1.0, 2.0])"),
    "a number of numpy": Case("net.A = np.float32(3)", "return x * float(A)", "import numpy as np\nA = np.float32(2)"),
    "a tensor": Case("net.T.fill_(3)", "return x * T", "T = torch.tensor(2.0)"),
    "a module beside the model": Case("net.M.weight.data.fill_(3)", "return x * M.weight[0, 0].item()", "M = nn.Linear(1, 1)"),
    "a context variable": Case("net.V.set(3.0)", "return x * V.get()", "from contextvars import ContextVar\nV = ContextVar('V', default=2.0)", told=False),
    "what belongs to a thread": Case("net.L.scale = 3.0", "return x * L.scale", "import threading\nL = threading.local()\nL.scale = 2.0", told=False),
    "a generator": Case("next(net.G)", "return x * G.gi_frame.f_locals['i']", "def numbers():\n    for i in range(2, 5): yield i\nG = numbers(); next(G)", told=False),
    # functions
    "a closure": Case("net.act.__closure__[0].cell_contents = 3.0", "return act(x)", "def make(k):\n    def inner(x): return x * k\n    return inner\nact = make(2.0)"),
    "a default argument": Case("net.act.__defaults__ = (3.0,)", "return act(x)", "def act(x, k=2.0): return x * k"),
    "a default argument of a method": Case("net.Net.scaled.__defaults__ = (3.0,)", "return self.scaled(x)", "", "pass\n    def scaled(self, x, k=2.0): return x * k"),
    "a keyword argument's default": Case("net.act.__kwdefaults__ = {'k': 3.0}", "return act(x)", "def act(x, *, k=2.0): return x * k"),
    "an attribute of a function": Case("net.act.k = 3.0", "return act(x)", "def act(x): return x * act.k\nact.k = 2.0"),
    "a partial function": Case("net.act = partial(net.scaled, k=3.0)", "return act(x)", "from functools import partial\ndef scaled(x, k): return x * k\nact = partial(scaled, k=2.0)"),
    "a function of a partial function": Case("side.SCALE = 3.0", "return act(x)", "from functools import partial\nfrom . import side\nact = partial(side.act)"),
    "a decorated function": Case("net.SCALE = 3.0", "return act(x)", "import functools\nSCALE = 2.0\ndef scaled(f):\n    @functools.wraps(f)\n    def inner(x): return f(x) * SCALE\n    return inner\n@scaled\ndef act(x): return x"),
    "a function within a decorated one": Case("net.SCALE = 3.0", "return act(x)", "SCALE = 2.0\ndef scaled(f):\n    def inner(x): return f(x) + 1\n    return inner\n@scaled\ndef act(x): return x * SCALE"),
    "a decorated method's closure": Case("net.TABLE['k'] = 3.0", "return self.scaled(x)", "def with_(table):\n    def of(f):\n        def inner(self, x): return f(self, x) * table['k']\n        return inner\n    return of\nTABLE = {'k': 2.0}", "pass\n    @with_(TABLE)\n    def scaled(self, x): return x"),
    "a cached function": Case("net.SCALE = 3.0; net.scale.cache_clear()", "return x * scale()", "import functools\nSCALE = 2.0\n@functools.lru_cache\ndef scale(): return SCALE"),
    "a cached function as an attribute": Case("net.SCALE = 3.0; net.scale.cache_clear()", "return x * self.f()", "import functools\nSCALE = 2.0\n@functools.lru_cache\ndef scale(): return SCALE", "self.f = scale"),
    "a lambda in a dictionary": Case("net.SCALE = 3.0", "return ACTS['a'](x)", "SCALE = 2.0\nACTS = {'a': lambda x: x * SCALE}"),
    "a lambda as an attribute": Case("side.SCALE = 3.0", "return self.act(x)", "from . import side", "self.act = lambda x: side.act(x)"),
    "a function for another": Case("side.act = side.other", "return side.act(x)", "from . import side"),
    "a function of an imported name": Case("net.act = side.other", "return act(x)", "from .side import act"),
    "a generator function": Case("net.SCALE = 3.0", "return sum(x * k for k in scales())", "SCALE = 2.0\ndef scales(): yield SCALE"),
    "a recursive function": Case("net.SCALE = 3.0", "return down(x, 2)", "SCALE = 2.0\ndef down(x, n): return x * SCALE if n == 0 else down(x, n - 1)"),
    "what a method of a dictionary gives": Case("net.TABLE['k'] = 3.0", "return x * get('k')", "TABLE = {'k': 2.0}\nget = TABLE.get"),
    # the model's own
    "forward of an instance": Case("model.linear.forward = lambda x: x * 3", "return x", ""),
    "forward of a class of torch": Case("torch.nn.Linear.forward = lambda self, x: x * 3", "return x", ""),
    "a hook of a module": Case("model.linear.register_forward_hook(lambda m, a, r: r * 3)", "return x", ""),
    "a hook of all modules": Case("torch.nn.modules.module.register_module_forward_hook(lambda m, a, r: r * 3)", "return x", ""),
    "a hook before all modules": Case("torch.nn.modules.module.register_module_forward_pre_hook(lambda m, a: (a[0] * 3,))", "return x", ""),
    "another class": Case("model.__class__ = net.Other", "return x", "", "pass\nclass Other(nn.Module):\n    def forward(self, x): return self.linear(x) * 3\nclass Net(Net):\n    def nothing(self): pass"),
    # torch, numpy, Python
    "a function of torch": Case("torch.tanh = torch.relu", "return torch.tanh(x)", ""),
    "a function of torch, by an own one": Case("torch.tanh = lambda x: x * 3", "return torch.tanh(x)", ""),
    "a function of nn.functional": Case("F.relu = F.silu", "return self.act(x)", "", "self.act = nn.ReLU()"),
    "a function of nn.functional, by an own one": Case("F.linear = lambda x, w, b=None: x * 3", "return x", ""),
    "a method of a tensor": Case("torch.Tensor.tanh = torch.Tensor.relu", "return x.tanh()", ""),
    "an operator of a tensor": Case("torch.Tensor.__mul__ = lambda a, b: a + b", "return x * 7.0", ""),
    "a function of torch under an own name": Case("net.act = torch.relu", "return act(x)", "act = torch.tanh"),
    "a function of math": Case("net.math.sqrt = lambda v: 3.0", "return x * math.sqrt(4)", "import math"),
    "a number of math": Case("net.math.tau = 3.0", "return x * math.tau", "import math"),
    "a builtin": Case("net.builtins.abs = lambda v: v * 3", "return abs(x)", "import builtins"),
    "the default dtype": Case("torch.set_default_dtype(torch.float64)", "return x * torch.ones(4)", ""),
    # what lies outside of the process
    "os.environ": Case("os.environ['CSC_TEST_SCALE'] = '3'", "return x * float(os.environ.get('CSC_TEST_SCALE', '2'))", "import os", told=False),
    "os.getenv by name": Case("os.environ['CSC_TEST_SCALE'] = '3'", "return x * float(read('CSC_TEST_SCALE', '2'))", "from os import getenv as read", told=False),
    "environ by name, in a function": Case("os.environ['CSC_TEST_SCALE'] = '3'", "return x * scale()", "from os import environ as E\ndef scale(): return float(E.get('CSC_TEST_SCALE', '2'))", told=False),
    "os imported in forward": Case("os.environ['CSC_TEST_SCALE'] = '3'", "import os; return x * float(os.environ.get('CSC_TEST_SCALE', '2'))", "", told=False),
    "open": Case("FILE.write_text('3')", "return x * float(open(__file__ + '.txt').read())", "open(__file__ + '.txt', 'w').write('2')", told=False),
    "a path's text": Case("FILE.write_text('3')", "return x * float(P.read_text())", "from pathlib import Path\nP = Path(__file__ + '.txt')\nP.write_text('2')", told=False),
    "a path of the model": Case("FILE.write_text('3')", "return x * float(self.p.read_text())", "from pathlib import Path", "self.p = Path(__file__ + '.txt'); self.p.write_text('2')", told=False),
    "json.load in a method": Case("FILE.write_text('3')", "return x * self.scale()", "import json", "open(__file__ + '.txt', 'w').write('2')\n    def scale(self): return json.load(open(__file__ + '.txt'))", told=False),
    "torch.load": Case("torch.save(torch.tensor(3.0), FILE)", "return x * torch.load(__file__ + '.txt')", "torch.save(torch.tensor(2.0), __file__ + '.txt')", told=False),
    "numpy.load": Case("net.np.save(str(FILE)[:-4], 3.0); FILE.with_suffix('.npy').replace(FILE)", "return x * float(np.load(open(__file__ + '.txt', 'rb')))", "import numpy as np\nnp.save(open(__file__ + '.txt', 'wb'), 2.0)", told=False),
    "the time": Case("time.sleep(0.01)", "return x * (time.perf_counter() % 1000)", "import time", told=False),
    "random numbers": Case("pass", "return x * random()", "from random import random", told=False),
    "random numbers of a module": Case("pass", "return x * random.random()", "import random", told=False),
    "random numbers of numpy": Case("pass", "return x * np.random.rand()", "import numpy as np", told=False),
    # more of all of these
    "a module that is handed over": Case("side.SCALE = 3.0", "return x * use(side)", "from . import side\ndef use(m): return m.SCALE"),
    "a module in a dictionary, by a name that is handed over": Case("side.SCALE = 3.0", "return x * get(MODULES['s'], NAME)", "from . import side\nNAME = 'SC' 'ALE'\nMODULES = {'s': side}\ndef get(m, n): return getattr(m, n)"),
    "attrgetter": Case("side.SCALE = 3.0", "return x * operator.attrgetter(NAME)(side)", "import operator\nfrom . import side\nNAME = 'SCALE'"),
    "a method by a name that is computed": Case("net.SCALE = 3.0", "return getattr(self, 'scaled' + self.kind)(x)", "SCALE = 2.0", "self.kind = '_'\n    def scaled_(self, x): return x * SCALE"),
    "the environment in a method by a name that is computed": Case("os.environ['CSC_TEST_SCALE'] = '3'", "return getattr(self, NAME)(x)", "import os\nNAME = 'scaled'", "pass\n    def scaled(self, x): return x * float(os.environ.get('CSC_TEST_SCALE', '2'))", told=False),
    "a partial method": Case("net.SCALE = 3.0", "return self.scaled(x)", "import functools\nSCALE = 2.0\ndef scaled(self, x): return x * SCALE", "pass\n    scaled = functools.partialmethod(scaled)"),
    "a context manager": Case("net.SCALE = 3.0", "with scale() as s: return x * s", "import contextlib\nSCALE = 2.0\n@contextlib.contextmanager\ndef scale(): yield SCALE"),
    "a function of autograd": Case("net.SCALE = 3.0", "return Scaled.apply(x)", "SCALE = 2.0\nclass Scaled(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x): return x * SCALE\n    @staticmethod\n    def backward(ctx, g): return g * SCALE"),
    "a class within a function": Case("net.SCALE = 3.0", "class K:\n            def of(self, x): return x * SCALE\n        return K().of(x)"),
    "a default dictionary of an own class": Case("net.D.default_factory = lambda: 3.0", "return x * D.default_factory()", "from collections import defaultdict\nclass K(defaultdict): pass\nD = K(lambda: 2.0)"),
    "a queue of an own class": Case("net.Q[0] = 3.0", "return x * Q[0]", "from collections import deque\nclass K(deque): pass\nQ = K([2.0])"),
    "a number of an own class": Case("net.N = net.K(3.0)", "return x * float(N)", "class K(float):\n    def __repr__(self): return 'K'\nN = K(2.0)"),
    "an own mapping": Case("net.M.inner['k'] = 3.0", "return x * M['k']", "class K:\n    def __init__(self): self.inner = {'k': 2.0}\n    def __getitem__(self, k): return self.inner[k]\nM = K()"),
    "a long pattern": Case("net.P = net.re.compile('a' * 400 + 'c')", "return x * (2.0 if P.match('a' * 400 + 'b') else 3.0)", "import re\nP = re.compile('a' * 400 + 'b')"),
    "an attribute of a parameter": Case("model.linear.weight.scale = 3.0", "return x * self.linear.weight.scale", "", "self.linear.weight.scale = 2.0"),
    "a hook of a parameter is one of the model": Case("model.linear.forward = partial(net.scaled, model.linear)", "return x", "def scaled(linear, x): return x * 3"),
    "modules in a plain list": Case("model.hidden[0].weight.data.fill_(3)", "return self.hidden[0](x)", "", "self.hidden = [nn.Linear(4, 4)]"),
    "code of a function": Case("side.act.__code__ = side.other.__code__", "return side.act(x)", "from . import side"),
    "a class for another": Case("net.K = net.L", "return x * K.factor", "class K:\n    factor = 2.0\nclass L:\n    factor = 3.0"),
    "an object of torch's place": Case("F.linear = net.Callable()", "return x", "class Callable:\n    def __call__(self, x, w, b=None): return x * 3"),
    "nn.Module.__call__": Case("nn.Module.__call__ = lambda self, *a: net.torch.ones(3)", "return x", ""),
    "the date": Case("pass", "return x * datetime.now().microsecond", "from datetime import datetime", told=False),
    "a file of an own module that is not loaded": Case("pass", "from . import late; return x * late.SCALE * torch.rand(())", "", told=False),
    "the processes' rank": Case("os.environ['CSC_TEST_SCALE'] = '3'", "return x * rank()", "import os\ndef rank(): return int(os.environ.get('CSC_TEST_SCALE', '2')) if not torch.distributed.is_initialized() else 0", told=False),
    # where one walk alone once looked
    "a wrapper with the name of a function of torch": Case("net.SCALE = 3.0", "return act(x)", "import functools\nSCALE = 2.0\n@functools.wraps(torch.relu)\ndef act(x): return x * SCALE"),
    "a function behind a decorator of torch": Case("net.SCALE = 3.0", "return x * scale()", "SCALE = 2.0\n@torch.no_grad()\ndef scale(): return SCALE"),
    "a function by class of its argument": Case("net.SCALE = 3.0", "return act(x)", "import functools\nSCALE = 2.0\n@functools.singledispatch\ndef act(x): return x\n@act.register(torch.Tensor)\ndef _(x): return x * SCALE", told=False),
    "what a method of a mapping of an own class reads": Case("net.SCALE = 3.0", "return x * D['a']", "SCALE = 2.0\nclass K(dict):\n    def __getitem__(self, key): return SCALE\nD = K(a=1.0)"),
    "an enumeration that is gone through": Case("net.Mode.A._value_ = 3.0", "return x * sum(one.value for one in Mode)", "from enum import Enum\nclass Mode(Enum):\n    A = 2.0"),
    "a global that a hook reads": Case("net.SCALE = 3.0", "return x", "SCALE = 2.0\ndef scaled(module, given, result): return result * SCALE", "self.linear.register_forward_hook(scaled)"),
    "a constructor that forward calls": Case("net.SCALE = 3.0", "return x * K().scale", "SCALE = 2.0\nclass K:\n    def __init__(self): self.scale = SCALE"),
    "a key of a dictionary": Case("next(iter(net.D)).scale = 3.0", "return x * next(iter(D)).scale", "class K:\n    scale = 2.0\nD = {K(): 1}"),
    "a cached property of an object made in forward": Case("net.SCALE = 3.0", "return x * K().scale", "import functools\nSCALE = 2.0\nclass K:\n    @functools.cached_property\n    def scale(self): return SCALE"),
    "a static method": Case("net.SCALE = 3.0", "return x * K.scale()", "SCALE = 2.0\nclass K:\n    @staticmethod\n    def scale(): return SCALE"),
    "a method of a class": Case("net.K.factor = 3.0", "return x * K.scale()", "class K:\n    factor = 2.0\n    @classmethod\n    def scale(cls): return cls.factor"),
    "an attribute of a number of an own class": Case("net.N.scale = 3.0", "return x * N.scale", "class K(float): pass\nN = K(1.0)\nN.scale = 2.0"),
    "an attribute of a list of an own class": Case("net.L.scale = 3.0", "return x * L.scale", "class K(list): pass\nL = K()\nL.scale = 2.0"),
    "an operator of an own class": Case("net.SCALE = 3.0", "return ONE @ x", "SCALE = 2.0\nclass K:\n    def __matmul__(self, x): return x * SCALE\nONE = K()"),
    "getattr with a name of the model's": Case("side.SCALE = 3.0", "return x * getattr(side, self.name)", "from . import side", "self.name = 'SCALE'"),
    "an object of torch's in a list": Case("net.ALL[0].loc.fill_(3.0)", "return x * ALL[0].loc", "ALL = [torch.distributions.Normal(torch.tensor(2.0), torch.tensor(1.0))]"),
    "a parameter beside the model": Case("net.W.data.fill_(3)", "return x * W.detach()", "W = nn.Parameter(torch.tensor(2.0))"),
    "a super class's method": Case("net.SCALE = 3.0", "return Child().scaled(x)", "SCALE = 2.0\nclass Base:\n    def scaled(self, x): return x * SCALE\nclass Child(Base):\n    def scaled(self, x): return super().scaled(x)"),
    "a class that a function returns": Case("net.SCALE = 3.0", "return kind()()(x)", "SCALE = 2.0\ndef kind():\n    class K:\n        def __call__(self, x): return x * SCALE\n    return K"),
    "a tuple in a set": Case("net.ON.add((3.0, 1))", "return x * sum(a for a, _ in ON)", "ON = {(2.0, 1)}", told=False),
}  # fmt: skip
