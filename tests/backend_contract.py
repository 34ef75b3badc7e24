"""What every backend must do, whatever it is made of.

A test module inherits ``BackendContract`` in a class named ``Test...`` and names its backend; the
marks of that class say where it can run. Shapes are TINY's and steps are few, so that Triton's
interpreter gets through them.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from tests.decoding import Decoding
from triton_mega.backends import DecodeBackend, StepOutput, load_backend
from triton_mega.reference import CONTRACTS, Contract, DecoderOutput
from triton_mega.spec import TINY, DecoderSpec, Role
from triton_mega.testing import assert_close, relative_error
from triton_mega.weights import DecoderWeights, random_weights

LAST = 5
MAX_POSITIONS = LAST + 1
KV_FLIP_BOUND = 5e-4
"""One element of K or V may round to the other of two neighbours in bf16 (tests/test_reference)."""

by_role = pytest.mark.parametrize("role", ["talker", "code_predictor"])


def random_rows(spec: DecoderSpec, n: int, seed: int = 0) -> torch.Tensor:
    """Returns ``n`` unit normal input rows in bf16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, spec.hidden_size, generator=generator).bfloat16()


def reference(
    backend: DecodeBackend, rules: Contract, rows: torch.Tensor, position: int, head: int
) -> tuple[Decoding, DecoderOutput]:
    """Runs the reference on a copy of the backend's cache; the rows before ``position`` count."""
    weights = backend.weights.to("cpu")
    decoding = Decoding(backend.spec, weights, rules, backend.cache.max_positions)
    decoding.tables = backend.cos.cpu(), backend.sin.cpu()
    decoding.cache.copy_from(backend.cache)
    return decoding, decoding(rows.cpu(), position, head)


def oracle_and_bound(
    backend: DecodeBackend, rows: torch.Tensor, position: int, head: int
) -> tuple[Decoding, DecoderOutput, float]:
    """Returns an fp64 run and the error that the backend's contract allows against it.

    A backend in bf16 may be at most twice as far off as the official arithmetic is.
    """
    if backend.contract != "hf_bf16":
        rules = CONTRACTS[backend.contract].in_fp64()
        return *reference(backend, rules, rows, position, head), KV_FLIP_BOUND
    decoding, exact = reference(backend, CONTRACTS["hf_fp32"].in_fp64(), rows, position, head)
    _, official = reference(backend, CONTRACTS["hf_bf16"], rows, position, head)
    return decoding, exact, 2 * relative_error(official.hidden, exact.hidden)


def assert_same(got: StepOutput, want: StepOutput) -> None:
    """Both outputs have the same bits."""
    assert torch.equal(got.hidden, want.hidden)
    assert torch.equal(got.logits, want.logits)


