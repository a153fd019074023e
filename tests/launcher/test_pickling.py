"""Pickling of functions: they name their file in the other process too."""

import pickle
import traceback

from cloudpickle import Pickler as Cloudpickler

from lockstep.launcher.pickling import Pickler, dumps


def outer():
    def inner():
        raise ValueError("inner")

    inner()


def test_functions_sent_by_value_keep_their_file():
    copy = pickle.loads(dumps(outer))
    assert copy is not outer
    assert copy.__code__.co_filename == __file__
    try:
        copy()
    except ValueError as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
    assert [(each.filename, each.name) for each in frames] == [
        (__file__, "outer"),
        (__file__, "inner"),
    ]
    assert frames[-1].line == 'raise ValueError("inner")'


def test_a_copy_differs_from_its_function_in_nothing():
    assert pickle.loads(dumps(outer)).__code__ == outer.__code__


def test_pickles_of_cloudpickle_itself_stay_as_they_are():
    assert Pickler.dispatch_table is not Cloudpickler.dispatch_table
    assert Cloudpickler.dispatch_table == Pickler.dispatch_table.parents
