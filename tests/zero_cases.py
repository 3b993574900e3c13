"""What tests of ZeRO have in common: shapes, values, gradients, node maps, and one interface to all four stages."""

from __future__ import annotations

import numpy as np

from hpczero.zero.config import ZeroConfig
from hpczero.zero.engine import Zero3Engine
from hpczero.zero.optimizer import ZeroOptimizer
from hpczero.zero.param_groups import ParamGroup

SHAPES = {"scalar": (), "none": (0,), "empty": (0, 4), "one": (1,), "five": (5,), "matrix": (37, 11), "long": (3001,)}
STAGES = (0, 1, 2, 3)


def node_maps(size):
    maps = [None, list(range(size)), [rank % 2 for rank in range(size)], [0, *[1] * (size - 1)]]
    if size == 5:
        maps.append([0, 0, 1, 1, 2])
    return maps[:1] if size == 1 else maps


def values(shapes, seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def gradients_of(params, seed, dtype):
    """A gradient that depends on the parameters, as a model's would: their values plus noise."""
    noise = values({name: value.shape for name, value in params.items()}, seed, np.float64)
    return {name: (0.5 * params[name] + noise[name]).astype(dtype) for name in params}


class OneParameter:
    """A layer for the engine with a single parameter, whose gradient the test decides."""

    def __init__(self, shape, source, name):
        self.shapes = {"w": shape}
        self._source, self._name = source, name

    def forward(self, params, x):
        self._source.seen[self._name] = np.array(params["w"])
        return x, None

    def backward(self, params, saved, dy):
        return dy, {"w": self._source.gradients[self._name]}


class Source:
    def __init__(self):
        self.seen, self.gradients = {}, {}


class Stage3:
    """The engine behind the methods of ZeroOptimizer that these tests use."""

    def __init__(self, params, optimizer, topology, config, groups=(), schedule=None):
        self._source = Source()
        self._params = params
        layers = [(name, OneParameter(value.shape, self._source, name)) for name, value in params.items()]
        full = {f"{name}.w": value for name, value in params.items()}
        groups = [ParamGroup(lambda name, shape, group=group: group.fits(name[:-2], shape), **group.settings)
                  for group in groups]
        self.engine = Zero3Engine(layers, full, optimizer, topology, config, groups=groups, schedule=schedule)

    @property
    def params(self):
        self.engine.forward(None, train=False)
        return dict(self._source.seen)

    def accumulate(self, gradients, weight=1.0):
        self.engine.forward(None)
        self._source.gradients = dict(gradients)
        self.engine.backward(None, weight)

    def step(self, lr=None):
        return self.engine.step(lr)

    def full_parameters(self):
        return {name[:-2]: value for name, value in self.engine.full_parameters().items()}

    def close(self):
        self.engine.close()

    def __getattr__(self, name):
        return getattr(self.engine, name)


def build(stage, params, optimizer, topology, groups=(), schedule=None, **settings):
    config = ZeroConfig(stage=stage, **settings)
    return (Stage3 if stage == 3 else ZeroOptimizer)(params, optimizer, topology, config, groups=groups, schedule=schedule)


def same_bits(one, other):
    return all(one[name].tobytes() == other[name].tobytes() for name in one) and one.keys() == other.keys()
