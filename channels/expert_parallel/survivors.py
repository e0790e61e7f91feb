"""Expert ids in a layer whose group has lost ranks."""

from __future__ import annotations

import functools

import numpy as np

from proxyccl.channels.expert_parallel.config import NUMBER_DROPS
from proxyccl.channels.expert_parallel.options import LayerOptions
from proxyccl.channels.group import Group
from proxyccl.channels.memory import allocate
from proxyccl.device.kernel import Launch


class SurvivingExperts:
    """Renumbers expert ids over the remaining ranks, and drops those of lost ranks.

    Args:
        group: the remaining ranks.
        options: of the layer.
        grid: blocks of the kernel and their threads.

    Attributes:
        ids: the new ids of a dispatch, int32, of which one is under way at a time; a slot without an expert has an id
            that drops it, and a bad id -2.
    """

    def __init__(self, group: Group, options: LayerOptions, grid: tuple[int, int]) -> None:
        config, all_ranks, dropping = options.config, options.all_ranks, options.dropping_ids
        left = [rank for rank in range(all_ranks) if rank not in options.lost_ranks]
        numbers = np.full(all_ranks, -1, np.int32)
        numbers[left] = np.arange(len(left))
        self._numbers = allocate(group, numbers.shape, "int32").upload(numbers)
        self.ids = allocate(group, (config.max_tokens, config.topk), "int32")
        kernel = group.runtime.shipped("experts/survivors.h", "expert_survivors", compiled_only=options.use_aot)
        dropped = config.num_experts if dropping & NUMBER_DROPS else -1
        self._sizes = all_ranks, config.num_experts_per_rank, dropping, dropped
        self._prepare = functools.partial(kernel.prepare, *grid)

    def launch(self, id_bytes: int) -> Launch:
        """Its launch for ids of 4 or 8 bytes. Still to be filled in are their address (argument 0), that of the bool
        array of the slots that lost ranks had (3), and the number of slots (4).
        """
        return self._prepare(0, self._numbers.ptr, self.ids.ptr, 0, 0, id_bytes, *self._sizes)
