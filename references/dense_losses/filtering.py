# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropies after temperature, top-k and top-p (nucleus) filtering.

They belong to the distribution that a generation engine samples from. Symbols: z logits,
tau temperature, y label, K the set of tokens of a row that pass both filters.

    z' = z / tau
    top-k:    v passes if z'_v >= the k-th largest z' of the row
    top-p:    v passes if the probability of all tokens above v is less than top_p,
              where probabilities are renormalised over the tokens that passed top-k
    log p(y) = z'_y - log sum_{v in K} exp(z'_v)  if y in K, else -inf
    H        = - sum_{v in K} p_v log p_v

The order is that of vLLM, Hugging Face and NeMo-RL: temperature, top-k, top-p. The most probable
token always passes. K is a constant: the gradient flows through the logits in K only.

Ties: tokens with equal logits pass or fail as one. More than k tokens may therefore pass top-k, as
in all three originals. All tokens that tie with the least probable of the nucleus pass top-p; the
originals sort, and let only as many of these pass as they need, whichever the sort puts first.
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
    """Computes ``log p(y)`` of the filtered distribution.

    Args:
        logits: z ``[tokens, vocab]``.
        labels: y ``[tokens]``, indices into the vocabulary.
        temperature: tau, a positive number.
        top_k: How many tokens of each row pass top-k; None for all.
        top_p: The probability mass of the nucleus, in (0, 1]; 1 for all.

    Returns:
        The log-probability of each label ``[tokens]``, in nats. It is -inf, without a gradient, for
        a label that was filtered out. A loss must mask such a token: NeMo-RL replaces the -inf by 0
        and trains the token nonetheless, as if its ratio were 1.

    Raises:
        ValueError: if ``top_k`` or ``top_p`` is out of range.
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
    """Computes the entropy ``H`` of the filtered distribution.

    Args:
        logits: z ``[tokens, vocab]``.
        temperature: tau, a positive number.
        top_k: How many tokens of each row pass top-k; None for all.
        top_p: The probability mass of the nucleus, in (0, 1]; 1 for all.

    Returns:
        ``[tokens]``, in nats; 0 where a single token passes.

    Raises:
        ValueError: if ``top_k`` or ``top_p`` is out of range.
    """
    keep, logprobs = _filtered_logprobs(logits, temperature, top_k, top_p)
    return -(logprobs.exp() * torch.where(keep, logprobs, 0.0)).sum(dim=-1)


def kept_tokens(
    tempered: Float[Tensor, "tokens vocab"], top_k: int | None = None, top_p: float = 1.0
) -> Bool[Tensor, "tokens vocab"]:
    """Determines K, the tokens of each row that pass both filters.

    Args:
        tempered: z' ``[tokens, vocab]``, logits already divided by the temperature. A logit of -inf
            (a padded vocabulary) never passes.
        top_k: How many tokens of each row pass top-k; None for all.
        top_p: The probability mass of the nucleus, in (0, 1]; 1 for all.

    Returns:
        ``[tokens, vocab]``, true for tokens in K.

    Raises:
        ValueError: if ``top_k`` is below 1, or ``top_p`` is not in (0, 1].
    """
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
    if top_p < 1:  # at 1 every token passes, but the rounding of the sum would filter some
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
