"""Families of sections: to define a class is to register it, also in a file of the user's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError

from rlhf.config.files import format_yaml
from rlhf.config.load import load_train, validate
from rlhf.config.sections import OnlineConfig
from rlhf.errors import ConfigError
from rlhf.plugins import as_settings, load_plugins, plugin_of, plugins_in
from rlhf.section import Choice, Facts, OneOf, Section, Usual, description, rules_of, walk


class Shape(Choice):
    """A shape."""


class Round(Shape):
    """A shape without corners: not a member, since it has no type."""


class Circle(Round):
    """A circle."""

    type: Literal["circle"] = "circle"
    radius: Annotated[
        float,
        Field(gt=0),
        Usual(low=0.5, high=2.0, rule="radius", reason="Circles are small.", source="Euclid", fix="radius=1"),
    ] = 1.0
    """In metres."""


class Square(Shape):
    """A square."""

    type: Literal["square"] = "square"
    side: float = 1.0
    """In metres."""


class Drawing(Section):
    """A drawing."""

    plugins: list[str] = []
    """Files."""
    shape: Annotated[Shape, OneOf("circle")] = Circle()
    """Its first shape."""
    others: list[Annotated[Round, OneOf()]] = []
    """Its other shapes."""


def test_a_member_is_chosen_by_its_type_and_the_default_needs_none() -> None:
    drawing = Drawing.model_validate({"shape": {"radius": 2}, "others": [{"type": "circle"}]})
    assert drawing == Drawing(shape=Circle(radius=2), others=[Circle()])
    assert Drawing.model_validate({"shape": {"type": "square"}}).shape == Square()
    assert list(Shape.choices()) == ["circle", "square"]
    assert list(Round.choices()) == ["circle"]


@pytest.mark.parametrize(
    "tree, message",
    [
        ({"shape": {"type": "squere"}}, "shape.type: 'squere' is not one of circle, square; did you mean square?"),
        ({"others": [{"type": "square"}]}, "others.0.type: 'square' is not one of circle"),
        ({"others": [{}]}, "others.0: set its type, one of circle"),
        ({"shape": {"type": "circle", "radios": 1}}, "shape.radios: unknown key; did you mean radius?"),
        ({"shape": {"type": "circle", "radius": 0}}, "shape.radius: Input should be greater than 0"),
        ({"shape": {"type": "square", "radius": 1}}, "shape.radius: unknown key"),
    ],
)
def test_a_mistake_is_explained_with_the_key_and_the_choices(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        validate(Drawing, tree)
    assert message in str(raised.value)


def test_the_type_is_written_even_where_it_was_not_set() -> None:
    drawing = Drawing(shape=Square(), others=[Circle(radius=2)])
    assert drawing.model_dump(mode="json", exclude_unset=True) == {
        "shape": {"type": "square"},
        "others": [{"type": "circle", "radius": 2.0}],
    }
    assert Drawing.model_validate(drawing.model_dump(mode="json")) == drawing


def test_the_docstring_of_a_field_is_read_from_the_class_that_defines_it() -> None:
    class Dot(Circle):
        """A small circle."""

        radius: float = 0.1

        color: str = "red"
        """Its color,

        in words."""

    assert description(Circle, "radius") == "In metres."
    assert (description(Dot, "radius"), description(Dot, "color")) == ("", "Its color,\n\nin words.")
    assert description(Dot, "type") == ""


def test_a_type_belongs_to_one_class() -> None:
    with pytest.raises(TypeError, match="type 'square' of Other is taken by"):

        class Other(Shape):
            """Another square."""

            type: Literal["square"] = "square"

    assert Shape.choices()["square"] is Square


def test_usual_ranges_are_rules_of_the_field() -> None:
    drawing = Drawing(shape=Circle(radius=3), others=[Circle(radius=1)])
    values = {
        (path, rule.name): rule.violation(section, Facts())
        for path, section in walk(drawing)
        for rule in rules_of(type(section))
    }
    assert values == {("shape", "radius"): 3.0, ("others.0", "radius"): None}


TRIANGLE = """
from typing import Literal
from test_registry import Shape

class Triangle(Shape):
    "A triangle."
    type: Literal["triangle"] = "triangle"
"""


def test_a_file_of_the_users_adds_a_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "test_registry", sys.modules[__name__])
    monkeypatch.setattr(Shape, "members", dict(Shape.members))
    file = tmp_path / "triangle.py"
    file.write_text(TRIANGLE)
    load_plugins({"plugins": [str(file)]})
    load_plugins({"plugins": [str(file)]})  # a second configuration of the same process
    triangle = Drawing.model_validate({"shape": {"type": "triangle"}}).shape
    assert type(triangle).__name__ == "Triangle"
    assert plugin_of(type(triangle)) == str(file)
    assert plugin_of(Square) == __file__
    assert plugins_in({"a": [triangle, {"b": triangle}]}) == [str(file)]
    assert as_settings({"a": [triangle]}) == {"a": [{"type": "triangle"}]}


@pytest.mark.parametrize(
    "plugins, message",
    [
        ("losses.py", "plugins: give a list of files and modules, as in plugins: \\[losses.py\\]"),
        (["losses.py"], "no plug-in file 'losses.py'"),
        (["no_such_module"], "no module 'no_such_module'"),
    ],
)
def test_a_plugin_that_is_not_there_is_named(plugins: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_plugins({"plugins": plugins})


def test_an_unknown_member_is_no_instance() -> None:
    with pytest.raises(ValidationError):
        Drawing(shape=3)  # type: ignore[arg-type]


def test_an_advantage_of_a_plugin_keeps_the_settings_that_it_reads(tmp_path: Path) -> None:
    """The file is merged with the command line, which names an advantage that only the plug-in knows."""
    plugin, file = tmp_path / "own_gae.py", tmp_path / "run.yaml"
    plugin.write_text(OWN_GAE)
    train = {
        "plugins": [str(plugin)],
        "algorithm": {"preset": "ppo", "value_loss": {"clip_eps": 0.3}},
        "policy": {"model": "m"},
        "data": {"prompts": {"path": "p"}},
        "reward": {"source": {"type": "model", "path": "r"}},
    }
    file.write_text(format_yaml(train))
    config = load_train(file, ["algorithm.advantage.type=own_gae"])
    assert isinstance(config, OnlineConfig)
    assert config.algorithm.value_loss is not None
    assert config.algorithm.value_loss.clip_eps == 0.3


OWN_GAE = """
from typing import Literal
from rlhf.algorithms.gae import Gae

class OwnGae(Gae):
    \"\"\"GAE by another name.\"\"\"

    type: Literal["own_gae"] = "own_gae"
"""
