"""The sequence of views: each once an epoch, the same for every batch size."""

from types import SimpleNamespace
from typing import Any

import pytest
from nerfstudio.data.datamanagers.full_images_datamanager import FullImageDatamanager, FullImageDatamanagerConfig

from ns_multigpu.core.assign.view_sequence import ViewSequence
from ns_multigpu.core.random import keyed_generator, keyed_permutation, seed_from


def test_each_view_once_an_epoch_for_every_batch_size() -> None:
    alone = [ViewSequence(7, seed=3).batch(step, 1)[0] for step in range(42)]
    for size in (2, 3, 6):
        sequence = ViewSequence(7, seed=3)
        together = [view for step in range(42 // size) for view in sequence.batch(step, size)]
        assert together == alone
    for epoch in range(6):
        assert sorted(alone[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert len({tuple(alone[7 * e : 7 * e + 7]) for e in range(6)}) > 1
    assert alone != [ViewSequence(7, seed=4).batch(step, 1)[0] for step in range(42)]


def test_any_position_at_any_time() -> None:
    forwards = [ViewSequence(5, seed=8).at(position) for position in range(60)]
    sequence = ViewSequence(5, seed=8)
    for position in (59, 0, 31, 30, 58, 12, 44, 3):
        assert sequence.at(position) == forwards[position]
    assert [sequence.at(position) for position in range(60)] == forwards


def test_the_order_is_that_of_nerfstudio() -> None:
    """Return the views that the datamanager's own method draws, one epoch after the other."""
    config = FullImageDatamanagerConfig(train_cameras_sampling_seed=11)
    nerfstudio: Any = SimpleNamespace(config=config, train_dataset=range(9))
    drawn = [view for _ in range(12) for view in FullImageDatamanager.sample_train_cameras(nerfstudio)]
    sequence = ViewSequence(9, seed=11)
    assert [sequence.at(position) for position in range(len(drawn))] == drawn


def test_drawn_epochs_of_any_length() -> None:
    epochs = [[2, 0], [1, 2, 0], [0], [1, 1]]
    left = list(epochs)
    sequence = ViewSequence(3, seed=0, draw=lambda: left.pop(0))
    assert [sequence.at(i) for i in range(8)] == [2, 0, 1, 2, 0, 0, 1, 1]


def test_no_views() -> None:
    with pytest.raises(ValueError, match="without views"):
        ViewSequence(0, seed=0)


def test_keys() -> None:
    assert seed_from(1, "a", 2) == seed_from(1, "a", 2)
    assert len({seed_from(1, "a"), seed_from("1", "a"), seed_from(1, "b"), seed_from(11, "a")}) == 4
    assert keyed_permutation(9, 1) == keyed_permutation(9, 1) != keyed_permutation(9, 2)
    assert keyed_generator(5).initial_seed() == seed_from(5)
