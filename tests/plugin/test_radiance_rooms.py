"""Lines for segments: all of them fit, few are left over, and numbers of lines recur."""

import torch

from ns_multigpu.plugin.radiance.rooms import KeptRooms, room_for


def test_room_is_enough_and_not_much_more() -> None:
    for count in (1, 7, 300, 5000, 8192):
        room = room_for(count, 8192)
        assert count <= room <= min(count + 2 * count**0.5 + 128, 8192)
    assert room_for(0, 8192) == 0
    assert room_for(48, 48) == 48 and room_for(1, 1) == 1


def test_rooms_of_random_rays_recur() -> None:
    g = torch.Generator().manual_seed(2)
    kept, seen = KeptRooms(8192), list[tuple[tuple[int, ...], ...]]()
    for _ in range(400):
        single = int((torch.rand(8192, generator=g) < 0.2).sum())
        double = int((torch.rand(8192, generator=g) < 0.6).sum())
        rooms = kept.of([[single, double]])
        assert single <= rooms[0][0] and double <= rooms[0][1]
        assert sum(rooms[0]) < 1.1 * (single + double + 500)
        seen.append(rooms)
    assert len(set(seen)) <= 4 and seen.count(max(seen, key=seen.count)) > 300


def test_a_room_serves_unless_it_is_too_small_or_far_too_large() -> None:
    kept = KeptRooms(1000)
    first = kept.of([[400], [500]])
    assert kept.of([[390], [510]]) == first
    assert kept.of([[100], [200]]) != first, "far too large"
    assert kept.of([[500], [400]]) != first, "too small for the first cell"
    assert kept.of([[399], [499]]) == first
