"""A Bonfire program under PyTorch's own launcher."""
import pathlib
import sys
import unittest

from probe import BUILD, PROBE, run

TORCHRUN = pathlib.Path(sys.executable).parent / "torchrun"


def torchrun(ranks, *command):
    return run([TORCHRUN, "--no-python", "--nproc-per-node", ranks, *command], timeout=300, OMP_NUM_THREADS="1")


class Torchrun(unittest.TestCase):
    def test_ranks_meet_and_add_up(self):
        said = torchrun(3, PROBE, "world")
        for rank in range(3):
            self.assertIn(f"rank {rank} of 3: local rank {rank}, sum 3", said)

    def test_an_example_learns_as_it_does_alone(self):
        def losses(text):
            return [float(line.split()[-1]) for line in text.splitlines() if "loss" in line]

        example = BUILD / "example_data_parallel"
        alone, together = losses(run([example])), losses(torchrun(2, example))
        self.assertEqual(len(alone), 3)
        for one, two in zip(alone, together, strict=True):
            self.assertAlmostEqual(one, two, delta=1e-4 * one)


if __name__ == "__main__":
    unittest.main()
