"""What a start has made is kept from the garbage collector."""

import gc

from meta_executor.supervise.lasting import set_apart_what_lasts


def test_what_is_there_is_looked_at_no_more_and_what_comes_is():
    """Garbage that was there is gone before; a circle that is made later is still found."""

    class Circle:
        ended = 0

        def __init__(self):
            self.itself = self

        def __del__(self):
            Circle.ended += 1

    try:
        Circle()
        set_apart_what_lasts()
        assert Circle.ended == 1
        assert gc.get_freeze_count() > 10_000 > len(gc.get_objects())
        Circle()
        gc.collect()
        assert Circle.ended == 2
    finally:
        gc.unfreeze()
