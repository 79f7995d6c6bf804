# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropies of the distribution that was sampled from: after temperature, top-k and top-p (nucleus) filtering.

Symbols: z logits, tau temperature, y label, K the kept tokens of a row.

    z' = z / tau
    top-k:  z'_v >= the k-th largest of the row
    top-p:  the probability of all tokens above v, renormalised over what top-k kept, is less than top_p
    log p(y) = z'_y - log sum_{v in K} exp(z'_v)  if y in K, else -inf;    H = - sum_{v in K} p_v log p_v

The order is that of vLLM, Hugging Face and NeMo-RL: temperature, top-k, top-p. The most probable token is always kept.
Ties: tokens with equal logits are kept or filtered together. So more than k may stay, as in all three originals; and all tokens that tie with the
least probable of the nucleus stay, whereas the originals, which sort, keep as many of those as they need, whichever the sort puts first.
K is a constant: the gradient flows through the kept logits only.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def filtered_token_logprobs(
    logits: Float[Tensor, "tokens vocab"],
    labels: Int[Tensor, " tokens"],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Float[Tensor, " tokens"]:
    """``log p(y)`` over the kept tokens; -inf, without a gradient, for a label that was filtered out.

    NeMo-RL replaces such a -inf by 0 and trains the token none the less (as if its ratio were 1); a loss must mask it.
    """
    keep, logprobs = _filtered_logprobs(logits, temperature, top_k, top_p)
    kept, of_label = (x.gather(-1, labels[:, None]).squeeze(-1) for x in (keep, logprobs))
    return torch.where(kept, of_label, -torch.inf)


def filtered_token_entropy(
    logits: Float[Tensor, "tokens vocab"],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Float[Tensor, " tokens"]:
    """``H`` in nats of the filtered distribution; 0 where one token is left."""
    keep, logprobs = _filtered_logprobs(logits, temperature, top_k, top_p)
    return -(logprobs.exp() * torch.where(keep, logprobs, 0.0)).sum(dim=-1)


def kept_tokens(
    tempered: Float[Tensor, "tokens vocab"], top_k: int | None = None, top_p: float = 1.0
) -> Bool[Tensor, "tokens vocab"]:
    """Which tokens of each row stay; ``tempered`` logits are already divided by the temperature. Those of -inf (a padded vocabulary) never do."""
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; expected a positive number of tokens, or None for all")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; expected a probability in (0, 1]")
    ordered = tempered.sort(dim=-1, descending=True).values
    keep = tempered > -torch.inf
    if top_k is not None and top_k < tempered.shape[-1]:
        least = ordered[:, top_k - 1 : top_k]
        keep = keep & (tempered >= least)
        ordered = torch.where(ordered >= least, ordered, -torch.inf)
    if top_p < 1:  # at 1 nothing goes, but rounding of the sum would drop some
        p = torch.softmax(ordered, dim=-1)
        above = p.cumsum(dim=-1) - p
        least = torch.where(above < top_p, ordered, torch.inf).amin(dim=-1, keepdim=True)
        keep = keep & (tempered >= least)
    return keep


def _filtered_logprobs(
    logits: Float[Tensor, "tokens vocab"], temperature: float, top_k: int | None, top_p: float
) -> tuple[Bool[Tensor, "tokens vocab"], Float[Tensor, "tokens vocab"]]:
    tempered = logits / temperature
    keep = kept_tokens(tempered, top_k, top_p)
    return keep, torch.log_softmax(torch.where(keep, tempered, -torch.inf), dim=-1)
