"""A Hugging Face causal model as objectives see it: a batch in, one log-prob per trained token out.

Whether its head fuses is tried out on a probe when the policy is made; a head that does not falls back, with one log
line, to full logits.
"""

import logging
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels import Backend, Extra, LogitTransform, TopK, logits_logprob
from ..batch import Batch
from .backbone import PROBE, Backbone, evaluating
from .inputs import Layout
from .lm_head import CannotFuse, TeacherOutputs, fuse, logit_transform, operands
from .probe import objection
from .scorer import Scorer

log = logging.getLogger(__name__)

_CHUNK = 256  # tokens whose logits are held at once where all of them are needed


class Outputs(NamedTuple):
    """What one forward pass says of every trained token, each [tokens]."""

    logprob: Tensor
    entropy: Tensor
    logsumexp: Tensor
    mean_logprob: Tensor | None = None  # over the vocabulary, and log Σ_v p_v², where they are asked for
    log_sum_squares: Tensor | None = None
    top1: Tensor | None = None  # the likeliest token, and how many are likelier than this one, where they are asked for
    rank: Tensor | None = None
    top_k: TopK | None = None
    value: Tensor | None = None  # of the state that the token is chosen in, where the policy has values
    divergence: Tensor | None = None  # from the teacher, where there is a lesson


class Policy(Backbone):
    """The model, its fused head, and the rows that it is given.

    Args:
        model: a `transformers` causal language model, plain or wrapped by peft. Its head is taught to fuse in place;
            its parameters, their names and its own ``forward`` stay as they are.
        layout: ``"auto"`` takes the first of shared, packed and padded rows that this model is shown to keep apart.
        backend, keep_bytes: of `burnish.kernels.linear_logprob`.
        value_head: a module from hidden states [tokens, D] to values [tokens, 1], trained along with the model.
        critic: the values come from a model of their own instead, which is trained along with this one.

    Raises:
        ValueError: if a named layout lets this model's sequences see each other, or if there is a value head and the
            model's own head can't be fused.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layout: Layout | Literal["auto"] = "auto",
        backend: Backend = "auto",
        keep_bytes: int | None = None,
        value_head: nn.Module | None = None,
        critic: Scorer | None = None,
    ) -> None:
        super().__init__(model)
        self.value_head, self.critic = value_head, critic
        reason = objection(self.plain, lambda: self._try_fusing(backend, keep_bytes))
        if reason is not None:
            log.warning("%s: log-probs are taken from full logits: %s", type(self.plain).__name__, reason)
        self.fused = reason is None
        if value_head is not None and not self.fused:
            raise ValueError(
                f"policy: the head of {type(self.plain).__name__} can't be fused, and so no value head added"
            )
        self.layout: Layout = self.choose_layout(layout, self.hidden if self.fused else self.own_output)

    @property
    def has_values(self) -> bool:
        return self.value_head is not None or self.critic is not None

    @property
    def head(self) -> Any:
        return self.plain.get_output_embeddings()

    @property
    def transform(self) -> LogitTransform:
        return logit_transform(self.plain.config.get_text_config())

    def forward(
        self,
        batch: Batch,
        *,
        temperature: float | Tensor = 1.0,
        outputs: tuple[Extra, ...] = (),
        lesson: TeacherOutputs | None = None,
    ) -> Outputs:
        """Log-prob, entropy and logsumexp of every trained token of the batch, and what is asked for beside them.

        Args:
            outputs: further ones of `burnish.kernels.linear_logprob`.
            lesson: what a teacher says of these tokens, for the divergence from it.
        """
        rows = self.arranged(batch.examples, self.layout)
        how: dict[str, Any] = {"temperature": temperature, "outputs": outputs}
        value = None if self.critic is None else self.critic(batch).score
        divergence = None
        if self.fused:
            hidden = self.hidden(rows)
            logprobs = self.head(hidden, target=batch.target, **how)
            if self.value_head is not None:
                value = self.value_head(hidden)[:, 0]
            if lesson is not None:
                # A teacher whose own head is no linear map can only be met with logits.
                fused = lesson.logits is None
                divergence = (
                    self.head(hidden, lesson=lesson).divergence if fused else lesson.divergence(self._logits(hidden))
                )
        else:
            logits = self.own_output(rows)
            logprobs = logits_logprob(logits, batch.target, **how)
            if lesson is not None:
                divergence = lesson.divergence(logits)
        answers = {name: answer for name, answer in logprobs._asdict().items() if name in Outputs._fields}
        return Outputs(**answers, value=value, divergence=divergence)

    @torch.no_grad()
    def lesson(self, batch: Batch, *, beta: float, temperature: float, dense: bool = False) -> TeacherOutputs:
        """What this policy, as a teacher, predicts for the trained tokens of the batch.

        Args:
            beta, temperature: of the divergence, see `burnish.kernels.linear_divergence`.
            dense: give logits, for a student that can't do with less.
        """
        rows = self.arranged(batch.examples, self.layout)
        if not self.fused:
            return TeacherOutputs(beta, temperature, logits=self.own_output(rows))
        if dense:
            return TeacherOutputs(beta, temperature, logits=self.logits(self.hidden(rows)))
        return TeacherOutputs(beta, temperature, hidden=self.hidden(rows), head=operands(self.head, self.transform))

    @torch.no_grad()
    def top_k(self, batch: Batch, *, k: int, temperature: float, vocab: int) -> tuple[Tensor, Tensor]:
        """Ids and log-probs [tokens, k] of the likeliest of the first ``vocab`` tokens, at every trained token."""
        rows = self.arranged(batch.examples, self.layout)
        found = []
        for part in torch.split(self.hidden(rows) if self.fused else self.own_output(rows), _CHUNK):
            logits = (self.logits(part) if self.fused else part)[:, :vocab].float()
            found.append((logits / temperature).log_softmax(-1).topk(k))
        return torch.cat([best.indices for best in found]), torch.cat([best.values for best in found])

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, V] in float32, without gradients, of hidden states [tokens, D]: those that log-probs are made of.

        Only where the head is fused.
        """
        logits: Tensor = self.head(hidden, exact_logits=True)
        return logits

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.transform(self.head(hidden))
        return logits

    @torch.no_grad()
    def _try_fusing(self, backend: Backend, keep_bytes: int | None) -> str | None:
        """Fuse the head; returns why it can't be relied on, if so."""
        rows = self.arranged(PROBE[:1], "padded")
        target = torch.tensor([4, 5, 6, 7, 5, 3, 2], device=self.device)
        try:
            if self.head is None:
                raise CannotFuse("it has no output embedding")
            with evaluating(self.model):
                logits = self.own_output(rows)
                fuse(self.head, self.transform, backend, keep_bytes)
                fused = self.head(self.hidden(rows), target=target).logprob
            expected = logits.double().log_softmax(-1).gather(1, target[:, None])[:, 0]
            # Rounding of the logits to their own dtype is the only difference there may be.
            tolerance = 8 * torch.finfo(logits.dtype).eps * logits.abs().max().double().clamp(min=1.0) + 1e-5
            if not torch.all((fused.double() - expected).abs() <= tolerance):
                raise CannotFuse("its logits are not a known function of its last hidden state")
        except CannotFuse as reason:
            return str(reason)
        return None
