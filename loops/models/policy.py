"""A Hugging Face causal language model for objectives: a batch in, one log-prob per trained token
out.

A probe tests at creation whether its head can be fused; if not, it falls back to full logits, with
one log line.
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
from .images import ImageInputs
from .lm_head import (
    CannotFuse,
    Outputs,
    TeacherOutputs,
    from_logits,
    fuse,
    logit_transform,
    operands,
)
from .probe import choose_layout, objection, probe_examples
from .rows import Layout
from .scorer import Scorer
from .sharding import shard

log = logging.getLogger(__name__)

_CHUNK = 256  # tokens whose logits are held at once where all of them are needed


class Policy(Backbone):
    """A causal language model with a fused head, and the layout of its input.

    Args:
        model: a `transformers` causal language model, plain or wrapped by peft. Its head is fused
            in place: parameters, their names and the model's own ``forward`` stay as they are.
        layout: ``"auto"`` takes the first of shared, packed and padded in which this model keeps
            sequences apart.
        backend, keep_bytes: of `burnish.kernels.linear_logprob`.
        value_head: a module from hidden states [tokens, D] to values [tokens, 1], in the precision
            of its parameters, trained along with the model.
        critic: a model of its own for the values instead, trained along with this one.
        mesh, param_dtype: see `shard`. All ranks of the mesh make the policy, and call together
            what computes with it: forward, ``hidden``, ``model_output``, ``logits``, ``top_k`` and
            ``teacher_outputs``.
        images: reads the images of examples, for a vision-language model.

    Attributes:
        experts_per_token: of a mixture of experts; if set, routers' logits are an output, too. See
            `router_loss`.

    Raises:
        ValueError: if sequences see each other in a layout that was named, or if there is a value
            head and the model's own head can't be fused.
    """

    experts_per_token: int | None = None

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
        images: ImageInputs | None = None,
    ) -> None:
        super().__init__(model, mesh=mesh, param_dtype=param_dtype, images=images)
        self.value_head = value_head
        self.critic = critic
        if mesh is not None:
            shard(
                self,
                mesh,
                ("hidden", "model_output", "logits", "top_k", "_try_fusing"),
                param_dtype=param_dtype,
            )
        reason = objection(self.plain, lambda: self._try_fusing(backend, keep_bytes))
        if reason is not None:
            log.warning(
                "%s: log-probs are taken from full logits: %s", type(self.plain).__name__, reason
            )
        self.fused = reason is None
        if value_head is not None and not self.fused:
            name = type(self.plain).__name__
            raise ValueError(
                f"policy: the head of {name} can't be fused, and so no value head added"
            )
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
        rows = self.arranged(batch.examples, self.layout)
        target = batch.target
        if rows.mine is not None:  # this rank reads some of the tokens
            target = target[rows.mine]
            teacher = teacher and teacher.at(rows.mine)
            if isinstance(temperature, Tensor) and temperature.ndim:
                temperature = temperature[rows.mine]
        # A model of its own, with rows of its own: a scorer reads tokens at other positions.
        value = None if self.critic is None else self.critic(batch)
        router_logits = None
        if self.fused:
            # The base class's method: FSDP has gathered the weights already, and would let go of
            # them after its own.
            if self.experts_per_token is None:
                hidden = super().hidden(rows)
            else:
                hidden, router_logits = super().routed(rows)
            # The model's own module, whose ``forward`` `fuse` has replaced: hooks of DDP and FSDP
            # fire in a module.
            computed: Outputs = self.head(
                hidden, target=target, teacher=teacher, temperature=temperature, outputs=outputs
            )
            if self.value_head is not None:
                value = self._values(self.value_head, hidden)
        else:
            logits = super().model_output(rows)
            computed = from_logits(
                logits, target, teacher, temperature=temperature, outputs=outputs
            )
        fields = {
            **computed._asdict(),
            "value": value,
            "router_logits": router_logits,
        }  # torch 2.11 can't compile `_replace`
        return self.gathered(Outputs(**fields), rows)

    def _values(self, value_head: nn.Module, hidden: Tensor) -> Tensor:
        """[tokens], in the precision of the value head."""
        with torch.autocast(hidden.device.type, enabled=False):
            states = hidden.to(next(value_head.parameters()).dtype)
            values: Tensor = value_head(states)[:, 0].clone()  # FSDP warns of views
        return values

    @torch.no_grad()
    def teacher_outputs(
        self, batch: Batch, *, beta: float, temperature: float, dense: bool = False
    ) -> TeacherOutputs:
        """The distributions of this policy, as a teacher, at the trained tokens of the batch.

        Args:
            beta, temperature: of the divergence, see `burnish.kernels.linear_divergence`.
            dense: give logits, for a student whose head is not fused.
        """
        rows = self.arranged(batch.examples, self.layout)
        if self.fused and not dense:
            hidden = self.gathered(self.hidden(rows), rows)
            head = operands(self.head, self.transform)
            return TeacherOutputs(beta, temperature, hidden=hidden, head=head)
        logits = self.logits(self.hidden(rows)) if self.fused else self.model_output(rows)
        return TeacherOutputs(beta, temperature, logits=self.gathered(logits, rows))

    @torch.no_grad()
    def top_k(
        self, batch: Batch, *, k: int, temperature: float, vocab: int
    ) -> tuple[Tensor, Tensor]:
        """Ids and log-probs [tokens, k] of the likeliest of the first ``vocab`` tokens, at every
        trained token.
        """
        rows = self.arranged(batch.examples, self.layout)
        states = super().hidden(rows) if self.fused else super().model_output(rows)
        ids, logps = [], []
        for chunk in torch.split(states, _CHUNK):
            logits = self.head(chunk, exact_logits=True) if self.fused else chunk
            tempered = logits[:, :vocab].float() / temperature
            top = tempered.log_softmax(-1).topk(k)
            ids.append(top.indices)
            logps.append(top.values)
        return self.gathered((torch.cat(ids), torch.cat(logps)), rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [tokens, V] of a fused head, in float32, as log-probs use them, without
        gradients.
        """
        logits: Tensor = self.head(hidden, exact_logits=True)
        return logits

    @torch.no_grad()
    def _try_fusing(self, backend: Backend, keep_bytes: int | None) -> str | None:
        """Fuse the head; returns the reason if it can't be fused."""
        probed = probe_examples(self)[:1]
        rows = self.arranged(probed, "padded")
        completions = probed[0].completions
        target = torch.tensor([*completions[0], *completions[1]], device=self.device)
        try:
            self._check_head()
            with self.probing() as exact:
                logits = super().model_output(rows)
                hidden = super().hidden(rows)
                if getattr(self.head, "in_features", hidden.shape[1]) != hidden.shape[1]:
                    raise CannotFuse("its head reads something else than its last hidden state")
                fuse(self.head, self.transform, backend, keep_bytes)
                fused = self.head(hidden, target=target).logprob
            expected = logits.double().log_softmax(-1).gather(1, target[:, None])[:, 0]
            # The two may differ only by rounding of the logits, which some models convert to
            # float32 after it.
            rounded = [logits, hidden, *self.head.parameters()]
            dtypes = {each.dtype for each in rounded if each.is_floating_point()}
            if not exact:
                dtypes.add(torch.get_autocast_dtype(self.device.type))
            eps = max(torch.finfo(dtype).eps for dtype in dtypes)
            # 8 roundings of the largest logit: of its factors, its sum, its scale and cap, in each
            # of the two.
            tolerance = 8 * eps * logits.abs().max().double().clamp(min=1.0) + 1e-5
            if not torch.all((fused.double() - expected).abs() <= tolerance):
                raise CannotFuse("its logits are not a known function of its last hidden state")
        except CannotFuse as reason:
            return str(reason)
        return None

    def _check_head(self) -> None:
        """Raise unless the model has a head, and says what is below it.

        Raises:
            CannotFuse: if it has no such parts.
            ValueError: if the model is no causal language model.
        """
        if self.head is None:
            if not self.plain.can_generate():
                raise ValueError(
                    f"policy: wanted a causal language model, got {type(self.plain).__name__}"
                )
            raise CannotFuse("it has no output embedding")
        if self.plain.base_model is self.plain:
            raise CannotFuse("transformers does not say what is below its head")
