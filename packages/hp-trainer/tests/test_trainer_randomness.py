import torch

from hp_base.seeds import derive_seed
from hp_trainer.model.randomness import generator, uniform


def test_seeds_differ_by_purpose_and_do_not_depend_on_the_process() -> None:
    seeds = {derive_seed(s, *p) for s in range(3) for p in (("a",), ("b",), ("a", 1), ("a", 2))}
    assert len(seeds) == 12


def test_parts_cannot_run_into_each_other() -> None:
    assert derive_seed(0, "a", "b") != derive_seed(0, "ab")
    assert derive_seed(1, "2") != derive_seed(12)


def test_a_generator_is_a_function_of_its_purpose() -> None:
    draws = [torch.rand(4, generator=generator(7, "x")) for _ in range(2)]
    assert torch.equal(*draws)
    assert not torch.equal(draws[0], torch.rand(4, generator=generator(8, "x")))


def test_uniform_numbers_follow_the_sequence_wherever_it_is_batched() -> None:
    key = derive_seed(0, "dropout", 3)
    whole = uniform(key, torch.arange(8), torch.arange(16), 32)
    parts = [uniform(key, torch.arange(i, i + 2), torch.arange(16), 32) for i in range(0, 8, 2)]
    assert torch.equal(whole, torch.cat(parts))


def test_uniform_numbers_are_uniform_and_uncorrelated() -> None:
    x = uniform(derive_seed(0), torch.arange(64), torch.arange(64), 64).double()
    assert abs(float(x.mean()) - 0.5) < 3e-3
    assert abs(float(x.var()) - 1 / 12) < 1e-3
    centred = x - 0.5
    for shifted in (centred.roll(1, 0), centred.roll(1, 1), centred.roll(1, 2)):
        assert abs(float((centred * shifted).mean())) * 12 < 1e-2
    assert len(x.unique()) > 0.98 * x.numel() * (1 - x.numel() / 2**25)


def test_sequence_indices_beyond_32_bits_are_told_apart() -> None:
    a, b = uniform(1, torch.tensor([5, 5 + 2**32]), torch.arange(4), 4)
    assert not torch.equal(a, b)
