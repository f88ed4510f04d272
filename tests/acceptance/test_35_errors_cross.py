"""Row 35: own exceptions do not cross process borders. Here: each arrives in its own type, with its fields."""

import importlib
import pkgutil
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import ray

import actors
import collectives
import jobs
import placement
import zenray
from collectives.errors import ZenrayError

SAMPLES: Mapping[Any, Any] = {int: 7, float: 1.5, str: "words", bool: True, bytes: b"raw"}


def all_error_classes() -> list[type[ZenrayError]]:
    for room in (collectives, placement, actors, zenray, jobs):
        for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            if module.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:  # GPU modules may need what a machine without GPUs does not have
                if (error.name or "").partition(".")[0] not in ("cupy", "pynvml"):
                    raise

    def below(cls: type[ZenrayError]) -> Iterator[type[ZenrayError]]:
        yield cls
        for child in cls.__subclasses__():
            yield from below(child)

    return sorted(set(below(ZenrayError)), key=lambda cls: f"{cls.__module__}.{cls.__qualname__}")


def sample(annotation: Any) -> Any:
    """A value of a field's type."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in SAMPLES:
        return SAMPLES[annotation]
    if origin in (typing.Union, types.UnionType, typing.Literal):
        return arguments[0] if origin is typing.Literal else sample(arguments[0])
    if isinstance(origin, type) and issubclass(origin, typing.Mapping):
        return {sample(arguments[0]): sample(arguments[1])}
    if isinstance(origin, type) and issubclass(origin, typing.Iterable):
        return (sample(arguments[0]),)
    return "words"


def build(cls: type[ZenrayError]) -> ZenrayError:
    if cls.__init__ is Exception.__init__ or cls.__init__ is ZenrayError.__init__:
        return cls("what happened, with 3 numbers, and what to do")
    hints = typing.get_type_hints(cls.__init__)
    return cls(**{name: sample(kind) for name, kind in hints.items() if name != "return"})


class Thrower:
    def throw(self, error: ZenrayError) -> None:
        raise error

    def give(self, error: ZenrayError) -> ZenrayError:
        return error


@pytest.fixture(scope="module")
def thrower(ray_cluster: Mapping[str, str]) -> Iterator[Any]:
    actor = ray.remote(num_cpus=0)(Thrower).remote()
    yield actor
    ray.kill(actor)


@pytest.mark.parametrize("cls", all_error_classes(), ids=lambda cls: cls.__qualname__)
def test_35_every_error_arrives_with_its_fields(thrower: Any, cls: type[ZenrayError]) -> None:
    error = build(cls)
    with pytest.raises(cls) as caught:
        ray.get(thrower.throw.remote(error), timeout=30)
    cause = caught.value.cause  # type: ignore[attr-defined]
    returned = ray.get(thrower.give.remote(error), timeout=30)
    for arrived in (cause, returned):
        assert type(arrived) is cls
        assert str(arrived) == str(error)
        assert vars(arrived) == vars(error)


def test_35_the_list_is_not_empty() -> None:
    assert len(all_error_classes()) >= 15
