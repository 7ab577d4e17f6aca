"""Mult-VAE, the step that trains it, and how recommendations are measured.

Source: Liang, Krishnan, Hoffman, Jebara, Variational autoencoders for collaborative filtering, 2018, arXiv:1802.05814.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from vae_data import HeldOut

AMP = {"none": torch.float32, "bf16": torch.bfloat16}
EVALUATED_USERS = 500  # number of users that are evaluated at a time
NDCG_AT, RECALL_AT = 100, (20, 50)


class MultVAE(nn.Module):
    """A network that maps users, (batch, columns) of zeros and ones, to logits of a multinomial over the columns."""

    def __init__(self, num_columns: int, hidden: int = 600, latent: int = 200, dropout: float = 0.5) -> None:
        super().__init__()
        self.dropout = dropout
        self.encoder = nn.Linear(num_columns, hidden)
        self.moments = nn.Linear(hidden, 2 * latent)
        self.decoder = nn.Linear(latent, hidden)
        self.logits = nn.Linear(hidden, num_columns)
        for layer in (self.encoder, self.moments, self.decoder, self.logits):
            nn.init.xavier_normal_(layer.weight)
            nn.init.trunc_normal_(layer.bias, std=0.001)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits (batch, columns), mean and log variance (batch, latent); in evaluation the code is the mean."""
        x = functional.dropout(functional.normalize(x), self.dropout, self.training)
        mean, log_variance = self.moments(torch.tanh(self.encoder(x))).chunk(2, 1)
        code = mean + torch.randn_like(mean) * torch.exp(log_variance / 2) if self.training else mean
        return self.logits(torch.tanh(self.decoder(code))), mean, log_variance

    def loss(self, x: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        """Return the negative log likelihood plus ``beta`` times the KL divergence, averaged over the batch."""
        logits, mean, log_variance = self(x)
        likelihood = (functional.log_softmax(logits.float(), 1) * x).sum(1)
        mean, log_variance = mean.float(), log_variance.float()
        divergence = (log_variance.exp() + mean.square() - log_variance - 1).sum(1) / 2
        return (beta * divergence - likelihood).mean()


class Trainer:
    """A network, its optimizer and one step of training.

    Parameters
    ----------
    num_columns : int
    device : torch.device
    lr : float
    beta : float
        Weight of the KL divergence at the end of annealing.
    anneal_updates : int
        Number of steps in which the weight would grow from 0 to 1.
    amp : {"none", "bf16"}
        Autocast.
    compile : bool
    seed : int
    """

    def __init__(
        self,
        num_columns: int,
        *,
        device: torch.device,
        lr: float,
        beta: float,
        anneal_updates: int,
        amp: str,
        compile: bool,
        seed: int,
    ) -> None:
        torch.manual_seed(seed)
        self.device, self._dtype = device, AMP[amp]
        self.network = MultVAE(num_columns).to(device)
        self._loss = torch.compile(self.network.loss) if compile else self.network.loss
        self._optimizer = torch.optim.Adam(self.network.parameters(), lr, fused=device.type == "cuda")
        self._largest_beta, self._anneal_updates = beta, anneal_updates
        self.beta = torch.zeros((), device=device)  # a tensor, because torch.compile would make a number constant
        self._total = torch.zeros((), device=device)
        self.num_updates = 0

    def autocast(self) -> torch.autocast:
        """Return a context for 16-bit matrix products if ``amp`` is set."""
        on = self._dtype != torch.float32
        return torch.autocast(self.device.type, self._dtype if on else None, on)

    def step(self, x: torch.Tensor) -> None:
        """Train on a batch without waiting for the device."""
        self.beta.fill_(min(self._largest_beta, self.num_updates / self._anneal_updates))
        with self.autocast():
            loss = self._loss(x, self.beta)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        self._total += loss.detach()
        self.num_updates += 1

    def take_total(self) -> float:
        """Return the sum of losses since the last call. Waits for the device."""
        total = float(self._total)
        self._total.zero_()
        return total

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.no_grad()
    def evaluate(self, held_out: HeldOut) -> dict[str, float]:
        """Return the metrics of the uncompiled network, because the smaller last batch would be compiled again."""
        self.network.eval()
        try:
            return evaluate(lambda shown: self.network(shown)[0], held_out, self.device)
        finally:
            self.network.train()


def evaluate(
    score: Callable[[torch.Tensor], torch.Tensor], held_out: HeldOut, device: torch.device | str
) -> dict[str, float]:
    """Return the mean of each metric over users, and its standard error as ``NAME_error``.

    Parameters
    ----------
    score : callable
        Maps (batch, columns) of zeros and ones to scores of all columns. Shown columns are never recommended.
    held_out : HeldOut
    device
    """
    found: dict[str, list[torch.Tensor]] = {}
    for first in range(0, len(held_out.shown), EVALUATED_USERS):
        last = min(first + EVALUATED_USERS, len(held_out.shown))
        shown, hidden = (rows.dense(first, last, device) for rows in (held_out.shown, held_out.hidden))
        scores = score(shown).float().masked_fill(shown > 0, -torch.inf)
        for name, values in ranking_metrics(scores, hidden).items():
            found.setdefault(name, []).append(values)
    result = {}
    for name, parts in found.items():
        values = torch.cat(parts).double()
        result[name] = float(values.mean())
        result[f"{name}_error"] = float(values.std(correction=0) / len(values) ** 0.5)
    return result


def ranking_metrics(scores: torch.Tensor, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return NDCG@100, Recall@20 and Recall@50 of each user, as the paper defines them: (batch,) each.

    Recall@k is divided by the smaller of k and the number of hidden columns; NDCG@k counts all hidden columns as
    equally relevant.

    Parameters
    ----------
    scores : (batch, columns) float
    hidden : (batch, columns) float
        1 for hidden columns; at least one per user.

    Examples
    --------
    >>> scores, hidden = torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[0.0, 1.0, 0.0]])
    >>> [round(float(value), 4) for value in ranking_metrics(scores, hidden).values()]
    [0.6309, 1.0, 1.0]
    """
    most = min(NDCG_AT, scores.shape[1])
    hits = hidden.gather(1, scores.topk(most).indices)
    num_hidden = hidden.sum(1).long()
    discounts = 1 / torch.log2(torch.arange(2, most + 2, device=scores.device))
    best = discounts.cumsum(0)[num_hidden.clamp(max=most) - 1]
    recalls = {f"recall@{k}": hits[:, :k].sum(1) / num_hidden.clamp(max=k) for k in RECALL_AT}
    return {f"ndcg@{NDCG_AT}": (hits * discounts).sum(1) / best, **recalls}
