"""The contract of `burnish.loops.rollouts.source.RolloutSource` as tests that any source must pass.

    class TestMine(Conformance):
        async def open(self):
            return Subject(source=..., model=..., weights=...)

`open` is called in the event loop of each test; a fixture that the subclass needs (a server, say)
can be kept on ``self`` by an autouse fixture.
"""

import asyncio
import copy
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from burnish.loops.rollouts.sample import Request, SamplingParams, check_sample
from burnish.loops.rollouts.source import RolloutSource, SourceError
from torch import Tensor, nn

KEY = 7
REFUSED = (ValueError, SourceError)


@dataclass
class Subject:
    """A source that draws from version 1, and what it should be drawing from.

    Attributes:
        model: a `transformers` causal model apart from the source, which weights are loaded into to
            check log-probs.
        weights: ``weights(version)`` by the names that `transformers` gives them; other numbers for
            every version.
        tolerance: of log-probs.
        rounding: of cumulative probabilities; two tokens may be drawn by numbers that are closer to
            the border between them. 0 where the same request is to give the same bits.
        vocab: ids below it may be drawn.
        context: the longest prompt and completion together; None where nothing limits them.
        restart: makes the source lose its weights, as a crash does; None where it can't.
        before_publish: ``before_publish(weights)``, for a source that draws from the trainer's own
            module.
        long: enough tokens for a completion to be under way while weights are published.
        draws: completions of one token for the test of their distribution.
    """

    source: RolloutSource
    model: nn.Module
    weights: Callable[[int], Mapping[str, Tensor]]
    vocab: int
    tolerance: float = 1e-4
    rounding: float = 0.0
    context: int | None = None
    restart: Callable[[], Awaitable[None]] | None = None
    before_publish: Callable[[Mapping[str, Tensor]], None] = lambda weights: None
    long: int = 120
    draws: int = 2000
    patience: float = 30.0
    references: dict[int, nn.Module] = field(default_factory=dict)

    async def publish(self, version):
        weights = self.weights(version)
        self.before_publish(weights)
        await self.source.publish(iter(weights.items()), version)

    def log_probs(self, version, prompt, tokens=()):
        """[len(tokens) + 1, vocab]: log-probs at temperature 1 of what follows the prompt and each
        of the tokens.
        """
        return self.logits(version, prompt, tokens).log_softmax(-1)

    @torch.no_grad()
    def logits(self, version, prompt, tokens=()):
        """The same before the softmax."""
        if version not in self.references:
            self.references[version] = copy.deepcopy(self.model).eval()
            weights = {
                name: tensor.to(self.model.dtype) for name, tensor in self.weights(version).items()
            }
            odd = self.references[version].load_state_dict(weights, strict=False)
            assert not odd.unexpected_keys, "weights must have the names of the model"
        reference = self.references[version]
        logits = reference(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[
            0, len(prompt) - 1 :
        ]
        return logits[:, : self.vocab].double()

    def check_same(self, got, wanted):
        """The same tokens; where probabilities are rounded, up to the first whose number is as good
        as on a border.
        """
        for a, b in zip(got, wanted, strict=True):
            if a.tokens == b.tokens or not self.rounding:
                assert a.tokens == b.tokens
                continue
            end = next(
                i
                for i, (mine, yours) in enumerate(zip(a.tokens, b.tokens, strict=False))
                if mine != yours
            )
            low, high = sorted((a.tokens[end], b.tokens[end]))
            cumulative = self.log_probs(1, a.prompt, a.tokens[:end])[-1].exp().cumsum(-1)
            assert cumulative[high - 1] - cumulative[low] <= self.rounding, (
                "another token was drawn"
            )


def penalized(logits, prompt, tokens, penalty):
    """The logits of the tokens of a completion, each with what was seen before it made smaller."""
    rows = []
    for count, row in enumerate(logits):
        seen = torch.tensor(sorted({*prompt, *tokens[:count]}))
        values = row[seen]
        smaller = torch.where(values > 0, values / penalty, values * penalty)
        rows.append(row.index_put((seen,), smaller))
    return torch.stack(rows)


def drawn_from(log_probs, sampling):
    """The log-probs of the distribution that `SamplingParams` describes, written out one row at a
    time.
    """
    rows = []
    for row in log_probs:
        if sampling.temperature == 0:
            rows.append(row)
            continue
        row = (row / sampling.temperature).log_softmax(-1)
        ids = row.argsort(descending=True)
        ids = ids[row[ids] >= row.max() + math.log(sampling.min_p or 1e-300)]
        if sampling.top_k:
            ids = ids[: sampling.top_k]
        before = row[ids].softmax(-1).cumsum(0) - row[ids].softmax(-1)
        ids = ids[before < sampling.top_p]
        rows.append(torch.full_like(row, -torch.inf).index_put((ids,), row[ids].log_softmax(-1)))
    return torch.stack(rows)


def with_subject(test):
    """Run ``async def test(self, subject, ...)`` in an event loop of its own; the source is closed
    and nothing left.
    """

    def run(self, **arguments):
        async def body():
            subject = await self.open()
            try:
                await test(self, subject, **arguments)
            finally:
                await subject.source.close()
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left after close()"

        asyncio.run(body())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    run.pytestmark = getattr(test, "pytestmark", [])
    signature = inspect.signature(test)
    run.__signature__ = signature.replace(
        parameters=[p for n, p in signature.parameters.items() if n != "subject"]
    )
    return run


def ask(task=0, *, prompt=(5, 3, 4), indices=(0, 1), key=KEY, turn=0, **sampling):
    return Request(
        task,
        list(prompt),
        list(indices),
        SamplingParams(**{"max_tokens": 8, **sampling}),
        key,
        turn,
    )


def tokens_of(samples):
    return [sample.tokens for sample in samples]


class Conformance:
    async def open(self) -> Subject:
        raise NotImplementedError

    @with_subject
    async def test_tokens_in_tokens_out(self, subject):
        request = ask(task=3, prompt=[4, 3, 5, 6], indices=[2, 0, 7])
        samples = await subject.source.sample(request)
        assert [sample.index for sample in samples] == [2, 0, 7]
        for sample in samples:
            check_sample(sample)
            assert all(0 <= token < subject.vocab for token in sample.tokens)
            assert sample.task == 3 and list(sample.prompt) == [4, 3, 5, 6]
            assert len(sample.tokens) == 8 and all(sample.trained) and sample.finish == "length"
            assert all(type(token) is int for token in sample.tokens)
            assert all(type(value) is float for value in sample.logprobs)

    @pytest.mark.parametrize(
        "how",
        [
            {},
            {"temperature": 0.7},
            {"top_k": 3},
            {"top_p": 0.6},
            {"temperature": 1.3, "top_k": 5, "top_p": 0.8},
            {"temperature": 0.0},
            {"min_p": 0.3},
            {"min_p": 0.1, "top_k": 12, "top_p": 0.9},
            {"repetition_penalty": 1.7, "temperature": 0.7},
            {"repetition_penalty": 1.3, "temperature": 0.0},
        ],
        ids=str,
    )
    @with_subject
    async def test_log_probs_are_those_of_the_distribution_drawn_from(self, subject, how):
        """Prompts of several lengths at once, so that positions and masks of mixed batches are
        seen.
        """
        if subject.rounding and how.keys() & {"top_k", "top_p", "min_p"}:
            pytest.skip("which tokens are cut off is a matter of rounding")
        requests = [
            ask(i, prompt=[3 + i, 5, 4, 3, 6][: 1 + i], indices=range(3), **how) for i in range(5)
        ]
        groups = await asyncio.gather(*map(subject.source.sample, requests))
        for request, samples in zip(requests, groups, strict=True):
            for sample in samples:
                logits = subject.logits(1, sample.prompt, sample.tokens)[:-1]
                penalty = request.sampling.repetition_penalty
                logits = penalized(logits, sample.prompt, sample.tokens, penalty)
                log_probs = logits.log_softmax(-1)
                expected = drawn_from(log_probs, request.sampling).gather(
                    1, torch.tensor(sample.tokens)[:, None]
                )[:, 0]
                got = torch.tensor(sample.logprobs, dtype=torch.float64)
                torch.testing.assert_close(got, expected, rtol=0, atol=subject.tolerance)
                if how.get("temperature") == 0:
                    assert torch.all(
                        expected
                        >= log_probs.amax(-1) - 2 * subject.tolerance * bool(subject.rounding)
                    )

    @pytest.mark.parametrize("how", [{}, {"temperature": 2.0, "top_k": 12, "top_p": 0.9}], ids=str)
    @pytest.mark.parametrize("over", ["indices", "tasks"])
    @with_subject
    async def test_tokens_are_drawn_with_these_probabilities(self, subject, how, over):
        """χ² over ten bins of about equal probability."""
        if subject.rounding and how:
            pytest.skip("which tokens are cut off is a matter of rounding")
        n, prompt = subject.draws, [5, 4]
        if over == "indices":
            drawn = await subject.source.sample(
                ask(indices=range(n), prompt=prompt, max_tokens=1, **how)
            )
        else:
            requests = [ask(i, indices=[0], prompt=prompt, max_tokens=1, **how) for i in range(n)]
            drawn = [
                sample for (sample,) in await asyncio.gather(*map(subject.source.sample, requests))
            ]
        expected = drawn_from(subject.log_probs(1, prompt), SamplingParams(max_tokens=1, **how))[
            0
        ].exp()
        ids = expected.argsort(descending=True)
        bins = torch.empty_like(ids)
        bins[ids] = (expected[ids].cumsum(0) * 10).clamp(max=9.999).floor().long()
        seen = torch.bincount(
            bins[torch.tensor([sample.tokens[0] for sample in drawn])], minlength=10
        )
        wanted = n * torch.zeros(10, dtype=torch.float64).index_add(0, bins, expected)
        assert seen[wanted == 0].sum() == 0, "what top_p or top_k leaves out was drawn"
        kept = wanted > 0
        # of 9 degrees of freedom: p < 1e-5
        assert ((seen - wanted)[kept] ** 2 / wanted[kept]).sum() < 40

    @with_subject
    async def test_tokens_of_a_completion_are_drawn_independently(self, subject):
        """z = F(token − 1) + v p(token), v uniform, is uniform for every token and tells nothing of
        the next one's.
        """
        rng, rows = torch.Generator().manual_seed(0), []
        for sample in await subject.source.sample(
            ask(indices=range(max(20, subject.draws // 20)), max_tokens=12)
        ):
            p = subject.log_probs(1, sample.prompt, sample.tokens)[:-1].exp()
            token = torch.tensor(sample.tokens)[:, None]
            below = p.cumsum(-1).gather(1, token) - p.gather(1, token)
            rows.append((below + p.gather(1, token) * torch.rand(token.shape, generator=rng))[:, 0])
        z = torch.stack(rows)
        before, after = z[:, :-1].flatten(), z[:, 1:].flatten()
        assert abs(torch.corrcoef(torch.stack([before, after]))[0, 1]) < 5 / len(before) ** 0.5
        bins = torch.bincount((z.flatten() * 10).clamp(max=9).long(), minlength=10)
        assert ((bins - z.numel() / 10) ** 2 / (z.numel() / 10)).sum() < 40

    @with_subject
    async def test_the_same_request_gives_the_same_tokens_whatever_else_is_under_way(self, subject):
        requests = [
            ask(i, prompt=[3 + i, 4, 5][: 1 + i % 3], indices=range(3), max_tokens=4 + 3 * i)
            for i in range(5)
        ]
        alone = [await subject.source.sample(request) for request in requests]
        together = await asyncio.gather(*map(subject.source.sample, requests))
        for got, wanted in zip(together, alone, strict=True):
            subject.check_same(got, wanted)
        late = []
        for request in reversed(requests):  # each joins while the earlier ones are under way
            late.append(asyncio.create_task(subject.source.sample(request)))
            await asyncio.sleep(0.002)
        for task, wanted in zip(reversed(late), alone, strict=True):
            subject.check_same(await task, wanted)

    @with_subject
    async def test_completions_of_a_group_can_be_asked_for_one_by_one(self, subject):
        group = await subject.source.sample(ask(indices=range(4)))
        for index in (3, 0, 2):
            subject.check_same(await subject.source.sample(ask(indices=[index])), [group[index]])

    @with_subject
    async def test_indices_tasks_turns_and_keys_differ(self, subject):
        requests = [ask(), ask(1), ask(turn=1), ask(key=KEY + 1)]
        samples = [
            sample for request in requests for sample in await subject.source.sample(request)
        ]
        completions = [tuple(tokens) for tokens in tokens_of(samples)]
        assert len(set(completions)) == len(completions) == 8

    @with_subject
    async def test_a_stop_token_is_the_last_one(self, subject):
        free = await subject.source.sample(ask(indices=range(6), max_tokens=12))
        stop = free[0].tokens[3]
        stopped = await subject.source.sample(ask(indices=range(6), max_tokens=12, stop=(stop,)))
        for before, after in zip(free, stopped, strict=True):
            end = before.tokens.index(stop) + 1 if stop in before.tokens else 12
            assert after.tokens == before.tokens[:end]
            assert after.finish == ("stop" if stop in before.tokens else "length")
            assert [tuple(span) for span in after.spans] == [(1, 0, end)]

    @with_subject
    async def test_a_stop_word_ends_a_completion_that_is_otherwise_the_same(self, subject):
        tokenizer = getattr(subject.source, "tokenizer", None)
        if tokenizer is None:
            pytest.skip("without a tokenizer there are no words")
        whole = await subject.source.sample(ask(indices=range(12), max_tokens=24))
        word = next(letter for letter in whole[0].text[8:] if letter.isascii() and letter.isalnum())
        request = ask(indices=range(12), max_tokens=24, stop_words=(word,))
        stopped = await subject.source.sample(request)
        for sample, other in zip(stopped, whole, strict=True):
            assert sample.tokens == other.tokens[: len(sample.tokens)]
            assert (sample.finish == "stop") == (word in sample.text)
            assert word not in tokenizer.decode(sample.tokens[:-1], skip_special_tokens=True)
        assert stopped[0].finish == "stop"

    @with_subject
    async def test_after_publish_completions_come_from_the_new_weights(self, subject):
        assert await subject.source.version() == 1
        before = await subject.source.sample(ask(indices=range(4)))
        await subject.publish(2)
        assert await subject.source.version() == 2
        after = await subject.source.sample(ask(indices=range(4)))
        assert tokens_of(before) != tokens_of(after)
        self.check_spans(subject, [*before, *after])
        assert {sample.spans[0].version for sample in after} == {2}

    @with_subject
    async def test_completions_under_way_go_on_with_the_new_weights_and_say_from_where(
        self, subject
    ):
        """The context is computed anew under the new weights: stale keys and values would show in
        the log-probs.
        """
        version, wait = 1, 0.01
        for _ in range(20):
            requests = [
                ask(i, indices=range(2), prompt=[4] * (1 + i), max_tokens=subject.long)
                for i in range(3)
            ]
            under_way = [
                asyncio.create_task(subject.source.sample(request)) for request in requests
            ]
            await asyncio.sleep(wait)
            version += 1
            await subject.publish(version)
            samples = [sample for task in under_way for sample in await task]
            self.check_spans(subject, samples)
            assert all(len(sample.tokens) == subject.long for sample in samples)
            if any(len(sample.spans) == 2 for sample in samples):
                return
            late = all(span.version < version for sample in samples for span in sample.spans)
            wait *= 0.7 if late else 1.7  # a server may begin late, and be done soon
        pytest.fail(
            "no weights were published while a completion was under way: make Subject.long longer"
        )

    def check_spans(self, subject, samples):
        """Spans are in order and cover the completion, and the log-probs of each are those of its
        version.
        """
        for sample in samples:
            assert sample.spans[0].start == 0 and sample.spans[-1].end == len(sample.tokens)
            assert all(
                a.end == b.start and a.version < b.version
                for a, b in zip(sample.spans, sample.spans[1:], strict=False)
            )
            for version, start, end in sample.spans:
                expected = subject.log_probs(version, sample.prompt, sample.tokens)[start:end]
                expected = expected.gather(1, torch.tensor(sample.tokens[start:end])[:, None])[:, 0]
                got = torch.tensor(sample.logprobs[start:end], dtype=torch.float64)
                torch.testing.assert_close(got, expected, rtol=0, atol=subject.tolerance)

    @with_subject
    async def test_after_a_restart_the_version_is_unknown_until_weights_are_published(
        self, subject
    ):
        if subject.restart is None:
            pytest.skip("it lives and dies with the trainer")
        await subject.restart()
        assert await subject.source.version() is None
        await subject.publish(2)
        assert await subject.source.version() == 2
        self.check_spans(subject, await subject.source.sample(ask(indices=range(3))))

    @pytest.mark.parametrize(
        ("bad", "says"),
        [
            (lambda subject: {"prompt": []}, "prompt"),
            (lambda subject: {"prompt": [3, subject.vocab]}, "vocabulary"),
            (lambda subject: {"prompt": [3, -1]}, "vocabulary"),
            (lambda subject: {"prompt": [3] * (subject.context or 0)}, "max_tokens"),
            (lambda subject: {"max_tokens": (subject.context or 0) + 1}, "max_tokens"),
            (lambda subject: {"indices": []}, "indices"),
            (lambda subject: {"indices": [1, 1]}, "indices"),
            (lambda subject: {"stop": (subject.vocab,)}, "stop"),
        ],
        ids=["empty", "too large", "negative", "over-long", "no room", "no index", "twice", "stop"],
    )
    @with_subject
    async def test_what_cannot_be_completed_is_refused_and_disturbs_no_other(
        self, subject, bad, says
    ):
        wrong = bad(subject)
        if says == "max_tokens" and subject.context is None:
            pytest.skip("nothing limits its context")
        alone = await subject.source.sample(ask())
        company, refused = await asyncio.gather(
            subject.source.sample(ask()),
            subject.source.sample(ask(9, **wrong)),
            return_exceptions=True,
        )
        assert isinstance(refused, REFUSED), refused
        assert says in str(refused)
        subject.check_same(company, alone)

    @with_subject
    async def test_a_request_that_is_given_up_disturbs_no_other(self, subject):
        alone = await subject.source.sample(ask(max_tokens=30))
        given_up = asyncio.create_task(subject.source.sample(ask(1, max_tokens=subject.long)))
        kept = asyncio.create_task(subject.source.sample(ask(max_tokens=30)))
        await asyncio.sleep(0.01)
        given_up.cancel()
        subject.check_same(await kept, alone)
        with pytest.raises(asyncio.CancelledError):
            await given_up
        subject.check_same(await subject.source.sample(ask(max_tokens=30)), alone)

    @with_subject
    async def test_close_ends_it(self, subject):
        under_way = asyncio.create_task(subject.source.sample(ask(max_tokens=subject.long)))
        await asyncio.sleep(0)
        await subject.source.close()
        with pytest.raises(SourceError, match="closed"):
            await asyncio.wait_for(under_way, subject.patience)
        with pytest.raises(SourceError, match="closed"):
            await subject.source.sample(ask())
        await subject.source.close()  # twice does no harm
