"""What every registered method must fulfil; a new one is covered the moment its file exists."""

import inspect
from pathlib import Path

import pytest

from ssl_bench.checking import points
from ssl_bench.methods import METHODS

ROOT = Path(__file__).parents[2]
NAMES = METHODS.names()
TRAINABLE = [name for name in NAMES if METHODS.get(name).trainable]


@pytest.fixture(scope="module")
def dataset():
    return points.small_dataset()


@pytest.mark.parametrize("name", NAMES)
def test_method_has_an_oracle_test(name):
    path = ROOT / "tests" / "reference" / f"test_{name}.py"
    assert path.exists(), f"write {path.name} from the paper's equations"


@pytest.mark.parametrize("name", NAMES)
def test_constructor_arguments_are_keyword_only_typed_and_documented(name):
    cls = METHODS.get(name)
    parameters = list(inspect.signature(cls.__init__).parameters.values())[2:]
    for parameter in parameters:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.annotation is not inspect.Parameter.empty
        assert f"    {parameter.name}: " in (cls.__doc__ or ""), f"document {parameter.name} in the class's Args"


@pytest.mark.parametrize("name", TRAINABLE)
def test_recipes_name_their_source(name):
    for family, recipe in METHODS.get(name).recipes.items():
        assert family in ("small", "cifar", "imagenet")
        assert recipe.source


@pytest.mark.parametrize("name", NAMES)
def test_method_builds_and_its_configuration_survives_yaml(name, dataset):
    points.check_builds(name, dataset)


@pytest.mark.parametrize("name", TRAINABLE)
def test_loss_is_finite_and_reaches_exactly_the_declared_parameters(name, dataset):
    points.check_loss(name, dataset)


@pytest.mark.parametrize("name", NAMES)
def test_embedding_is_independent_of_batch_mates(name, dataset):
    points.check_embedding(name, dataset)
