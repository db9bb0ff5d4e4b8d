"""The names of the source: the field's words, and one thing a name."""

import ast
import re
from collections import Counter

from tests.test_house import FILES, REPOSITORY

OWN_WORDS = {"told", "tell", "said", "asked", "leads", "afresh", "begun", "whole", "sound", "lacks", "fate", "strike",
             "beat", "outside", "drift", "here", "spelled", "verdict"}
"""Words of our own, for which the field has others: reported, request, is_rank_zero, from_scratch, valid, status."""
OF_LIBRARIES = {"tell"}
"""Identifiers with such words that are not ours: `file.tell()`."""
NAMED = {ast.Name: "id", ast.Attribute: "attr", ast.FunctionDef: "name", ast.ClassDef: "name", ast.arg: "arg",
         ast.keyword: "arg", ast.alias: "asname"}
TREES = {path: ast.parse(path.read_text()) for path in FILES}


def identifiers():
    """(file, identifier) of all names in the source."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if (field := NAMED.get(type(node))) is not None and (name := getattr(node, field)):
                yield str(path.relative_to(REPOSITORY)), name


def words(name):
    """The words of an identifier in lower case: NamedRun and named_run have two."""
    return re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower())


def test_names_use_the_field_s_words():
    assert {(file, name) for file, name in identifiers() if OWN_WORDS.intersection(words(name))
            and name not in OF_LIBRARIES} == set()


def test_few_things_are_called_found():
    assert sum("found" in words(name) for _, name in identifiers()) <= 30


def test_every_class_has_a_name_of_its_own():
    classes = Counter(node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in classes.items() if count > 1] == []


def test_a_tuple_is_assigned_where_things_belong_together():
    """Most are for a pair such as offset and size; others get a line each."""
    assert sum(isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
               and isinstance(node.value, ast.Tuple) for tree in TREES.values() for node in ast.walk(tree)) <= 400
