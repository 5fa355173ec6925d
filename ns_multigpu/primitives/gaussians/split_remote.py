"""Split of a rank's new points into local and sent ones, with sources and destinations.

Between two refinements few points change owners. Local ones are gathered once, directly into their final rows; only the
others are packed and exchanged.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ns_multigpu.primitives.gaussians.index_map import Regrouping
from ns_multigpu.primitives.sharded_order import PointMove


@dataclass(frozen=True)
class RemoteSplit:
    """Regrouping split by the owner of the new points.

    Attributes:
        local: of all T final rows of this rank, in final order. Rows from other ranks are placeholder copies of the
            first old point.
        sent: of the rows for other ranks, in sending order.
        received_rows: [K] int64, the rows of `local` that other ranks send, in receiving order.
        send, receive: number of rows to and from each rank; 0 for this rank.
    """

    local: Regrouping
    sent: Regrouping
    received_rows: Tensor
    send: list[int]
    receive: list[int]

    @staticmethod
    def of(regrouping: Regrouping, move: PointMove, rank: int) -> "RemoteSplit":
        """Split the points of a rank.

        Args:
            regrouping: in sending order (`PointMove.in_sending_order`).
            move: see there.
        """
        place = torch.empty_like(move.order)
        place.scatter_(0, move.order, torch.arange(len(place), device=place.device))
        first, count, before = sum(move.send[:rank]), move.send[rank], sum(move.receive[:rank])
        own, others = place[before : before + count], torch.cat([place[:before], place[before + count :]])
        source = torch.zeros_like(place).scatter_(0, own, regrouping.source[first : first + count])
        none = regrouping.source[:0]
        sent = Regrouping(none, none, none, regrouping.offsets[:0])
        if move.moved == 0:
            local = Regrouping(source, own[regrouping.fresh], own[regrouping.children], regrouping.offsets)
        else:
            fresh, children = regrouping.fresh - first, regrouping.children - first
            fresh_here, born_here = ((rows >= 0) & (rows < count) for rows in (fresh, children))
            local = Regrouping(source, own[fresh[fresh_here]], own[children[born_here]], regrouping.offsets[born_here])
            sent_source = torch.cat([regrouping.source[:first], regrouping.source[first + count :]])
            fresh, children = regrouping.fresh[~fresh_here], regrouping.children[~born_here]
            fresh, children = (rows - count * (rows >= first) for rows in (fresh, children))
            sent = Regrouping(sent_source, fresh, children, regrouping.offsets[~born_here])
        send, receive = ([0 if other == rank else n for other, n in enumerate(of)] for of in (move.send, move.receive))
        return RemoteSplit(local, sent, others, send, receive)
