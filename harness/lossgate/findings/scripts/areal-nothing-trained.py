# SPDX-License-Identifier: Apache-2.0
"""The critic's loss of a batch without a trained token is NaN: 0 / 0.

Cause: areal/utils/functional/functional.py
    torch.where(loss_mask, value_loss, 0).sum() / loss_mask.count_nonzero()

The actor's loss bounds the same count by 1.
"""

import torch
from areal.utils.functional.functional import ppo_actor_loss_fn, ppo_critic_loss_fn

three, mask = torch.zeros(3), torch.zeros(3, dtype=torch.bool)
critic, _ = ppo_critic_loss_fn(three, three, three, 0.2, mask)
actor, _ = ppo_actor_loss_fn(three, three, three, three, 0.2, mask)
print("critic:", critic.item(), "actor:", actor.item())
raise SystemExit(bool(critic.isnan()))
