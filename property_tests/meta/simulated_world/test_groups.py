# SPDX-License-Identifier: Apache-2.0
"""Ranks, meshes and groups of ranks."""

import torch.distributed as dist

from lossgate.worlds import RankContext

from .on_ranks import MakeWorld, healthy, of_rank


def test_ranks_know_who_they_are(make_world: MakeWorld) -> None:
    def who(context: RankContext) -> tuple[int, int, list[int], bool]:
        mesh = context.mesh
        assert mesh.mesh_dim_names == ("dp", "cp", "tp")
        return (
            dist.get_rank(),
            dist.get_world_size(),
            [mesh.get_local_rank(axis) for axis in ("dp", "cp", "tp")],
            dist.is_initialized(),
        )

    found = make_world("dp=2,tp=3").run(who)
    assert found == [(rank, 6, [rank // 3, 0, rank % 3], True) for rank in range(6)]
    assert not dist.is_initialized()  # the process itself has joined nothing


def test_subgroups(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> list[float]:
        mesh, rank = context.mesh, context.rank
        found: list[float] = []
        for group in (mesh.get_group("tp"), mesh["dp", "tp"]._flatten("dptp").get_group(), dist.new_group([1, 2])):
            if group is dist.GroupMember.NON_GROUP_MEMBER:
                continue
            x = of_rank(rank, 1)
            dist.all_reduce(x, group=group)
            found.append(x.item())
        return found

    assert make_world("dp=2,tp=2").run(body) == [[1, 6], [1, 6, 3], [5, 6, 3], [5, 6]]


def test_sixty_four_ranks(make_world: MakeWorld) -> None:
    assert healthy(make_world("dp=4,cp=4,tp=4"))
