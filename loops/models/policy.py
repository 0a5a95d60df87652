"""A Hugging Face causal language model for objectives: a batch in, one log-prob per trained token out.

A probe tests at creation whether its head can be fused; if not, it falls back to full logits, with one log line.
"""

import logging
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...kernels import Backend, Extra, LogitTransform
from ..batch import Batch
from .backbone import Backbone
from .context_parallel import split_columns
from .lm_head import CannotFuse, Outputs, TeacherOutputs, from_logits, fuse, logit_transform, operands
from .probe import PROBE, choose_layout, objection
from .rows import Layout
from .scorer import Scorer
from .sharding import shard

log = logging.getLogger(__name__)

_CHUNK = 256  # tokens whose logits are held at once where all of them are needed


class Policy(Backbone):
    """A causal language model with a fused head, and the layout of its input.

    Args:
        model: a `transformers` causal language model, plain or wrapped by peft. Its head is fused in place: parameters,
            their names and the model's own ``forward`` stay as they are.
        layout: ``"auto"`` takes the first of shared, packed and padded in which this model keeps sequences apart.
        backend, keep_bytes: of `burnish.kernels.linear_logprob`.
        value_head: a module from hidden states [tokens, D] to values [tokens, 1], in the precision of its parameters,
            trained along with the model.
        critic: a model of its own for the values instead, trained along with this one.
        mesh, param_dtype: see `shard`. All ranks of the mesh make the policy, and call together what computes with
            it: forward, ``hidden``, ``model_output``, ``logits``, ``top_k`` and ``teacher_outputs``.

    Raises:
        ValueError: if sequences see each other in a layout that was named, or if there is a value head and the model's
            own head can't be fused.
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
        mesh: DeviceMesh | None = None,
        param_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, mesh=mesh, param_dtype=param_dtype)
        self.value_head, self.critic = value_head, critic
        if mesh is not None:
            shard(self, mesh, ("hidden", "model_output", "logits", "top_k", "_try_fusing"), param_dtype=param_dtype)
        reason = objection(self.plain, lambda: self._try_fusing(backend, keep_bytes))
        if reason is not None:
            log.warning("%s: log-probs are taken from full logits: %s", type(self.plain).__name__, reason)
        self.fused = reason is None
        if value_head is not None and not self.fused:
            name = type(self.plain).__name__
            raise ValueError(f"policy: the head of {name} can't be fused, and so no value head added")
        output = self.hidden if self.fused else self.model_output
        self.layout: Layout = choose_layout(self, layout, output)
        split_columns(self, output)

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
        teacher: TeacherOutputs | None = None,
    ) -> Outputs:
        """Log-prob, entropy and logsumexp of every trained token of the batch.

        Args:
            outputs: further outputs of `burnish.kernels.linear_logprob`.
            teacher: a teacher's outputs for these tokens, which give the divergence from it.
        """
        rows, target = self.arranged(batch.examples, self.layout), batch.target
        if (mine := rows.mine) is not None:
            target, teacher = target[mine], teacher and teacher.at(mine)
            temperature = temperature[mine] if isinstance(temperature, Tensor) and temperature.ndim else temperature
        value = None if self.critic is None else self.critic(batch)
        options: Any = {"target": target, "teacher": teacher, "temperature": temperature, "outputs": outputs}
        if self.fused:
            hidden = super().hidden(rows)  # its shards are gathered here already, and would be let go after it
            computed: Outputs = self.head(hidden, **options)
            if self.value_head is not None:
                with torch.autocast(hidden.device.type, enabled=False):  # values keep the precision of their head
                    states = hidden.to(next(self.value_head.parameters()).dtype)
                    value = self.value_head(states)[:, 0].clone()  # FSDP warns of views
        else:
            computed = from_logits(super().model_output(rows), **options)
        return self.gathered(Outputs(**{**computed._asdict(), "value": value}), rows)

    @torch.no_grad()
    def teacher_outputs(self, batch: Batch, *, beta: float, temperature: float, dense: bool = False) -> TeacherOutputs:
        """The distributions of this policy, as a teacher, at the trained tokens of the batch.

        Args:
            beta, temperature: of the divergence, see `burnish.kernels.linear_divergence`.
            dense: give logits, for a student whose head is not fused.
        """
        rows = self.arranged(batch.examples, self.layout)
        if dense or not self.fused:
            logits = self.logits(self.hidden(rows)) if self.fused else self.model_output(rows)
            return TeacherOutputs(beta, temperature, logits=self.gathered(logits, rows))
        hidden, head = self.gathered(self.hidden(rows), rows), operands(self.head, self.transform)
        return TeacherOutputs(beta, temperature, hidden=hidden, head=head)

    @torch.no_grad()
    def top_k(self, batch: Batch, *, k: int, temperature: float, vocab: int) -> tuple[Tensor, Tensor]:
        """Ids and log-probs [tokens, k] of the likeliest of the first ``vocab`` tokens, at every trained token."""
        rows = self.arranged(batch.examples, self.layout)
        chunks = []
        for states in torch.split(super().hidden(rows) if self.fused else super().model_output(rows), _CHUNK):
            logits = (self.head(states, exact_logits=True) if self.fused else states)[:, :vocab].float()
            chunks.append((logits / temperature).log_softmax(-1).topk(k))
        top = torch.cat([top.indices for top in chunks]), torch.cat([top.values for top in chunks])
        return self.gathered(top, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [tokens, V] of a fused head, in float32, as log-probs use them, without gradients."""
        logits: Tensor = self.head(hidden, exact_logits=True)
        return logits

    @torch.no_grad()
    def _try_fusing(self, backend: Backend, keep_bytes: int | None) -> str | None:
        """Fuse the head; returns the reason if it can't be fused."""
        rows = self.arranged(PROBE[:1], "padded")
        target = torch.tensor([4, 5, 6, 7, 5, 3, 2], device=self.device)
        try:
            if self.head is None:
                if not self.plain.can_generate():
                    raise ValueError(f"policy: wanted a causal language model, got {type(self.plain).__name__}")
                raise CannotFuse("it has no output embedding")
            if self.plain.base_model is self.plain:
                raise CannotFuse("transformers does not say what is below its head")
            with self.probing() as exact:
                logits, hidden = super().model_output(rows), super().hidden(rows)
                if getattr(self.head, "in_features", hidden.shape[1]) != hidden.shape[1]:
                    raise CannotFuse("its head reads something else than its last hidden state")
                fuse(self.head, self.transform, backend, keep_bytes)
                fused = self.head(hidden, target=target).logprob
            expected = logits.double().log_softmax(-1).gather(1, target[:, None])[:, 0]
            # The two may differ only by rounding of the logits, which some models convert to float32 after it.
            dtypes = {each.dtype for each in (logits, hidden, *self.head.parameters()) if each.is_floating_point()}
            eps = max(torch.finfo(dtype).eps for dtype in (dtypes if exact else dtypes | {torch.bfloat16}))
            tolerance = 8 * eps * logits.abs().max().double().clamp(min=1.0) + 1e-5
            if not torch.all((fused.double() - expected).abs() <= tolerance):
                raise CannotFuse("its logits are not a known function of its last hidden state")
        except CannotFuse as reason:
            return str(reason)
        return None
