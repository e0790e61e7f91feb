"""The channels of schedules: three to each peer, because posts and sends need separate semaphores."""

from __future__ import annotations

from collections.abc import Sequence

from proxyccl.channels.group import Group
from proxyccl.channels.schedules.memory import ScheduleSpan
from proxyccl.proxy.codec import Codec
from proxyccl.proxy.schedule import SchedulePost, ScheduleSend

_IDS = Codec[dict[int, list[int]]](dict[int, list[int]], 1 << 20, name="channel ids of schedules")
_KINDS = 3


class ScheduleLinks:
    """The channels of this rank's proxy that schedules use. All ranks make these channels together. Raises
    ResourceError if channel ids ran out.

    Attributes:
        posts: by peer, the channel on which both ranks post the addresses of their outputs.
        scratch_posts: by peer, the channel on which both ranks post addresses in scratch memory.
        sends: by peer, the channel on which both ranks send data.
    """

    def __init__(self, group: Group) -> None:
        peers = [peer for peer in range(group.world_size) if peer != group.rank]
        self.posts, self.scratch_posts, self.sends = schedule_channels(group, peers, _KINDS)

    def post(self, peer: int, place: ScheduleSpan) -> SchedulePost:
        """Returns a post that lets a peer write at `place`, which is in this rank's output."""
        return SchedulePost(self.posts[peer], place.memory.id_at(peer), place.offset)

    def send(
        self,
        peer: int,
        place: ScheduleSpan,
        nbytes: int,
        *,
        dst_offset: int = 0,
        gate: int = 0,
        gate_stage: int | None = None,
        stage: int | None = None,
        to_scratch: bool = False,
    ) -> ScheduleSend:
        """Returns a send of the bytes at `place` to the address in the output or scratch memory that the peer posts."""
        channels = self.scratch_posts if to_scratch else self.posts
        return ScheduleSend(
            self.sends[peer],
            place.memory.source_id(peer),
            place.offset,
            nbytes,
            post_channel=channels[peer],
            dst_offset=dst_offset,
            gate=gate,
            gate_stage=gate_stage,
            stage=stage,
        )


def schedule_channels(group: Group, peers: Sequence[int], kinds: int) -> list[dict[int, int]]:
    """Makes channels to some peers. Returns their ids by kind and peer. All ranks call this together. Raises
    ResourceError if channel ids ran out.

    Args:
        peers: other ranks, each of which names this rank among its peers.
        kinds: the number of channels to each peer.
    """
    links = group.links
    links.prepare(peers)
    own = {peer: [links.proxy.reserve_channel(links.connection(peer)) for _ in range(kinds)] for peer in peers}
    answers = group.exchange.all_gather(own, _IDS, "schedules")
    for peer in peers:
        for channel, theirs in zip(own[peer], answers[peer][group.rank], strict=True):
            word, handle = links.semaphore(peer, theirs), links.semaphore_handle(peer, theirs)
            links.proxy.set_channel(channel, links.connection(peer), word, handle=handle)
    return [{peer: own[peer][kind] for peer in peers} for kind in range(kinds)]