class BackendContract:
    """The tests; ``backend`` is a name of ``BACKENDS``."""

    backend: ClassVar[str]
    device: ClassVar[str] = "cpu"

    def make(
        self, spec: DecoderSpec, weights: DecoderWeights, max_positions: int = MAX_POSITIONS
    ) -> DecodeBackend:
        """Returns a fresh engine."""
        return load_backend(self.backend)(spec, weights, max_positions=max_positions)

    def engine(self, role: Role, history: int = 0) -> DecodeBackend:
        """Returns a fresh engine on TINY whose cache holds ``history`` rows, NaN after them."""
        spec = TINY.decoders[role]
        engine = self.make(spec, random_weights(spec, seed=3).to(self.device))
        engine.cache.fill_random(history, seed=4)
        return engine

    def rows(self, engine: DecodeBackend, n: int, seed: int = 0) -> torch.Tensor:
        return random_rows(engine.spec, n, seed).to(self.device)

    @by_role
    @pytest.mark.parametrize("position", [0, 1, LAST])
    def test_step_is_right(self, role: Role, position: int) -> None:
        engine = self.engine(role, history=position)
        if position:  # one row that dominates: dropping it shows, which random rows do not
            engine.cache.v[:, :, position - 1] *= 50
        rows, head = self.rows(engine, 1), engine.spec.num_lm_heads - 1
        decoding, want, bound = oracle_and_bound(engine, rows, position, head)
        before = engine.cache.k[:, :, :position].clone(), engine.cache.v[:, :, :position].clone()
        got = engine.run_steps(rows, position, head)

        dtype = torch.bfloat16 if engine.contract == "hf_bf16" else torch.float32
        assert got.hidden.shape == (1, engine.spec.hidden_size)
        assert got.logits.shape == (1, engine.spec.vocab_size)
        assert got.hidden.dtype == got.logits.dtype == dtype
        assert got.hidden.device == got.logits.device == engine.device
        assert_close(got.hidden, want.hidden, bound, "hidden")
        assert_close(got.logits, want.logits, 2 * bound, "logits")
        for name, old in zip(("k", "v"), before, strict=True):
            cache, oracle = getattr(engine.cache, name), getattr(decoding.cache, name)
            assert torch.equal(cache[:, :, :position], old), f"{name}: history was changed"
            new = slice(position, position + 1)
            assert_close(cache[:, :, new], oracle[:, :, new], 2 * bound + 2e-3, f"new {name}")

    @by_role
    def test_n_rows_are_n_single_steps(self, role: Role) -> None:
        together, apart = self.engine(role), self.engine(role)
        rows = self.rows(together, 3)
        want = together.run_steps(rows, 0)
        steps = [apart.run_steps(rows[p : p + 1], p) for p in range(3)]
        hidden = torch.cat([step.hidden for step in steps])
        assert_same(StepOutput(hidden, torch.cat([step.logits for step in steps])), want)
        assert torch.equal(apart.cache.k[:, :, :3], together.cache.k[:, :, :3])
        assert torch.equal(apart.cache.v[:, :, :3], together.cache.v[:, :, :3])
        _, oracle, bound = oracle_and_bound(self.engine(role), rows, 0, 0)
        assert_close(want.hidden, oracle.hidden, bound, "hidden")

    @by_role
    def test_unused_rows_do_not_leak(self, role: Role) -> None:
        poisoned, clean = self.engine(role, history=2), self.engine(role, history=2)
        for tensor in (clean.cache.k, clean.cache.v):
            tensor[:, :, 2:] = 0
        rows = self.rows(clean, 1)
        assert poisoned.cache.k[:, :, 2:].isnan().all()
        want = clean.run_steps(rows, 2)
        assert torch.isfinite(want.logits).all()
        assert_same(poisoned.run_steps(rows, 2), want)
        poisoned.cache.fill_random(2, seed=4)  # poisons the rest once more
        assert_same(poisoned.run_steps(rows, 2), want)

    @by_role
    def test_nan_is_not_hidden(self, role: Role) -> None:
        engine = self.engine(role, history=2)
        rows = self.rows(engine, 1)
        rows[0, 7] = float("nan")
        assert engine.run_steps(rows, 2).logits.isnan().all()
        later = self.rows(engine, 1, seed=1)  # reads what the step before has cached
        assert engine.run_steps(later, 3).logits.isnan().all()
        engine = self.engine(role, history=2)
        engine.cache.v[0, 0, 1, 3] = float("nan")
        assert engine.run_steps(self.rows(engine, 1), 2).logits.isnan().all()

    @by_role
    def test_position_can_go_back_and_on(self, role: Role) -> None:
        engine = self.engine(role, history=3)
        rows, other = self.rows(engine, 2), self.rows(engine, 2, seed=1)
        first = engine.run_steps(rows, 3)
        engine.run_steps(other, 3)
        assert not torch.equal(engine.run_steps(other, 3).logits, first.logits)
        assert_same(engine.run_steps(rows, 3), first)

    @by_role
    def test_output_is_the_callers(self, role: Role) -> None:
        engine = self.engine(role)
        rows = self.rows(engine, 2)
        first = engine.run_steps(rows[:1], 0)
        kept = StepOutput(first.hidden.clone(), first.logits.clone())
        engine.run_steps(rows[1:], 1)
        assert_same(first, kept)

    @by_role
    def test_two_engines_do_not_disturb_each_other(self, role: Role) -> None:
        alone, left, right = (self.engine(role) for _ in range(3))
        rows, other = self.rows(alone, 2), self.rows(alone, 2, seed=1)
        want = alone.run_steps(rows, 0)
        steps = []
        for p in range(2):
            steps.append(left.run_steps(rows[p : p + 1], p))
            right.run_steps(other[p : p + 1], p)
        hidden = torch.cat([step.hidden for step in steps])
        assert_same(StepOutput(hidden, torch.cat([step.logits for step in steps])), want)

    def test_every_head_is_its_own(self) -> None:
        engine = self.engine("code_predictor")
        rows = self.rows(engine, 1)
        for head in (0, 1, engine.spec.num_lm_heads - 1):
            got = engine.run_steps(rows, 0, head)
            weight = engine.weights.lm_head[head].double()
            assert_close(got.logits, got.hidden.double() @ weight.T, 1e-2, f"head {head}")

    def test_wrong_input_is_named(self) -> None:
        engine = self.engine("talker")
        rows = self.rows(engine, 2)
        for bad, position, head, message in (
            (rows[:, :-1], 0, 0, r"inputs_embeds: expected \[n, 96\], got \[2, 95\]"),
            (rows[0], 0, 0, r"inputs_embeds: expected \[n, 96\], got \[96\]"),
            (rows[:0], 0, 0, r"inputs_embeds: expected \[n, 96\], got \[0, 96\]"),
            (rows.float(), 0, 0, "inputs_embeds: expected bfloat16 on .*got torch.float32"),
            (rows, LAST, 0, "position: 5 . 2 steps does not fit the cache of 6 rows"),
            (rows, -1, 0, "position: -1"),
            (rows, 0, 1, "head: expected 0 to 0, got 1"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.run_steps(bad, position, head)

    def test_other_specs_weights_are_refused(self) -> None:
        weights = random_weights(TINY.predictor, seed=3).to(self.device)
        with pytest.raises(ValueError, match=r"weights\.input_norm: expected .*another spec"):
            self.make(TINY.talker, weights)
